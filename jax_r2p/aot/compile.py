"""Compile variants to cubins, each in a fresh process, and check what came out.

A fresh process each, because the compiler keeps mutable state: names on function objects, environment
switches that are read once, caches. So the bytes of one variant depend on its sources and on the toolchain,
but on nothing compiled before.
"""

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from jax_r2p._manifest import Parameter, Role, Toolchain, Variant
from jax_r2p.aot import checks, elf, parameters
from jax_r2p.aot.variants import ARCH, VariantRow

COMPILER = "nvidia-cutlass-dsl"
"""The distribution whose version decides the kernels' bytes."""

_SWITCHES = "CUTE_DSL_"
_ENTRY_PREFIX = "r2p_"


class BuildError(Exception):
    """A variant cannot be built. The text starts with its name."""


@dataclasses.dataclass(frozen=True)
class CompiledVariant:
    """A kernel and its row of the manifest."""

    variant: Variant
    cubin: bytes
    toolchain: Toolchain


def compile_variants(rows: Sequence[VariantRow], *, jobs: int | None = None) -> Iterator[CompiledVariant]:
    """Compiles and checks `rows`, and yields each when it is ready, in no fixed order.

    Args:
      rows: What to compile.
      jobs: How many to compile at once; None for one per processor.

    Raises:
      BuildError: There is no compiler, or a variant does not compile or breaks a rule of `checks`. Those not
        yet started are dropped then.
    """
    require_compiler()
    if not rows:
        return
    workers = min(jobs or os.cpu_count() or 1, len(rows))
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    try:
        pending = {pool.submit(_compile_in_worker, row): row.name for row in rows}
        for future in concurrent.futures.as_completed(pending):
            try:
                yield future.result()
            except BrokenProcessPool as error:
                # The pool cannot tell which worker died.
                unfinished = ", ".join(
                    sorted(name for other, name in pending.items() if not _succeeded(other))
                )
                raise BuildError(f"one of {unfinished}: the compiler's process died") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def require_compiler() -> None:
    """Checks that the kernel compiler is installed.

    Raises:
      BuildError: It is not.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise BuildError(f"the kernel compiler {COMPILER} is not installed: pip install jax_r2p[aot]")


def _succeeded(future: concurrent.futures.Future[CompiledVariant]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _compile_in_worker(row: VariantRow) -> CompiledVariant:
    """Compiles one row in this process, which must not have imported the compiler before."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            _set_switches(folder)
            cubin, ptx, shared_memory = _compile(row)
        facts = elf.read_kernel(cubin)
        expected = parameters.load_parameters(row.config.role)
        problems = checks.check_kernel(
            row, facts, entry=entry_symbol(row.name), shared_memory=shared_memory, parameters=expected
        )
        if problems:
            raise BuildError("\n".join(f"{row.name}: {problem}" for problem in problems))
        return CompiledVariant(
            variant=_describe(row, cubin, facts, shared_memory, [name for name, _ in expected]),
            cubin=cubin,
            toolchain=_toolchain(ptx, facts),
        )
    except BuildError:
        raise
    except Exception as error:  # noqa: BLE001
        # Errors of the compiler may not survive the way to the parent process. Their text does.
        raise BuildError(f"{row.name}: {''.join(traceback.format_exception(error)).rstrip()}") from None


def _set_switches(folder: str) -> None:
    """Sets the compiler's environment to exactly what the build wants.

    Inherited switches are dropped, since some of them change the code. Without an architecture the compiler
    asks the driver for one, and takes Blackwell where there is no driver.
    """
    for name in [name for name in os.environ if name.startswith(_SWITCHES)]:
        del os.environ[name]
    os.environ[f"{_SWITCHES}ARCH"] = ARCH
    os.environ[f"{_SWITCHES}DUMP_DIR"] = folder
    os.environ[f"{_SWITCHES}CACHE_DIR"] = folder


def _compile(row: VariantRow) -> tuple[bytes, str, int]:
    """Returns the cubin, the PTX it was assembled from and the bytes of dynamic shared memory."""
    import cutlass.cute as cute

    from jax_r2p.kernels.backward import AttentionBackward
    from jax_r2p.kernels.forward import AttentionForward
    from jax_r2p.kernels.preprocess import AttentionPreprocess

    kernel_types: dict[Role, Any] = {
        "forward": AttentionForward,
        "backward": AttentionBackward,
        "preprocess": AttentionPreprocess,
    }
    kernel_type = kernel_types[row.config.role]
    kernel = kernel_type(row.config)
    # The names live on the function objects, not on this kernel. The kernel's gets "_0", the launch's number.
    short = {"remove_cutlass_symbol": True, "keep_mangled_name": False}
    kernel_type.kernel.set_name_prefix(f"{_ENTRY_PREFIX}{row.name}", **short)
    kernel_type.__call__.set_name_prefix(f"{_ENTRY_PREFIX}{row.name}_host", **short)
    # Only a kept cubin is handed out, and a folder that does not exist is no error but gives a path here.
    compiled = cute.compile[cute.KeepCUBIN, cute.KeepPTX](kernel, *kernel.compile_arguments())
    cubin, ptx = compiled.__cubin__, compiled.__ptx__
    if not isinstance(cubin, bytes) or not isinstance(ptx, str):
        raise BuildError(
            f"{row.name}: the compiler kept no cubin: {type(cubin).__name__}, {type(ptx).__name__}"
        )
    return cubin, ptx, _launched_shared_memory(str(compiled.ir_module))


def _launched_shared_memory(host_code: str) -> int:
    """Returns the bytes of dynamic shared memory in the compiler's own launch, from its host code.

    The number is nowhere else: the compiler adds up what the kernel allocates, and the cubin does not tell.
    """
    # In the LLVM dialect: where the launch's third field lies, what is stored there, and what that is.
    field = re.search(
        r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : .*struct<\(array<3 x i32>, array<3 x i32>, i64,",
        host_code,
    )
    store = field and re.compile(rf"llvm\.store (%\d+), {field[1]} : i64").search(host_code, field.end())
    constant = store and rf"{store[1]} = llvm\.mlir\.constant\((\d+) : i64\)"
    sizes = re.findall(constant, host_code[: store.start()]) if store and constant else []
    if not sizes:
        raise ValueError(
            "no constant size of shared memory in the compiler's host code: did its form change?"
        )
    return int(sizes[-1])


def entry_symbol(name: str) -> str:
    """Symbol of the kernel of variant `name`."""
    return f"{_ENTRY_PREFIX}{name}_0"


def _describe(
    row: VariantRow, cubin: bytes, facts: elf.KernelFacts, shared_memory: int, names: Iterable[str]
) -> Variant:
    config = row.config
    slots = zip(names, facts.parameters, strict=True)
    return Variant(
        name=row.name,
        role=config.role,
        file=f"{row.name}.cubin",
        sha256=hashlib.sha256(cubin).hexdigest(),
        size=len(cubin),
        entry=facts.entry,
        arch=facts.arch,
        dtype=config.dtype,
        head_dim=config.head_dim,
        value_head_dim=config.value_head_dim,
        mask=config.mask,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        threads=config.threads,
        shared_memory=shared_memory,
        min_blocks=config.min_blocks,
        least_span=row.least_span,
        parameters=tuple(Parameter(name=name, offset=slot.offset, size=slot.size) for name, slot in slots),
        registers=facts.registers,
        spills=facts.frame_size,
    )


def _toolchain(ptx: str, facts: elf.KernelFacts) -> Toolchain:
    return Toolchain(
        cutlass_dsl=importlib.metadata.version(COMPILER),
        nvvm=_search(r"^// Cuda compilation tools, release [\d.]+, V([\d.]+)$", ptx),
        ptx=_search(r"^\.version ([\d.]+)$", ptx),
        cuda=facts.cuda_version,
    )


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no line {pattern!r} in the PTX: did the compiler's header change?")
    return match[1]

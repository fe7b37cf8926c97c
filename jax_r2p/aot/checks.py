"""The rules that a compiled kernel must keep, or else the build fails."""

from collections.abc import Sequence

from jax_r2p.aot.elf import KernelFacts
from jax_r2p.aot.variants import ARCH, VariantRow
from jax_r2p.kernels.config import REGISTER_FILE, SHARED_MEMORY_PER_SM

# The SM hands out registers to a warp in units of 256, which is 8 a thread.
_REGISTER_STEP = 8


def check_kernel(
    row: VariantRow,
    facts: KernelFacts,
    *,
    entry: str,
    shared_memory: int,
    parameters: Sequence[tuple[str, int]],
) -> list[str]:
    """Returns what is wrong with a compiled kernel, one sentence each; empty if nothing is.

    Args:
      row: What was asked for.
      facts: What the cubin says.
      entry: Symbol which the kernel must have.
      shared_memory: Bytes of dynamic shared memory that the kernel allocates.
      parameters: Name and size in bytes of each parameter that the launcher packs, in order.
    """
    problems = []
    if facts.entry != entry:
        problems.append(f"entry symbol must be {entry!r}, got {facts.entry!r}")
    if facts.arch != ARCH:
        problems.append(f"target must be {ARCH}, got {facts.arch}")
    if facts.threads != (row.config.threads, 1, 1):
        problems.append(f"threads per block must be {(row.config.threads, 1, 1)}, got {facts.threads}")
    if facts.frame_size != row.declared_spills:
        problems.append(
            f"uses {facts.frame_size} bytes of local memory per thread (spilled registers, or an array with "
            f"run-time indices), {row.declared_spills} are declared in variants.py"
        )
    if shared_memory != row.config.shared_memory:
        problems.append(
            f"config.py counts {row.config.shared_memory} bytes of dynamic shared memory, "
            f"the kernel allocates {shared_memory}"
        )
    problems += _check_shares(row, facts, shared_memory)
    problems += _check_parameters([slot.size for slot in facts.parameters], parameters)
    return problems


def _check_shares(row: VariantRow, facts: KernelFacts, shared_memory: int) -> list[str]:
    """Whether `min_blocks` of the kernel fit on an SM together."""
    blocks = row.config.min_blocks
    problems = []
    shared = shared_memory + facts.static_shared_memory
    if shared * blocks > SHARED_MEMORY_PER_SM:
        problems.append(
            f"needs {shared_memory} bytes of dynamic and {facts.static_shared_memory} of static shared "
            f"memory, an SM has {SHARED_MEMORY_PER_SM // blocks} for each of {blocks} blocks"
        )
    registers = -(-facts.registers // _REGISTER_STEP) * _REGISTER_STEP * row.config.threads
    if registers * blocks > REGISTER_FILE:
        problems.append(
            f"needs {registers} registers, an SM has {REGISTER_FILE // blocks} for each of {blocks} blocks"
        )
    return problems


def _check_parameters(sizes: Sequence[int], expected: Sequence[tuple[str, int]]) -> list[str]:
    problems = []
    if len(sizes) != len(expected):
        names = ", ".join(name for name, _ in expected)
        problems.append(
            f"the launcher packs {len(expected)} parameters ({names}), the kernel takes {len(sizes)}"
        )
    problems += [
        f"parameter {index} must be {name} of {size} bytes, the kernel takes {got} bytes"
        for index, (got, (name, size)) in enumerate(zip(sizes, expected, strict=False))
        if got != size
    ]
    return problems

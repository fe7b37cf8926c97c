"""Runs the host code that the kernel compiler makes for a launch, with no GPU, and tells what it hands over.

That code packs the parameters as the kernel expects them, since both come from one source, and so it is what
the launcher in ffi/ has to agree with. `capture` compiles a variant in a process of its own; this file is
also that process's program.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

NATIVE = pathlib.Path(__file__).resolve().parent / "native"

_MAX_PARAMETERS, _MAX_PARAMETER_SIZE, _MAX_ATTRIBUTES = 64, 128, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCall:
    """Arguments of the `__call__` of a kernel class, in its order.

    Attributes:
      arguments: But for the stream: ("array", address, shape) with a shape of rank 1 or 4, ("pointer",
        address) for an array of constant shape, ("int64", number or address) or ("int32", number).
      stream: A number to be found again.
    """

    arguments: Sequence[tuple[Any, ...]]
    stream: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLaunch:
    """What was launched.

    Attributes:
      grid: Blocks along x, y and z.
      block: Threads along x, y and z.
      shared_memory: Bytes.
      stream: As in the call.
      attributes: Launch attributes that are on, by number: all of those seen are flags.
      parameters: The bytes of each kernel parameter.
    """

    grid: list[int]
    block: list[int]
    shared_memory: int
    stream: int
    attributes: list[int]
    parameters: list[bytes]


def capture(variant: str, parameter_sizes: Sequence[int], calls: Sequence[HostCall]) -> list[HostLaunch]:
    """Compiles `variant` and returns what each of `calls` launches."""
    job = {
        "variant": variant,
        "parameter_sizes": list(parameter_sizes),
        "calls": [dataclasses.asdict(call) for call in calls],
    }
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{variant}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    launches = json.loads(done.stdout.splitlines()[-1])
    return [
        HostLaunch(**{**launch, "parameters": [bytes.fromhex(value) for value in launch["parameters"]]})
        for launch in launches
    ]


class _Captured(ctypes.Structure):
    _fields_ = (
        ("launches", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_memory", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
        ("attribute_count", ctypes.c_uint32),
        ("attribute_ids", ctypes.c_uint32 * _MAX_ATTRIBUTES),
        ("attribute_values", ctypes.c_int32 * _MAX_ATTRIBUTES),
        ("parameters", (ctypes.c_uint8 * _MAX_PARAMETER_SIZE) * _MAX_PARAMETERS),
    )


class _Array4(ctypes.Structure):
    """How host code takes an array of rank 4 with a contiguous last axis."""

    _fields_ = (("data", ctypes.c_void_p), ("shape", ctypes.c_int32 * 4), ("strides", ctypes.c_int64 * 3))


class _Array1(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("shape", ctypes.c_int32 * 1))


def _export(variant: str, folder: pathlib.Path) -> ctypes.CDLL:
    """Compiles the variant with its host code, and links that with the stand-in for the run-time library."""
    from jax_r2p.aot.variants import ARCH, VARIANTS

    os.environ["CUTE_DSL_ARCH"] = ARCH
    os.environ["CUTE_DSL_CACHE_DIR"] = str(folder)
    import cutlass.cute as cute

    from jax_r2p.kernels.backward import AttentionBackward
    from jax_r2p.kernels.forward import AttentionForward
    from jax_r2p.kernels.preprocess import AttentionPreprocess

    config = VARIANTS[variant].config
    kernel_type: Any = {
        "forward": AttentionForward,
        "backward": AttentionBackward,
        "preprocess": AttentionPreprocess,
    }[config.role]
    # What is packed does not depend on what the kernel does with it, which takes most of the time to compile.
    # Its parameters and its shared memory are declared elsewhere.
    for role in ("produce", "consume", "add_dquery", "finish"):
        if hasattr(kernel_type, role):
            setattr(kernel_type, role, lambda self, *operands: None)
    kernel = kernel_type(config)
    kernel_type.__call__.set_name_prefix("host", remove_cutlass_symbol=True, keep_mangled_name=False)
    cute.compile(kernel, *kernel.compile_arguments()).export_to_c(
        str(folder), "kernel", function_prefix="r2p"
    )

    library = folder / "kernel.so"
    # -Bsymbolic: this process has loaded the true run-time library too, and must not prefer it.
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-Wl,-Bsymbolic"]
    subprocess.run(
        [*command, str(NATIVE / "runtime_stub.c"), str(folder / "kernel.o"), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


def _argument(kind: str, value: int, shape: Sequence[int] = ()) -> Any:
    if kind == "array" and len(shape) == 4:
        _, length, heads, width = shape
        strides = (length * heads * width, heads * width, width)
        return _Array4(value, (ctypes.c_int32 * 4)(*shape), (ctypes.c_int64 * 3)(*strides))
    if kind == "array":
        return _Array1(value, (ctypes.c_int32 * 1)(*shape))
    return {"pointer": ctypes.c_void_p, "int64": ctypes.c_int64, "int32": ctypes.c_int32}[kind](value)


def _launch(library: ctypes.CDLL, call: HostCall, parameter_sizes: Sequence[int]) -> dict[str, Any]:
    arguments = [
        *(_argument(*argument) for argument in call.arguments),
        ctypes.c_void_p(call.stream),
        ctypes.c_int32(-1),  # becomes the result
    ]
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    captured = _Captured.in_dll(library, "captured")
    ctypes.memset(ctypes.byref(captured), 0, ctypes.sizeof(captured))
    library._mlir_r2p__mlir_ciface_host(pointers, ctypes.c_int32(len(arguments)))
    if (arguments[-1].value, captured.launches) != (0, 1):
        raise RuntimeError(f"host code returned {arguments[-1].value} after {captured.launches} launches")
    attributes = [
        captured.attribute_ids[i] for i in range(captured.attribute_count) if captured.attribute_values[i]
    ]
    return {
        "grid": list(captured.grid),
        "block": list(captured.block),
        "shared_memory": captured.shared_memory,
        "stream": captured.stream,
        "attributes": attributes,
        "parameters": [bytes(captured.parameters[i][:size]).hex() for i, size in enumerate(parameter_sizes)],
    }


def _main() -> None:
    job = json.load(sys.stdin)
    sizes = job["parameter_sizes"]
    with tempfile.TemporaryDirectory() as folder:
        library = _export(job["variant"], pathlib.Path(folder))
        ctypes.c_int32.in_dll(library, "parameter_count").value = len(sizes)
        (ctypes.c_uint32 * _MAX_PARAMETERS).in_dll(library, "parameter_sizes")[: len(sizes)] = sizes
        print(json.dumps([_launch(library, HostCall(**call), sizes) for call in job["calls"]]))


if __name__ == "__main__":
    _main()

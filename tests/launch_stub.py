"""Drives libjax_r2p.so with no GPU: a stand-in for the driver records what the library asks of it.

`StubProcess` starts a process of its own, since the library's caches and a loaded libcuda last as long as a
process. This file is also that process's program. `pack` is the short form for one launch.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from jax_r2p._manifest import FOLDER, Parameter, Role, Variant, package_file
from jax_r2p.aot import parameters

NATIVE = pathlib.Path(__file__).resolve().parent / "native"
HEADER = NATIVE.parents[1] / "ffi" / "c_api.h"
LIBRARY = "libjax_r2p.so"
DTYPES = {"int32": 4, "fp16": 10, "fp32": 11, "bf16": 16}
CODES = {0: "OK", 1: "INVALID_ARGUMENT", 2: "NOT_FOUND", 3: "FAILED_PRECONDITION", 4: "INTERNAL"}
UNBOUNDED = 2**29
STREAM = 0x5000
ROLES = {"forward": 1, "backward": 2, "preprocess": 3}
MAPPED = {
    "forward": ("query", "key", "value", "out"),
    "backward": ("query", "key", "value", "dout", "dkey", "dvalue"),
    "preprocess": (),
}
LENGTHS = ("query_lengths", "key_lengths")
OPERANDS = {
    "forward": ("query", "key", "value", "scale", *LENGTHS),
    "backward": (
        *("query", "key", "value", "dout", "lse", "delta", "scale", "dquery_factor", *LENGTHS),
        *("sums_zeros", "marks_zeros"),
    ),
    "preprocess": ("out", "dout", "lse", "dlse", "query_lengths"),
}
RESULTS = {
    "forward": ("out", "lse"),
    "backward": ("dquery", "dkey", "dvalue", "sums", "marks"),
    "preprocess": ("lse_base2", "delta", "sums", "marks"),
}
ATTRIBUTES = {  # and their types
    "forward": {
        "variant": "string",
        **dict.fromkeys(("window_left", "window_right"), "int32"),
        **dict.fromkeys(("kv_repeat", "kv_inner"), "int64"),
    },
    "preprocess": {"variant": "string"},
}
ATTRIBUTES["backward"] = {
    **ATTRIBUTES["forward"],
    **dict.fromkeys(("together", "lag"), "int64"),
    "deterministic": "boolean",
}
STRUCTS = {"forward": "R2pLaunch", "backward": "R2pBackward", "preprocess": "R2pPreprocess"}
FUNCTIONS = {
    "forward": "r2p_launch",
    "backward": "r2p_launch_backward",
    "preprocess": "r2p_launch_preprocess",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """Address, element type and shape of an array that need not exist."""

    data: int
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AnyCall:
    """The fields that the calls of all kernels share."""

    variant: str
    query_lengths: Array
    stream: int = STREAM

    def change(self, *names: str, **fields: Any) -> Self:
        """Returns a copy with `fields` of the arrays called `names` replaced."""
        changed = {name: dataclasses.replace(getattr(self, name), **fields) for name in names}
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AttentionCall(_AnyCall):
    """The fields that R2pLaunch and R2pBackward share."""

    query: Array
    key: Array
    value: Array
    scale: Array
    key_lengths: Array
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    kv_repeat: int = 1
    kv_inner: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(_AttentionCall):
    """One launch, with the fields of R2pLaunch."""

    out: Array
    lse: Array
    role: str = dataclasses.field(default="forward", init=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardCall(_AttentionCall):
    """One launch, with the fields of R2pBackward."""

    dout: Array
    lse: Array
    delta: Array
    dquery_factor: Array
    sums_zeros: Array
    marks_zeros: Array
    dquery: Array
    dkey: Array
    dvalue: Array
    sums: Array
    marks: Array
    together: int = 1
    lag: int = 1
    deterministic: int = 0
    role: str = dataclasses.field(default="backward", init=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessCall(_AnyCall):
    """One launch, with the fields of R2pPreprocess."""

    out: Array
    dout: Array
    lse: Array
    dlse: Array
    lse_base2: Array
    delta: Array
    sums: Array
    marks: Array
    role: str = dataclasses.field(default="preprocess", init=False)


def make_call(
    variant: Variant,
    query: tuple[int, int, int, int],
    key: tuple[int, int, int, int] | None = None,
    value_width: int | None = None,
    *,
    lengths: tuple[bool, bool] = (False, False),
    **fields: Any,
) -> Call:
    """Returns a launch that fits `variant`, with an address of its own for each array.

    Args:
      variant: A row of the manifest.
      query: Shape of query and, but for the width, out, (B, T, N, H).
      key: Shape of key and, but for the width, value, (Bk, S, K, H); None: like query.
      value_width: Of value and out, Hv; None: H.
      lengths: Whether there are lengths of queries and of keys; where not, the array is empty.
      **fields: Of Call. kv_repeat defaults to B // Bk.
    """
    key = key or query
    batch, rows, heads, width = query
    value_width = width if value_width is None else value_width
    shapes = {
        "query": query,
        "key": key,
        "value": (*key[:-1], value_width),
        "out": (*query[:-1], value_width),
        "scale": (),
        "lse": (batch, heads, rows),
        "query_lengths": (batch if lengths[0] else 0,),
        "key_lengths": (batch if lengths[1] else 0,),
    }
    dtypes = {"scale": "fp32", "lse": "fp32", "query_lengths": "int32", "key_lengths": "int32"}
    arrays = _make_arrays(shapes, dtypes, variant)
    return Call(**{"variant": variant.name, **arrays, "kv_repeat": batch // key[0], **fields})


def make_backward_variant(**fields: Any) -> Variant:
    """Returns a backward kernel that does not exist: fp16, head dims 96 and 64, with `fields` replaced."""
    variant = Variant(
        name="bwd_fp16_d96v64_window",
        role="backward",
        file="bwd_fp16_d96v64_window.cubin",
        sha256="",
        size=1,
        entry="bwd_entry",
        arch="sm_90a",
        dtype="fp16",
        head_dim=96,
        value_head_dim=64,
        mask="window",
        tile_m=128,
        tile_n=80,
        threads=384,
        shared_memory=200_000,
        min_blocks=1,
        least_span=0,
        parameters=_lay_out("backward"),
        registers=168,
        spills=0,
    )
    return dataclasses.replace(variant, **fields)


def make_preprocess_variant(**fields: Any) -> Variant:
    """Returns a preprocess kernel that does not exist: fp16, head dim 96, with `fields` replaced."""
    variant = Variant(
        name="pre_fp16_d96",
        role="preprocess",
        file="pre_fp16_d96.cubin",
        sha256="",
        size=1,
        entry="pre_entry",
        arch="sm_90a",
        dtype="fp16",
        head_dim=96,
        value_head_dim=96,
        mask="none",
        tile_m=128,
        tile_n=0,
        threads=192,
        shared_memory=0,
        min_blocks=2,
        least_span=0,
        parameters=_lay_out("preprocess"),
        registers=96,
        spills=0,
    )
    return dataclasses.replace(variant, **fields)


def _lay_out(role: Role) -> tuple[Parameter, ...]:
    """The parameters of the kernels of a role, each at the first offset that it can have."""
    rows, end = [], 0
    for name, size in parameters.load_parameters(role):
        alignment = 64 if size == 128 else min(size, 8)
        offset = -(-end // alignment) * alignment
        rows.append(Parameter(name=name, offset=offset, size=size))
        end = offset + size
    return tuple(rows)


def make_backward_call(
    variant: Variant,
    query: tuple[int, int, int, int],
    key: tuple[int, int, int, int] | None = None,
    value_width: int | None = None,
    *,
    lengths: tuple[bool, bool] = (False, False),
    slots: int | None = None,
    **fields: Any,
) -> BackwardCall:
    """Returns a launch of the backward pass; see `make_call`. Aliased operands have the address of a result.

    Args:
      variant: A backward kernel.
      query: Shape of query and, but for the width, dout.
      key: Shape of key, dkey and, but for the width, value and dvalue.
      value_width: Of value, dout and dvalue.
      lengths: As for `make_call`.
      slots: Of the sums; None: one for each head of query.
      **fields: Of BackwardCall.
    """
    key = key or query
    batch, rows, heads, width = query
    value_width = width if value_width is None else value_width
    tiles = -(-rows // variant.tile_m)
    slots = batch * heads if slots is None else slots
    shapes = {
        "query": query,
        "key": key,
        "value": (*key[:-1], value_width),
        "dout": (*query[:-1], value_width),
        "lse": (batch, heads, tiles * variant.tile_m),
        "delta": (batch, heads, tiles * variant.tile_m),
        "scale": (),
        "dquery_factor": (),
        "query_lengths": (batch if lengths[0] else 0,),
        "key_lengths": (batch if lengths[1] else 0,),
        "dquery": query,
        "dkey": key,
        "dvalue": (*key[:-1], value_width),
        "sums": (slots, tiles, variant.tile_m * variant.head_dim),
        "marks": (slots, 2 + tiles),
    }
    dtypes = {
        **dict.fromkeys(("lse", "delta", "scale", "dquery_factor", "sums"), "fp32"),
        **dict.fromkeys((*LENGTHS, "marks"), "int32"),
    }
    arrays = _make_arrays(shapes, dtypes, variant)
    arrays |= {f"{name}_zeros": arrays[name] for name in ("sums", "marks")}
    return BackwardCall(**{"variant": variant.name, **arrays, "kv_repeat": batch // key[0], **fields})


def make_preprocess_call(
    variant: Variant,
    out: tuple[int, int, int, int],
    rows: int | None = None,
    sums: tuple[int, int, int] = (3, 2, 4096),
    *,
    lengths: bool = False,
    **fields: Any,
) -> PreprocessCall:
    """Returns a launch of the preprocess kernel; see `make_call`.

    Args:
      variant: A preprocess kernel.
      out: Shape of out and dout, (B, T, N, Hv).
      rows: Of lse_base2 and delta, Tp; None: whole tiles of `variant`.
      sums: Their shape; that of marks follows from it.
      lengths: Whether there are lengths of queries; if not, the array is empty.
      **fields: Of PreprocessCall.
    """
    batch, queries, heads, _ = out
    rows = -(-queries // variant.tile_m) * variant.tile_m if rows is None else rows
    slots, tiles, _ = sums
    shapes = {
        "out": out,
        "dout": out,
        **dict.fromkeys(("lse", "dlse"), (batch, heads, queries)),
        "query_lengths": (batch if lengths else 0,),
        **dict.fromkeys(("lse_base2", "delta"), (batch, heads, rows)),
        "sums": sums,
        "marks": (slots, 2 + tiles),
    }
    dtypes = {
        **dict.fromkeys(("lse", "dlse", "lse_base2", "delta", "sums"), "fp32"),
        **dict.fromkeys(("query_lengths", "marks"), "int32"),
    }
    return PreprocessCall(**{"variant": variant.name, **_make_arrays(shapes, dtypes, variant), **fields})


def _make_arrays(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], variant: Variant
) -> dict[str, Array]:
    """An array for each shape, at an address of its own; those not in `dtypes` have the variant's dtype."""
    return {
        name: Array(
            data=0x7F0000000000 + 0x100000000 * number,
            dtype=dtypes.get(name, variant.dtype),
            shape=shape,
        )
        for number, (name, shape) in enumerate(shapes.items())
    }


class LibraryError(Exception):
    """An error that the library reported: `code` is the name of its R2pCode."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@functools.cache
def _build_folder() -> pathlib.Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return pathlib.Path(folder.name)


@functools.cache
def build_native(source: str, name: str, *options: str) -> pathlib.Path:
    """Compiles a C file of tests/native into a shared library, once per process; returns its path."""
    output = pathlib.Path(tempfile.mkdtemp(dir=_build_folder())) / name
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
    subprocess.run([*command, *options, str(NATIVE / source), "-o", str(output)], check=True)
    return output


class StubProcess:
    """A process with the library and, unless told otherwise, the recording driver.

    Use it as a context manager. Attributes that are not listed here are the methods of `_Worker`, run over
    there.
    """

    def __init__(
        self, *, driver: bool = True, missing_symbol: str | None = None, ffi_headers: str | None = None
    ):
        """Starts the process.

        Args:
          driver: Whether the stand-in for libcuda is loaded.
          missing_symbol: A function that the stand-in shall not have.
          ffi_headers: Folder of XLA's FFI headers, for `call_handler` and `metadata`.
        """
        stub = frame = ""
        if driver:
            renamed = [f"-D{missing_symbol}=renamed_{missing_symbol}"] if missing_symbol else []
            soname = "libcuda.so.1"
            stub = str(build_native("driver_stub.c", soname, f"-Wl,-soname,{soname}", *renamed))
        if ffi_headers:
            frame = str(build_native("ffi_frame.c", "frame.so", "-isystem", ffi_headers))
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(package_file(LIBRARY)), stub, frame],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def __enter__(self) -> StubProcess:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.__exit__(None, None, None)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_") or not hasattr(_Worker, method):
            raise AttributeError(method)
        return functools.partial(self._request, method)

    def _request(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process ended with {self._process.wait()} during {method}")
        kind, content = json.loads(answer)
        if kind == "error":
            raise LibraryError(*content)
        if kind == "exception":
            raise RuntimeError(content)
        return content

    def add(self, variant: Variant, **fields: Any) -> None:
        """Registers `variant`, with `fields` of R2pVariant replaced."""
        row = {
            "name": variant.name,
            "entry": variant.entry,
            "file": str(package_file(FOLDER, variant.file)),
            "role": ROLES[variant.role],
            "dtype": DTYPES[variant.dtype],
            "head_dim": variant.head_dim,
            "value_head_dim": variant.value_head_dim,
            "tile_m": variant.tile_m,
            "tile_n": variant.tile_n,
            "threads": variant.threads,
            "shared_memory": variant.shared_memory,
            "min_blocks": variant.min_blocks,
            "is_causal": int(variant.mask == "causal"),
            "parameters": [(parameter.name, parameter.size) for parameter in variant.parameters],
        }
        self._request("add_variant", {**row, **fields})

    def execute(self, call: _AnyCall, **changes: Any) -> list[dict[str, Any]]:
        """Runs the FFI handler `execute` and returns the driver calls; see `_Worker.call_handler`."""
        return self._request("call_handler", "execute", dataclasses.asdict(call), changes)

    def initialize(self, call: _AnyCall, **changes: Any) -> list[dict[str, Any]]:
        """Runs the FFI handler `initialize`, likewise."""
        return self._request("call_handler", "initialize", dataclasses.asdict(call), changes)

    def launch(self, call: _AnyCall) -> list[dict[str, Any]]:
        """Launches and returns the driver calls that this took, each as the stand-in recorded it."""
        return self._request("launch", dataclasses.asdict(call))

    def launch_together(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Launches each call on a thread of its own, all at once; returns the driver calls."""
        return self._request("launch_together", [dataclasses.asdict(call) for call in calls])

    def pack(self, variant: Variant, call: _AnyCall) -> dict[str, Any]:
        """Launches and returns what the kernel got; `variant` is that of `call`. See the function `pack`."""
        log = self.launch(call)
        return describe_launch(variant, log)


def pack(
    variant: Variant,
    query: tuple[int, int, int, int],
    key: tuple[int, int, int, int] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Returns what the library hands to the driver for one launch.

    Args:
      variant: A row of the manifest.
      query: Shape of query, (B, T, N, H); see `make_call`.
      key: Shape of key, (Bk, S, K, H); None: like query.
      **fields: Of `make_call` and Call: value_width, windows, kv_repeat, kv_inner, or whole arrays.

    Returns:
      grid and block: three integers each. shared_memory: bytes. parameters: the bytes of each parameter by
      name; those of a map are not a descriptor. maps: the arguments of cuTensorMapEncodeTiled for each array
      that has a map.
    """
    with StubProcess() as process:
        process.add(variant)
        return process.pack(variant, make_call(variant, query, key, **fields))


def describe_launch(variant: Variant, log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the result of `pack` from the driver calls of one launch."""
    (launch,) = (call for call in log if call["call"] == "cuLaunchKernelEx")
    names = [parameter.name for parameter in variant.parameters]
    parameters = dict(zip(names, map(bytes.fromhex, launch["parameters"]), strict=True))
    encodings = {call["number"]: call for call in log if call["call"] == "cuTensorMapEncodeTiled"}
    maps = {}
    for name in MAPPED[variant.role]:
        number = int.from_bytes(parameters[f"{name}_map"][:8], "little")
        maps[name] = {
            field: value
            for field, value in encodings[number].items()
            if field not in ("call", "result", "depth", "capture_mode", "number")
        }
    return {
        "grid": launch["grid"],
        "block": launch["block"],
        "shared_memory": launch["shared_memory"],
        "parameters": parameters,
        "maps": maps,
    }


# The C interface, read from the header, so that it is written down once.

_C_TYPES = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "const char*": ctypes.c_char_p,
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
}


def c_structures() -> dict[str, type[ctypes.Structure]]:
    """Returns the structs of ffi/c_api.h by name."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    structures: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\}", text, re.DOTALL):
        fields = []
        for field_type, field, length in re.findall(r"([\w ]+\*?)\s+(\w+)(?:\[(\d+)\])?;", body):
            field_type = field_type.strip()
            pointed = structures.get(field_type.removeprefix("const ").removesuffix("*"))
            if field_type in _C_TYPES:
                c_type: Any = _C_TYPES[field_type]
            elif pointed is not None:
                c_type = ctypes.POINTER(pointed) if field_type.endswith("*") else pointed
            else:
                raise ValueError(f"{HEADER}: {name}.{field} has the unknown type {field_type!r}")
            fields.append((field, c_type * int(length) if length else c_type))
        structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structures


_XLA_SCALARS = {"boolean": 1, "int32": 4, "int64": 5}
_XLA_STAGES = {"initialize": 2, "execute": 3}
XLA_CODES = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 9: "FAILED_PRECONDITION", 13: "INTERNAL"}


class _FrameBuffer(ctypes.Structure):
    """FrameBuffer of native/ffi_frame.c."""

    _fields_ = [
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 4),
        ("data", ctypes.c_uint64),
    ]


class _FrameAttribute(ctypes.Structure):
    """FrameAttribute of native/ffi_frame.c."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("boolean", ctypes.c_bool),
        ("int32", ctypes.c_int32),
        ("int64", ctypes.c_int64),
        ("text", ctypes.c_char_p),
    ]


class _Worker:
    """What the process does; every public method is a request."""

    _ERROR_SIZE = 2048

    def __init__(self, library: str, stub: str, frame: str):
        # The stand-in comes first: a later dlopen of its name finds it, wherever the real one may be.
        self._stub = ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL) if stub else None
        self._library = ctypes.CDLL(library)
        self._frame = ctypes.CDLL(frame) if frame else None
        self._structures = c_structures()
        self._sizes: dict[str, list[int]] = {}
        if self._stub:
            self._stub.stub_take_log.restype = ctypes.c_void_p
            self._stub.stub_free.argtypes = [ctypes.c_void_p]

    def add_variant(self, row: dict[str, Any]) -> None:
        """Registers a variant; `row` has the fields of R2pVariant, with `file` or `cubin`, a text."""
        parameter_type = self._structures["R2pParameter"]
        parameters = [parameter_type(name.encode(), size) for name, size in row["parameters"]]
        self._sizes[row["name"]] = [size for _, size in row["parameters"]]
        cubin = row["cubin"].encode() if "cubin" in row else pathlib.Path(row["file"]).read_bytes()
        kept = ctypes.create_string_buffer(cubin, len(cubin))
        variant_type = self._structures["R2pVariant"]
        variant = variant_type(
            struct_size=row.get("struct_size", ctypes.sizeof(variant_type)),
            name=row["name"].encode(),
            entry=row["entry"].encode(),
            cubin=ctypes.cast(kept, ctypes.c_void_p),
            cubin_size=len(cubin),
            **{
                field: row[field]
                for field in (
                    "role",
                    "dtype",
                    "head_dim",
                    "value_head_dim",
                    "tile_m",
                    "tile_n",
                    "threads",
                    "shared_memory",
                    "min_blocks",
                    "is_causal",
                )
            },
            parameters=(parameter_type * len(parameters))(*parameters),
            parameter_count=len(parameters),
        )
        self._check("r2p_add_variant", ctypes.byref(variant))
        # The library must have copied it.
        ctypes.memset(kept, 0, len(cubin))

    def add_broken_variant(self, name: str, message: str) -> None:
        self._check("r2p_add_broken_variant", name.encode(), message.encode())

    def load(self, variant: str, stream: int) -> list[dict[str, Any]]:
        self._check("r2p_load", variant.encode(), ctypes.c_void_p(stream))
        return self.take_log()

    def launch(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        self._expect(call)
        self._launch(call)
        return self.take_log()

    def launch_with_struct_size(self, call: dict[str, Any], size: int) -> None:
        launch = self._to_c(call)
        launch.struct_size = size
        self._check(FUNCTIONS[call["role"]], ctypes.byref(launch))

    def launch_null(self, role: str = "forward") -> None:
        self._check(FUNCTIONS[role], None)

    def launch_together(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._expect(calls[0])
        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            list(pool.map(self._launch, calls))
        return self.take_log()

    def call_handler(self, stage: str, call: dict[str, Any], changes: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs an FFI handler on the arrays and attributes of `call`.

        `changes` may hold "attributes", which replace or, if None, remove some: a name and ["int32", 5],
        ["int64", 5], ["boolean", True] or ["string", "x"]; "arguments", the number to pass on;
        "handler_stage", the handler to run if it is not that of `stage`; and "stream_fails".
        """
        assert self._frame is not None
        self._expect(call)
        attributes = {
            **{name: [kind, call[name]] for name, kind in ATTRIBUTES[call["role"]].items()},
            **changes.get("attributes", {}),
        }
        encoded = []
        for name, (kind, value) in sorted((k, v) for k, v in attributes.items() if v is not None):
            if kind == "string":
                encoded.append(_FrameAttribute(name=name.encode(), text=value.encode()))
            else:
                encoded.append(_FrameAttribute(name=name.encode(), dtype=_XLA_SCALARS[kind], **{kind: value}))
        arguments = [self._frame_buffer(call[name]) for name in OPERANDS[call["role"]]]
        arguments = arguments[: changes.get("arguments", len(arguments))]
        results = [self._frame_buffer(call[name]) for name in RESULTS[call["role"]]]
        handler = f"jax_r2p_attention_{call['role']}_{changes.get('handler_stage', stage)}"
        error = ctypes.create_string_buffer(self._ERROR_SIZE)
        code = self._frame.frame_call(
            getattr(self._library, handler),
            _XLA_STAGES[stage],
            (_FrameBuffer * len(arguments))(*arguments),
            len(arguments),
            (_FrameBuffer * len(results))(*results),
            len(results),
            (_FrameAttribute * len(encoded))(*encoded),
            len(encoded),
            ctypes.c_uint64(call["stream"]),
            int(changes.get("stream_fails", False)),
            error,
            ctypes.c_size_t(self._ERROR_SIZE),
        )
        if code:
            raise LibraryError(XLA_CODES[code], error.value.decode())
        return self.take_log()

    def metadata(self, stage: str, role: str = "forward") -> dict[str, int]:
        """Returns what the FFI handler tells XLA about itself."""
        assert self._frame is not None
        major, minor, traits = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint32()
        error = ctypes.create_string_buffer(self._ERROR_SIZE)
        code = self._frame.frame_metadata(
            getattr(self._library, f"jax_r2p_attention_{role}_{stage}"),
            ctypes.byref(major),
            ctypes.byref(minor),
            ctypes.byref(traits),
            error,
            ctypes.c_size_t(self._ERROR_SIZE),
        )
        if code:
            raise LibraryError(XLA_CODES[code], error.value.decode())
        return {"major": major.value, "minor": minor.value, "traits": traits.value}

    def error_text(self, call: dict[str, Any], size: int) -> tuple[int, str]:
        """Returns the code and the text of a launch that has a buffer of `size` bytes for it."""
        buffer = ctypes.create_string_buffer(b"#" * (size + 8))
        code = self._library.r2p_launch(ctypes.byref(self._to_c(call)), buffer, ctypes.c_size_t(size))
        return code, buffer.raw.decode()

    def counters(self) -> dict[str, int]:
        counters = self._structures["R2pCounters"]()
        self._library.r2p_counters(ctypes.byref(counters))
        return {"loads": counters.loads, "launches": counters.launches}

    def fail(self, call: str, code: int, nth: int) -> None:
        """Makes the `nth` call of a driver function from now on return `code`."""
        self._stub_required.stub_fail(call.encode(), code, nth)

    def set_unknown_errors(self, unknown: bool) -> None:
        """Whether the driver has neither name nor text of any error."""
        self._stub_required.stub_set_unknown_errors(int(unknown))

    def set_current(self, context: int) -> None:
        """Makes `context` this thread's current one; 0: none."""
        self._stub_required.stub_set_current(ctypes.c_uint64(context))

    def set_id_base(self, base: int) -> None:
        """Gives every context another id, as if all had been made anew at the same addresses."""
        self._stub_required.stub_set_id_base(ctypes.c_uint64(base))

    def set_load_milliseconds(self, milliseconds: int) -> None:
        """How long loading a library takes."""
        self._stub_required.stub_set_load_milliseconds(milliseconds)

    def set_capture_mode(self, mode: int) -> None:
        self._stub_required.stub_set_capture_mode(mode)

    def state(self) -> dict[str, int]:
        """Returns this thread's number of pushed contexts and its capture mode."""
        stub = self._stub_required
        return {"depth": stub.stub_depth(), "capture_mode": stub.stub_capture_mode()}

    def take_log(self) -> list[dict[str, Any]]:
        """Returns the driver calls since the last request for them."""
        if not self._stub:
            return []
        address = self._stub.stub_take_log()
        text = ctypes.string_at(address).decode()
        self._stub.stub_free(address)
        return [json.loads(line) for line in text.splitlines()]

    @property
    def _stub_required(self) -> ctypes.CDLL:
        if self._stub is None:
            raise ValueError("this process has no stand-in for the driver")
        return self._stub

    def _to_c(self, call: dict[str, Any]) -> Any:
        fields = dict(call)
        role = fields.pop("role")
        tensor_type, launch_type = self._structures["R2pTensor"], self._structures[STRUCTS[role]]
        for name in (*OPERANDS[role], *RESULTS[role]):
            array = fields[name]
            shape = array["shape"]
            dims = (ctypes.c_int64 * 4)(*shape[:4])
            dtype = DTYPES.get(array["dtype"], array["dtype"])
            fields[name] = tensor_type(data=array["data"], dtype=dtype, rank=len(shape), dims=dims)
        fields["variant"] = fields["variant"].encode()
        return launch_type(struct_size=ctypes.sizeof(launch_type), **fields)

    def _frame_buffer(self, array: dict[str, Any]) -> _FrameBuffer:
        shape = array["shape"]
        dtype = DTYPES.get(array["dtype"], array["dtype"])
        return _FrameBuffer(
            dtype=dtype, rank=len(shape), dims=(ctypes.c_int64 * 4)(*shape), data=array["data"]
        )

    def _expect(self, call: dict[str, Any]) -> None:
        """Tells the stand-in the sizes of the parameters that the next launches have."""
        sizes = self._sizes.get(call["variant"])
        if self._stub and sizes:
            self._stub.stub_set_parameter_sizes((ctypes.c_uint32 * len(sizes))(*sizes), len(sizes))

    def _launch(self, call: dict[str, Any]) -> None:
        self._check(FUNCTIONS[call["role"]], ctypes.byref(self._to_c(call)))

    def _check(self, function: str, *arguments: Any) -> None:
        error = ctypes.create_string_buffer(self._ERROR_SIZE)
        code = getattr(self._library, function)(*arguments, error, ctypes.c_size_t(self._ERROR_SIZE))
        if code:
            raise LibraryError(CODES[code], error.value.decode())


def _serve(worker: _Worker, requests: Iterator[str]) -> None:
    for line in requests:
        method, arguments = json.loads(line)
        try:
            answer: tuple[str, Any] = ("result", getattr(worker, method)(*arguments))
        except LibraryError as error:
            answer = ("error", (error.code, error.message))
        except Exception:  # noqa: BLE001 - it is raised again on the other side
            answer = ("exception", traceback.format_exc())
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(_Worker(*sys.argv[1:]), iter(sys.stdin))

"""The compiled library: its registration with XLA, and the call of its kernels."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
import threading
from typing import NamedTuple, TypeVar

import jax
import jaxlib.version
import numpy as np
from jax import Array

from jax_r2p._manifest import (
    FILE_NAME,
    InstallationError,
    Variant,
    find_preprocess,
    load_manifest,
    package_file,
    parse_manifest,
    read_cubin,
    repair_hint,
)
from jax_r2p._spec import UNBOUNDED, AttentionSpec

TARGET = "jax_r2p.attention_forward.v2"
"""Name of the call in compiled programs. Another signature needs another name."""

BACKWARD_TARGET = "jax_r2p.attention_backward.v2"
"""The same for the backward pass."""

PREPROCESS_TARGET = "jax_r2p.attention_preprocess.v1"
"""The same for what prepares it."""

LIBRARY = "libjax_r2p.so"

_SYMBOLS = {
    target: {stage: f"jax_r2p_attention_{role}_{stage}" for stage in ("initialize", "execute")}
    for target, role in (
        (TARGET, "forward"),
        (BACKWARD_TARGET, "backward"),
        (PREPROCESS_TARGET, "preprocess"),
    )
}
"""The handlers of each target by stage."""

_OLDEST_JAXLIB = (0, 7, 2)
"""The library is built with the FFI headers of this version, which later ones accept."""

_DTYPE_CODES = {"fp16": 10, "bf16": 16}
"""Element types in XLA's numbering (R2pDtype)."""

_ROLE_CODES = {"forward": 1, "backward": 2, "preprocess": 3}
"""R2pRole."""

_ERROR_SIZE = 4096

_lock = threading.Lock()


class _Parameter(ctypes.Structure):
    """R2pParameter of ffi/c_api.h."""

    _fields_ = [("name", ctypes.c_char_p), ("size", ctypes.c_uint32)]


class _Variant(ctypes.Structure):
    """R2pVariant of ffi/c_api.h."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_char_p),
        ("cubin", ctypes.c_char_p),
        ("cubin_size", ctypes.c_size_t),
        ("role", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("value_head_dim", ctypes.c_int32),
        ("tile_m", ctypes.c_int32),
        ("tile_n", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_memory", ctypes.c_int32),
        ("min_blocks", ctypes.c_int32),
        ("is_causal", ctypes.c_int32),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("parameter_count", ctypes.c_size_t),
    ]


def attention_forward(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    *,
    variant: Variant,
    spec: AttentionSpec,
    kv_repeat: int,
    kv_inner: int,
) -> tuple[Array, Array]:
    """Calls a kernel, in a function that is lowered for CUDA.

    Args:
      query: (B, T, N, H), not empty.
      key: (B // kv_repeat, S, K, H).
      value: (B // kv_repeat, S, K, Hv).
      scale: float32 scalar.
      query_lengths: (B,), int32: the queries that are there. None for T.
      key_lengths: (B,), int32: the keys that are there, of each batch entry of the query. None for S.
      variant: The kernel, one that fits the arguments.
      spec: The visible keys; bounds that do not bind at these lengths are left out.
      kv_repeat: See `Folding.repeat`.
      kv_inner: See `Folding.inner`.

    Returns:
      out, (B, T, N, Hv), and lse, (B, N, T), float32.

    Raises:
      InstallationError: The library cannot be used.
    """
    register()
    batch, queries, heads, _ = query.shape
    results = (
        jax.ShapeDtypeStruct((batch, queries, heads, value.shape[-1]), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), np.float32),
    )
    # A call has a fixed number of operands: an empty array stands for lengths that there are not.
    none = np.zeros(0, np.int32)
    out, lse = jax.ffi.ffi_call(TARGET, results)(
        query,
        key,
        value,
        scale,
        none if query_lengths is None else query_lengths,
        none if key_lengths is None else key_lengths,
        **_attributes(variant, spec, kv_repeat, kv_inner),
    )
    return _computed_once((out, lse))


def attention_backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array,
    scale: Array,
    dquery_factor: Array,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    *,
    variant: Variant,
    spec: AttentionSpec,
    kv_repeat: int,
    kv_inner: int,
    deterministic: bool,
) -> tuple[Array, Array, Array]:
    """Calls a preprocess and a backward kernel, in a function that is lowered for CUDA.

    With scores s, weights p = exp(s - lse), delta the sum of dout * out over a row, minus dlse, and
    ds = p * (dout . value - delta):

    Args:
      query: (B, T, N, H), not empty.
      key: (B // kv_repeat, S, K, H).
      value: (B // kv_repeat, S, K, Hv).
      out: (B, T, N, Hv), with the dtype of query. It may hold anything in a row that sees no key or is not
        there.
      dout: Cotangent of out, likewise, but finite in a row that sees no key.
      lse: (B, N, T), float32, natural log; -inf for a row that sees no key.
      dlse: (B, N, T), float32, cotangent of lse, and likewise.
      scale: float32 scalar.
      dquery_factor: float32 scalar, which the kernel multiplies the sums for dquery by before it rounds them:
        scale for the cotangent of query.
      query_lengths: (B,), int32: the queries that are there. None for T.
      key_lengths: (B,), int32: the keys that are there, of each batch entry of the query. None for S.
      variant: The backward kernel, one that fits the arguments.
      spec: The visible keys; bounds that do not bind at these lengths are left out.
      kv_repeat: See `Folding.repeat`.
      kv_inner: See `Folding.inner`.
      deterministic: Whether the sums over keys are added up in a fixed order, so that each run gives the same
        bits.

    Returns:
      dquery, like query: the sum of ds * key over the keys, times dquery_factor. dkey and dvalue, like key
      and value: the sum of scale * ds * query and of p * dout, over all queries that share a key.

    Raises:
      InstallationError: The library cannot be used, or this build has no preprocess kernel for it.
    """
    register()
    kv_batch, keys, kv_heads, _ = key.shape
    sharers = query.shape[2] // kv_heads * kv_repeat
    plan = plan_sums(variant, kv_batch * kv_heads, sharers, query.shape[1], keys, deterministic=deterministic)
    none = np.zeros(0, np.int32)
    lengths = none if query_lengths is None else query_lengths
    lse, delta, sums, marks = _attention_preprocess(out, dout, lse, dlse, lengths, plan.slots, variant)
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value, sums, marks))
    call = jax.ffi.ffi_call(BACKWARD_TARGET, results, input_output_aliases={10: 3, 11: 4})
    dquery, dkey, dvalue, _, _ = call(
        query,
        key,
        value,
        dout,
        lse,
        delta,
        scale,
        dquery_factor,
        lengths,
        none if key_lengths is None else key_lengths,
        sums,
        marks,
        **_attributes(variant, spec, kv_repeat, kv_inner),
        together=np.int64(plan.together),
        lag=np.int64(plan.lag),
        deterministic=deterministic,
    )
    return _computed_once((dquery, dkey, dvalue))


def _attention_preprocess(
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array,
    query_lengths: Array | np.ndarray,
    slots: int,
    backward: Variant,
) -> tuple[Array, Array, Array, Array]:
    """Returns lse, delta, sums and marks as a backward kernel takes them; sums and marks are zeros.

    lse is in base 2. It and delta have whole tiles of rows, (B, N, tiles * tile_m). Rows that see no key, are
    not there, or fill up the last tile have an lse of +inf, which makes their weights 0, and a delta of 0.
    """
    *_, value_head_dim = out.shape
    preprocess = find_preprocess(load_manifest().variants, backward.arch, backward.dtype, value_head_dim)
    if preprocess is None:
        raise InstallationError(f"this build has no preprocess kernel for {backward.name}. {repair_hint()}")
    tiles = -(-lse.shape[-1] // backward.tile_m)
    rows = jax.ShapeDtypeStruct((*lse.shape[:-1], tiles * backward.tile_m), np.float32)
    results = (
        rows,
        rows,
        jax.ShapeDtypeStruct((slots, tiles, backward.tile_m * backward.head_dim), np.float32),
        jax.ShapeDtypeStruct((slots, 2 + tiles), np.int32),
    )
    call = jax.ffi.ffi_call(PREPROCESS_TARGET, results)
    lse, delta, sums, marks = call(out, dout, lse, dlse, query_lengths, variant=preprocess.name)
    return lse, delta, sums, marks


_Results = TypeVar("_Results", bound=tuple[Array, ...])


def _computed_once(results: _Results) -> _Results:
    """Returns the results of a call, so that XLA does not make two calls of it.

    Where a scan stacks a result, XLA of jaxlib 0.11 fuses the call with the update of the stack. If the
    result is used elsewhere too, as by a layer whose remat policy saves it, the call stays beside the fusion,
    and runs twice (openxla/xla pull request 45799 is about that). A barrier stands between call and update,
    and goes only when fusions are made.
    """
    return jax.lax.optimization_barrier(results)


_MULTIPROCESSORS = 132
"""Of the largest GPU of compute capability 9.0. On a smaller one what is planned for it runs as well."""


class SumsPlan(NamedTuple):
    """How a backward kernel keeps its sums for dquery, and in which order its thread blocks start."""

    slots: int
    together: int
    lag: int


_TOGETHER_BYTES = 8 << 20
"""Query and dout rows of heads whose thread blocks start in turn. They have to stay in L2, with the sums."""

_LEAST_TOGETHER = 2
"""Heads that start in turn however long they are, so that the short thread blocks of one fill the gaps that
the long ones of the other leave.
"""


def plan_sums(
    variant: Variant, places: int, sharers: int, queries: int, keys: int, *, deterministic: bool
) -> SumsPlan:
    """Returns how a backward kernel keeps its sums for dquery.

    A thread block has some keys of a head and adds to the sums of the queries of that head. Under a causal
    mask those with the first keys have most to do, and start first: not of one head and then of the next, but
    of `together` heads in turn, so that only short ones are left for the end. In a fixed order of additions
    each waits for others of its head, which must not start late.

    Beside that a thread block finishes sums of a group of so many heads, `lag` groups before its own, which
    means to wait for all that is added to them. It should find that done, or nearly so: `lag` covers the
    heads whose thread blocks run at the same time, and one more where they differ in length.

    Sums are kept in a ring of slots, each for one head of the query at a time. With slots for `lag` + 1
    groups no thread block waits for one that starts after it: ffi/backward.cc says why, and demands that
    many, or a slot for each head of the query. There are slots for two heads more, so that none waits for
    those that are just finishing the sums it follows. More would only take memory, and with long sequences
    leave L2.

    Args:
      variant: The kernel.
      places: Heads of the keys, of all batch entries together.
      sharers: Heads of the query that share one of these, likewise.
      queries: Query rows of a head.
      keys: Keys of a head.
      deterministic: Whether additions have a fixed order.
    """
    is_causal = variant.mask == "causal"
    blocks = -(-keys // variant.tile_n)
    in_flight = -(-_MULTIPROCESSORS * variant.min_blocks // blocks)
    together = 1
    if is_causal and not deterministic:
        head_bytes = queries * (variant.head_dim + variant.value_head_dim) * 2
        together = min(places, max(_LEAST_TOGETHER, _TOGETHER_BYTES // head_bytes))
    lag = -(-min(places, in_flight + is_causal) // together)
    return SumsPlan(min(places, (lag + 1) * together + 2) * sharers, together, lag)


def _attributes(
    variant: Variant, spec: AttentionSpec, kv_repeat: int, kv_inner: int
) -> dict[str, str | np.int32 | np.int64]:
    # The handlers want these integer types exactly; a Python int would become an int64.
    return {
        "variant": variant.name,
        "window_left": np.int32(UNBOUNDED if spec.left is None else spec.left),
        "window_right": np.int32(UNBOUNDED if spec.right is None else spec.right),
        "kv_repeat": np.int64(kv_repeat),
        "kv_inner": np.int64(kv_inner),
    }


def register() -> None:
    """Hands the kernels to the library, and the library to XLA; only once in a process, and from any thread.

    A kernel whose file is missing or altered is registered as broken: a program that needs it fails and says
    so, and others run.

    Raises:
      InstallationError: The library or the manifest is missing or of another version, or jaxlib is too old.
    """
    with _lock:
        _register_once()


def register_folder(folder: pathlib.Path) -> tuple[Variant, ...]:
    """Hands the kernels of a folder that `jax_r2p.aot` wrote to the library, beside those of the package.

    For measurements: `attention_forward` takes them, while `attention` knows only the package's own.

    Returns:
      The kernels of the folder.

    Raises:
      InstallationError: As in `register`, a file of the folder is missing or altered, or the name of a kernel
        is in use for another.
      ValueError: The folder's manifest is not one.
    """
    register()
    variants = parse_manifest((folder / FILE_NAME).read_text("utf-8")).variants
    with _lock:
        library = load_library()
        for variant in variants:
            _add_variant(library, variant, read_cubin(variant, folder))
    return variants


@functools.cache
def _register_once() -> None:
    check_jaxlib(jaxlib.version.__version__)
    library = load_library()
    for variant in load_manifest().variants:
        try:
            cubin: bytes | InstallationError = read_cubin(variant)
        except InstallationError as problem:
            cubin = problem
        _add_variant(library, variant, cubin)
    for target, symbols in _SYMBOLS.items():
        handlers = {stage: jax.ffi.pycapsule(library[symbol]) for stage, symbol in symbols.items()}
        jax.ffi.register_ffi_target(target, handlers, platform="CUDA")


def release(version: str) -> tuple[int, ...]:
    """Returns the first three numbers of a version, which is what versions are compared by."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def check_jaxlib(version: str) -> None:
    """Raises InstallationError if the library does not run with this version of jaxlib.

    Checked here because a handler that XLA refuses keeps its whole backend from starting.
    """
    if release(version) < _OLDEST_JAXLIB:
        oldest = ".".join(map(str, _OLDEST_JAXLIB))
        raise InstallationError(f"jax_r2p needs jaxlib {oldest} or later, found {version}")


def load_library() -> ctypes.CDLL:
    """Returns the library; tells neither it nor XLA anything.

    Raises:
      InstallationError: The file is missing, cannot be loaded or is of another version.
    """
    file = package_file(LIBRARY)
    try:
        library = ctypes.CDLL(str(file))
        for symbols in _SYMBOLS.values():
            for symbol in symbols.values():
                library[symbol]
        add_variant, add_broken_variant = library.r2p_add_variant, library.r2p_add_broken_variant
    except OSError as error:
        raise InstallationError(f"{file} cannot be loaded: {error}. Reinstall jax_r2p.") from error
    except AttributeError as error:
        raise InstallationError(f"{file} is of another version: {error}. Reinstall jax_r2p.") from error
    add_variant.argtypes = [ctypes.POINTER(_Variant), ctypes.c_char_p, ctypes.c_size_t]
    add_broken_variant.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    return library


def _add_variant(library: ctypes.CDLL, variant: Variant, cubin: bytes | InstallationError) -> None:
    """Adds a kernel, or in its place what is wrong with its file."""
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    if isinstance(cubin, InstallationError):
        code = library.r2p_add_broken_variant(variant.name.encode(), str(cubin).encode(), error, _ERROR_SIZE)
    else:
        code = library.r2p_add_variant(_to_c(variant, cubin), error, _ERROR_SIZE)
    if code:
        raise InstallationError(f"{package_file(LIBRARY)} refuses a kernel: {error.value.decode()}")


def _to_c(variant: Variant, cubin: bytes) -> _Variant:
    parameters = [_Parameter(parameter.name.encode(), parameter.size) for parameter in variant.parameters]
    return _Variant(
        struct_size=ctypes.sizeof(_Variant),
        name=variant.name.encode(),
        entry=variant.entry.encode(),
        cubin=cubin,
        cubin_size=len(cubin),
        role=_ROLE_CODES[variant.role],
        dtype=_DTYPE_CODES[variant.dtype],
        head_dim=variant.head_dim,
        value_head_dim=variant.value_head_dim,
        tile_m=variant.tile_m,
        tile_n=variant.tile_n,
        threads=variant.threads,
        shared_memory=variant.shared_memory,
        min_blocks=variant.min_blocks,
        is_causal=variant.mask == "causal",
        parameters=(_Parameter * len(parameters))(*parameters),
        parameter_count=len(parameters),
    )

"""Which kernel runs a call, or the reason why none does."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_r2p._manifest import HEAD_DIM_MULTIPLE, Role, Variant, find_preprocess, load_manifest
from jax_r2p._spec import UNBOUNDED, AttentionSpec

Implementation = Literal["r2p", "xla"]
Capability = tuple[int, int]

HOPPER: Capability = (9, 0)
_ARCHS = {HOPPER: "sm_90a"}
"""The kernels' target by compute capability. Code for an "a" target runs on exactly that capability."""

_KERNEL_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
_BATCH_STRIDE_LIMIT = 1 << 40
"""Bytes: as far as the tensor memory accelerator reaches in one dimension."""


class FallbackWarning(UserWarning):
    """A call runs without the kernel. Given once per reason in a process."""


def is_empty(query_shape: Sequence[int], key_shape: Sequence[int]) -> bool:
    """Whether a call has no score to compute. Its result is then a constant, and no kernel is launched."""
    return 0 in (*query_shape, *key_shape)


def padded_head_dim(width: int) -> int:
    """Returns the columns that a head of `width` elements has in a kernel's arrays.

    Arrays of another width have to be copied, with zeros in the new columns.
    """
    return -(-width // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def choose(
    spec: AttentionSpec,
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    dtype: DTypeLike,
    capability: Capability,
    *,
    role: Role = "forward",
    variants: Sequence[Variant] | None = None,
) -> Variant | str:
    """Returns the kernel for a call, or the reason why there is none and what would have one.

    A pure function: it looks at no device.

    Args:
      spec: The visible keys.
      query_shape: (*B, T, N, H).
      key_shape: (*B, S, K, H).
      value_shape: (*B, S, K, Hv).
      dtype: Of all three arrays.
      capability: Compute capability of the GPU.
      role: What the kernel is to compute.
      variants: What to choose from; None for the kernels of the installed package.

    Raises:
      InstallationError: The package has no readable manifest.
    """
    if variants is None:
        variants = load_manifest().variants
    whole_build = variants
    variants = [variant for variant in variants if variant.role == role]
    kernel = "kernel" if role == "forward" else f"{role} kernel"
    *batch, queries, heads, head_dim = query_shape
    keys, value_head_dim = key_shape[-3], value_shape[-1]

    dtype = np.dtype(dtype)
    if dtype.name not in _KERNEL_DTYPES:
        return f"no {kernel} takes dtype {dtype.name}; {' and '.join(_KERNEL_DTYPES)} have one"
    if any(not isinstance(size, int) for shape in (query_shape, key_shape, value_shape) for size in shape):
        return f"no {kernel} takes symbolic dimensions, got query {query_shape} and key {key_shape}"
    if not variants:
        return f"this build has no {kernel}"
    for name, width in (("head_dim", head_dim), ("value_head_dim", value_head_dim)):
        widest = max((getattr(variant, name) for variant in variants), default=0)
        if width > widest:
            return f"no {kernel} takes {name}={width}; heads of up to {widest} elements have one"
    for name, size in (("T", queries), ("S", keys), ("batch size times N", math.prod(batch) * heads)):
        if size > UNBOUNDED:
            return f"no {kernel} takes {name} = {size}; at most {UNBOUNDED} has one"
    shapes = {
        "query": query_shape,
        "key": key_shape,
        "value": value_shape,
        "out": (*query_shape[:-1], value_head_dim),
    }
    for name, shape in shapes.items():
        if math.prod((*shape[-3:-1], padded_head_dim(shape[-1]), dtype.itemsize)) >= _BATCH_STRIDE_LIMIT:
            return f"no {kernel} takes {name} of shape {shape}; less than 2^40 bytes in a batch entry has one"
    if reason := no_kernels(capability):
        return reason

    if role != "forward":
        target = _ARCHS[capability], _KERNEL_DTYPES[dtype.name]
        preprocess = find_preprocess(whole_build, *target, value_head_dim)
        if preprocess is None:
            return f"this build has no preprocess kernel for {', '.join(target)}, {value_head_dim=}"
        if role == "preprocess":
            return preprocess

    effective = spec.effective(queries, keys)
    mask = effective.mask_kind
    span = effective.span(queries, keys)
    wanted = (_ARCHS[capability], _KERNEL_DTYPES[dtype.name], mask)
    fitting = [
        variant
        for variant in variants
        if (variant.arch, variant.dtype, variant.mask) == wanted
        and variant.head_dim >= head_dim
        and variant.value_head_dim >= value_head_dim
        and variant.least_span <= span
    ]
    if not fitting:
        return (
            f"this build has no {kernel} for {wanted[0]}, {dtype.name}, mask {mask!r}, {head_dim=}, "
            f"{value_head_dim=}"
        )
    variant = min(
        fitting, key=lambda variant: (variant.head_dim, variant.value_head_dim, -variant.least_span)
    )
    tiled = [("query rows", queries, variant.tile_m)]
    if role == "backward":
        tiled.append(("keys", keys, variant.tile_n))
    for name, size, tile in tiled:
        tiles = math.prod(batch) * heads * -(-size // tile)
        if tiles > UNBOUNDED:
            return f"no {kernel} takes {tiles} tiles of {tile} {name}; at most {UNBOUNDED} has one"
    return variant


def no_kernels(capability: Capability) -> str | None:
    """Returns why no kernel runs on GPUs of this compute capability; None if there are kernels for it."""
    if capability in _ARCHS:
        return None
    major, minor = capability
    return f"no kernel for compute capability {major}.{minor}; 9.0 (Hopper) has one"


def dtype_of(variant: Variant) -> np.dtype[Any]:
    """Returns the dtype of the arrays that a kernel takes."""
    (name,) = (name for name, code in _KERNEL_DTYPES.items() if code == variant.dtype)
    return np.dtype(name)


def cuda_devices() -> list[jax.Device]:
    """Returns this process's CUDA GPUs.

    Raises:
      RuntimeError: How jax says that there is no such backend.
    """
    return jax.local_devices(backend="cuda")


def cuda_capabilities() -> frozenset[Capability]:
    """Returns the compute capabilities of this process's CUDA GPUs; empty where jax finds none."""
    try:
        devices = cuda_devices()
    except RuntimeError:
        return frozenset()
    return frozenset(capability_of(device) for device in devices)


def capability_of(device: jax.Device) -> Capability:
    """Returns the compute capability of a CUDA GPU."""
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def lowering_capability() -> Capability:
    """Returns the compute capability to choose a kernel for when lowering for CUDA.

    Where there is no GPU the program is meant for another machine, which is taken to be a Hopper. Where there
    are several kinds, all have to be able to run the program, and one that has no kernels decides.
    """
    return min(cuda_capabilities() - _ARCHS.keys(), default=HOPPER)


def wrong_platform(platform: str) -> str:
    """Returns the reason for a program that is not for CUDA."""
    return f"the kernels run on NVIDIA Hopper GPUs, and this is for platform {platform}"


def refuse(reason: str) -> NotImplementedError:
    """Returns the error for a call that demands the kernel and cannot have it."""
    return NotImplementedError(
        f"implementation='r2p' was asked for, but {reason}. With implementation=None it runs as plain XLA."
    )


@functools.cache
def warn_fallback(reason: str, what: str = "jax_r2p.attention runs as plain XLA") -> None:
    """Warns that a call runs without the kernel, the first time that `reason` is given in this process.

    Args:
      reason: Why.
      what: What happens instead.
    """
    warnings.warn(
        f"{what}: {reason}. implementation='xla' does that without a warning.",
        FallbackWarning,
        stacklevel=2,
    )

"""Runs every kernel once, on a problem that takes a moment, and compares it with the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jax_r2p import _dispatch
from jax_r2p._attention import attention
from jax_r2p._manifest import Variant
from jax_r2p._spec import MaskKind
from jax_r2p.cli.output import first_line

_QUERIES, _KEYS, _HEADS, _KV_HEADS = 260, 300, 4, 2
"""More than a tile in both directions, and every query sees a key, so that no residual is infinite."""

_RESIDUAL_ERROR = 1e-3
"""Allowed in the residual, which is float32 for all dtypes."""


class _Keywords(TypedDict, total=False):
    is_causal: bool
    local_window_size: tuple[int, int]


_KEYWORDS: Mapping[MaskKind, _Keywords] = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (64, 7)},
}
"""Arguments of `attention` that need a mask."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of `attention` that runs one kernel: query, key and value, in numpy, and the other arguments."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    keywords: _Keywords


def call_of(variant: Variant) -> Call:
    """Returns a call on random numbers that runs `variant`; the same at each time."""
    random = np.random.default_rng(0)
    keys = _KEYS + variant.least_span
    dtype = _dispatch.dtype_of(variant)
    query, key, value = (
        random.standard_normal((1, length, heads, width), np.float32).astype(dtype)
        for length, heads, width in (
            (_QUERIES, _HEADS, variant.head_dim),
            (keys, _KV_HEADS, variant.head_dim),
            (keys, _KV_HEADS, variant.value_head_dim),
        )
    )
    keywords = _KEYWORDS[variant.mask]
    if variant.least_span:
        keywords = {"local_window_size": (variant.least_span, 7)}
    return Call(arrays=(query, key, value), keywords=keywords)


def run_kernels(variants: Sequence[Variant], device: jax.Device) -> dict[str, str | None]:
    """Runs every kernel once on a GPU.

    Returns:
      What went wrong with each, by its name; None for nothing.
    """
    calls = [call_of(variant) for variant in variants]
    wanted = _run(calls, _reference_device(device), "xla")
    outcomes = zip(calls, _run_or_fail(calls, device), wanted, strict=True)
    messages = [
        first_line(got) if isinstance(got, RuntimeError) else _difference(call, got, want)
        for call, got, want in outcomes
    ]
    return {variant.name: message for variant, message in zip(variants, messages, strict=True)}


def _run_or_fail(calls: Sequence[Call], device: jax.Device) -> list[Any]:
    """Returns (out, residual) of each call, or the error it ended with."""
    try:
        return _run(calls, device, "r2p")
    except RuntimeError as error:
        if len(calls) == 1:
            return [error]
    # The error names the first that fails. One by one each names its own.
    return [outcome for call in calls for outcome in _run_or_fail([call], device)]


def _run(calls: Sequence[Call], device: jax.Device, implementation: _dispatch.Implementation) -> list[Any]:
    """Runs all calls in one compiled program."""

    def program(inputs: Sequence[Sequence[jax.Array]]) -> list[Any]:
        return [
            attention(*arrays, **call.keywords, return_residual=True, implementation=implementation)
            for call, arrays in zip(calls, inputs, strict=True)
        ]

    inputs = jax.device_put([call.arrays for call in calls], device)
    return jax.tree.map(np.asarray, jax.jit(program)(inputs))


def _reference_device(device: jax.Device) -> jax.Device:
    """Returns a CPU, since on a GPU XLA first tunes each matmul; or `device` if jax was told to have none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return device


def _difference(call: Call, got: tuple[Any, Any], want: tuple[Any, Any]) -> str | None:
    *_, value = call.arrays
    # Weights are rounded to the dtype, and so is the output: half an eps of the largest value each, at most.
    # Twice that, for all that happens in float32. In bfloat16 it is 0.06; a mask that shows or hides one key
    # too many changes the output by 0.26 or more.
    allowed = 2 * float(jnp.finfo(value.dtype).eps) * float(np.abs(value.astype(np.float32)).max())
    for name, one, other, limit in zip(
        ("out", "residual"), got, want, (allowed, _RESIDUAL_ERROR), strict=True
    ):
        error = np.abs(one.astype(np.float32) - other.astype(np.float32)).max()
        if not error <= limit:  # nor if NaN
            return f"{name} differs from the reference by {error:.3g}, where {limit:.3g} is allowed"
    return None

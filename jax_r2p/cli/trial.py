"""Runs every kernel once, on a problem that takes a moment, and compares it with the reference.

A backward kernel gets out and the residual from the reference, so that it stands or falls by itself, and is
compared with the derivatives in plain XLA. So is a preprocess kernel, without which no backward one computes
anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jax_r2p import _arguments, _blockwise, _dispatch, _ffi, _primitives
from jax_r2p._attention import attention
from jax_r2p._manifest import Variant
from jax_r2p._spec import AttentionSpec, MaskKind
from jax_r2p.cli.output import first_line

_HEADS, _KV_HEADS = 4, 2

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
    """A call of `attention`, or of its gradients, that runs one kernel.

    Attributes:
      variant: The kernel.
      arrays: Query, key and value, in numpy.
      cotangents: Of out and the residual.
      keywords: The other arguments.
    """

    variant: Variant
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    cotangents: tuple[np.ndarray, np.ndarray]
    keywords: _Keywords

    @property
    def is_gradient(self) -> bool:
        """Whether the kernel is one of those that compute gradients."""
        return self.variant.role != "forward"

    @property
    def spec(self) -> AttentionSpec:
        """The visible keys."""
        return _arguments.make_spec(
            self.keywords.get("is_causal", False), self.keywords.get("local_window_size")
        )

    def chosen(self) -> Variant | str:
        """The kernel of the same role that GPUs of this process run for the call, or why there is none."""
        query, key, value = self.arrays
        return _dispatch.choose(
            self.spec,
            query.shape,
            key.shape,
            value.shape,
            query.dtype,
            _dispatch.lowering_capability(),
            role=self.variant.role,
        )


def call_of(variant: Variant) -> Call:
    """Returns a call on random numbers that runs `variant`; the same at each time."""
    random = np.random.default_rng(0)
    # More than a tile in both directions, and every query sees a key, so that no residual is infinite. No
    # more, as long calls may have another kernel.
    queries = max(variant.tile_m, variant.tile_n) + 4
    keys = queries + 40 + variant.least_span
    dtype = _dispatch.dtype_of(variant)
    query, key, value, dout = (
        random.standard_normal((1, length, heads, width), np.float32).astype(dtype)
        for length, heads, width in (
            (queries, _HEADS, variant.head_dim),
            (keys, _KV_HEADS, variant.head_dim),
            (keys, _KV_HEADS, variant.value_head_dim),
            (queries, _HEADS, variant.value_head_dim),
        )
    )
    dresidual = random.standard_normal((1, queries, _HEADS), np.float32)
    keywords = _KEYWORDS[variant.mask]
    if variant.least_span and variant.mask == "window":
        keywords = {"local_window_size": (variant.least_span, 7)}
    return Call(variant=variant, arrays=(query, key, value), cotangents=(dout, dresidual), keywords=keywords)


def run_kernels(variants: Sequence[Variant], device: jax.Device) -> dict[str, str | None]:
    """Runs every kernel once on a GPU.

    Returns:
      What went wrong with each, by its name; None for nothing.
    """
    calls = [call_of(variant) for variant in variants]
    wanted = _references(calls, _reference_device(device))
    forwards, backwards = (
        [(call, want) for call, want in zip(calls, wanted, strict=True) if call.is_gradient == is_gradient]
        for is_gradient in (False, True)
    )
    messages = {}
    for trials in (forwards, backwards):
        for (call, want), got in zip(trials, _run_or_fail(trials, device), strict=True):
            failed = isinstance(got, RuntimeError)
            messages[call.variant.name] = first_line(got) if failed else _difference(call, got, want)
    return {variant.name: messages[variant.name] for variant in variants}


@dataclasses.dataclass(frozen=True)
class _Reference:
    """What the reference computes of a call: out, the residual and, for a gradient, the gradients."""

    rows: tuple[Any, Any]
    gradients: tuple[Any, ...] | None


def _references(calls: Sequence[Call], device: jax.Device) -> list[_Reference]:
    def program(inputs: Sequence[Any]) -> list[Any]:
        results = []
        for call, (arrays, cotangents) in zip(calls, inputs, strict=True):
            out, residual = attention(*arrays, **call.keywords, return_residual=True, implementation="xla")
            gradients = None
            if call.is_gradient:
                gradients = _blockwise.backward(
                    *_operands(arrays), None, None, *_rows((out, residual), cotangents), spec=call.spec
                )[:3]
            results.append(((out, residual), gradients))
        return results

    inputs = jax.device_put([(call.arrays, call.cotangents) for call in calls], device)
    return [_Reference(*result) for result in jax.tree.map(np.asarray, jax.jit(program)(inputs))]


def _operands(arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query, key, value and scale."""
    query, key, value = arrays
    return query, key, value, jnp.float32(query.shape[-1] ** -0.5)


def _rows(rows: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Out and lse, and the cotangents of both."""
    (out, residual), (dout, dresidual) = rows, cotangents
    return out, jnp.swapaxes(residual, -1, -2), dout, jnp.swapaxes(dresidual, -1, -2)


def gradients(
    arrays: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, ...]:
    """The gradients by query, key and value, computed by a kernel where there is one."""
    operands = (*_operands(arrays), *_rows(rows, cotangents))
    of = (True, True, True, False)
    return tuple(_primitives.bind_backward(*operands, spec=spec, deterministic=False, of=of))


_Trials = Sequence[tuple[Call, _Reference]]
"""Calls that are all forward or all gradients, and what they should give."""


def _run_or_fail(trials: _Trials, device: jax.Device) -> list[Any]:
    """Returns the results of each call, or the error it ended with."""
    if not trials:
        return []
    try:
        return _run(trials, device)
    except RuntimeError as error:
        if len(trials) == 1:
            return [error]
    # The error names the first that fails. One by one each names its own.
    return [outcome for trial in trials for outcome in _run_or_fail([trial], device)]


def _run(trials: _Trials, device: jax.Device) -> list[Any]:
    """Runs all calls in one compiled program: (out, residual) or the gradients of each."""

    def program(inputs: Sequence[Any]) -> list[Any]:
        return [
            gradients(*given, spec=call.spec)
            if call.is_gradient
            else attention(*given[0], **call.keywords, return_residual=True, implementation="r2p")
            for (call, _), given in zip(trials, inputs, strict=True)
        ]

    # A forward call has no use for the rest.
    given = [
        (call.arrays, want.rows, call.cotangents) if call.is_gradient else (call.arrays,)
        for call, want in trials
    ]
    inputs = jax.device_put(given, device)
    lowered = jax.jit(program).lower(inputs)
    _require_backward_kernels([call for call, _ in trials], lowered.as_text())
    return jax.tree.map(np.asarray, lowered.compile()(inputs))


def _require_backward_kernels(calls: Sequence[Call], text: str) -> None:
    """Refuses a program that computes gradients as plain XLA, which nothing else would tell."""
    wanted = sum(call.is_gradient for call in calls)
    if text.count(f"@{_ffi.BACKWARD_TARGET}(") < wanted:
        name = next(call.variant.name for call in calls if call.is_gradient)
        raise RuntimeError(f"the gradients of a call for {name} run as plain XLA")


def _reference_device(device: jax.Device) -> jax.Device:
    """Returns a CPU, since on a GPU XLA first tunes each matmul; or `device` if jax was told to have none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return device


def _difference(call: Call, got: Sequence[Any], reference: _Reference) -> str | None:
    names: tuple[str, ...]
    wanted: tuple[Any, ...]
    if call.is_gradient:
        names, wanted = ("dquery", "dkey", "dvalue"), reference.gradients or ()
        # Weights and their cotangents are rounded before they are summed, and the sums once more: together
        # less than the eps of the largest one. Twice that, as below.
        eps = 2 * float(jnp.finfo(got[0].dtype).eps)
        limits = [eps * float(np.abs(want.astype(np.float32)).max()) for want in wanted]
    else:
        names, wanted = ("out", "residual"), reference.rows
        *_, value = call.arrays
        # Weights are rounded to the dtype, and so is the output: half an eps of the largest value each, at
        # most. Twice that, for all that happens in float32. In bfloat16 it is 0.06; a mask that shows or
        # hides one key too many changes the output by 0.26 or more.
        allowed = 2 * float(jnp.finfo(value.dtype).eps) * float(np.abs(value.astype(np.float32)).max())
        limits = [allowed, _RESIDUAL_ERROR]
    for name, one, other, limit in zip(names, got, wanted, limits, strict=True):
        error = np.abs(one.astype(np.float32) - other.astype(np.float32)).max()
        if not error <= limit:  # nor if NaN
            return f"{name} differs from the reference by {error:.3g}, where {limit:.3g} is allowed"
    return None

"""How one call of a primitive becomes calls of a kernel, in a program for CUDA.

A kernel takes one batch dimension, one scale, and heads of a multiple of 8 elements. So batch dimensions are
folded, heads are padded, and a kernel is called once for each scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_r2p import _batching, _blockwise, _dispatch, _ffi, _scores
from jax_r2p._manifest import Variant
from jax_r2p._spec import AttentionSpec


def forward(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    *,
    variant: Variant,
    spec: AttentionSpec,
) -> tuple[Array, Array]:
    """Computes out and lse of the operands of `attention_p`."""
    call = functools.partial(_forward, variant=variant, spec=spec)
    out, lse = _for_each_scale(call, query, key, value, scale, query_lengths, key_lengths)
    return out, lse


def _forward(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    *,
    variant: Variant,
    spec: AttentionSpec,
) -> tuple[Array, Array]:
    *batch, queries, heads, _ = query.shape
    folding = _batching.fold(batch, key.shape[:-3], value.shape[:-3])
    out, lse = _ffi.attention_forward(
        _fold_and_pad(query, batch),
        _fold_and_pad(key, folding.kv_dims),
        _fold_and_pad(value, folding.kv_dims),
        scale,
        _fold_small(query_lengths, batch),
        _fold_small(key_lengths, batch),
        variant=variant,
        spec=spec.effective(queries, key.shape[-3]),
        kv_repeat=folding.repeat,
        kv_inner=folding.inner,
    )
    return _unfold(out, batch, value.shape[-1]), lse.reshape(*batch, heads, queries)


def backward(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    *,
    variant: Variant,
    spec: AttentionSpec,
    deterministic: bool,
    of: tuple[bool, bool, bool, bool],
) -> tuple[Array, Array, Array, Array | None]:
    """Computes (dquery, dkey, dvalue, dscale) of the operands of `attention_backward_p`.

    `of` says which of them are asked for. dscale costs a second backward pass, and is None where it is not;
    the others come together.
    """
    lengths = (query_lengths, key_lengths)
    # Where every row sees a key that saves a copy.
    if any(x is not None for x in lengths) or spec.empties_rows(query.shape[-3], key.shape[-3]):
        dout = _blockwise.cut_empty_rows(dout, lse)
    call = functools.partial(
        _backward, variant=variant, spec=spec, deterministic=deterministic, with_dscale=of[3]
    )
    results = _for_each_scale(call, query, key, value, scale, *lengths, out, dout, lse, dlse)
    dquery, dkey, dvalue, *dscale = results
    dkey, dvalue = (
        _blockwise.sum_to(x.astype(lse.dtype), like.shape).astype(like.dtype) if x.shape != like.shape else x
        for x, like in ((dkey, key), (dvalue, value))
    )
    return dquery, dkey, dvalue, dscale[0] if dscale else None


def _backward(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array,
    *,
    variant: Variant,
    spec: AttentionSpec,
    deterministic: bool,
    with_dscale: bool,
) -> tuple[Array, ...]:
    """Returns (dquery, dkey, dvalue), and dscale if it is wanted."""
    *batch, queries, _, head_dim = query.shape
    key_dims: Sequence[int] = key.shape[:-3]
    value_dims: Sequence[int] = value.shape[:-3]
    if key_lengths is not None:
        # The kernel clears what lies beyond the keys of a sequence, so none may share them with a longer one.
        key_dims = value_dims = batch
    folding = _batching.fold(batch, key_dims, value_dims)
    call = functools.partial(
        _ffi.attention_backward,
        _fold_and_pad(query, batch),
        _fold_and_pad(key, folding.kv_dims),
        _fold_and_pad(value, folding.kv_dims),
        _fold_and_pad(out, batch),
        _fold_and_pad(dout, batch),
        _batching.flatten_batch(lse, 2),
        _batching.flatten_batch(dlse, 2),
        scale,
        query_lengths=_fold_small(query_lengths, batch),
        key_lengths=_fold_small(key_lengths, batch),
        variant=variant,
        spec=spec.effective(queries, key.shape[-3]),
        kv_repeat=folding.repeat,
        kv_inner=folding.inner,
        deterministic=deterministic,
    )
    dquery, dkey, dvalue = call(dquery_factor=scale)
    results = (
        _unfold(dquery, batch, head_dim),
        _unfold(dkey, folding.kv_dims, head_dim),
        _unfold(dvalue, folding.kv_dims, value.shape[-1]),
    )
    if not with_dscale:
        return results
    # dquery is of no use here: it is rounded after it is multiplied by scale, which may be 0. Nor are sums by
    # themselves, which may be too large for fp16 where dquery is not.
    factor = head_dim**-0.5
    by_factor, _, _ = call(dquery_factor=lax.full_like(scale, factor))
    by_factor = _unfold(by_factor, batch, head_dim).astype(scale.dtype)
    # Queries that are not there may be NaN; their sums are 0.
    dscale = jnp.sum(_scores.finite(query).astype(scale.dtype) * by_factor, axis=(-3, -2, -1))
    return *results, dscale / factor


def _fold_and_pad(x: Array, batch: Sequence[int]) -> Array:
    """Returns x (*batch or 1s, T, N, H) as a kernel takes it: (B, T, N, a multiple of 8)."""
    # Zeros add nothing to a score, and in value they become columns of out that are cut off again.
    missing = _dispatch.padded_head_dim(x.shape[-1]) - x.shape[-1]
    if missing:
        x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, missing, 0)])
    return _batching.flatten_batch(jnp.broadcast_to(x, (*batch, *x.shape[-3:])), 3)


def _fold_small(x: Array | None, batch: Sequence[int]) -> Array | None:
    """Returns lengths as a kernel takes them: of each batch entry of the query. They are few to copy."""
    return None if x is None else _batching.flatten_batch(jnp.broadcast_to(x, batch), 0)


def _unfold(x: Array, batch: Sequence[int], width: int) -> Array:
    return x.reshape(*batch, *x.shape[1:])[..., :width]


def _for_each_scale(
    call: Callable[..., tuple[Array, ...]],
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    *others: Array | None,
) -> tuple[Array, ...]:
    """Calls `call`, with a scalar scale; once for each index of a batch dimension along which scale differs.

    One call follows the other: the kernel reads a single scale, so each further one costs a launch. An
    operand of size 1 in such a dimension is shared, as is None; all results have the dimension.

    A plain loop, since those of `lax.map` have inner functions, which XLA does not expect in a program that
    takes the place of a custom call (`_sharding`): for CPU, as of jax 0.12, it fails to compile them.
    """
    operands = (query, key, value, scale, *others)
    axis = next((axis for axis, size in enumerate(scale.shape) if size > 1), None)
    if axis is None:
        return call(query, key, value, scale.reshape(()), *others)
    size = scale.shape[axis]

    def start(x: Array, i: Array) -> list[Any]:
        return [i if dim == axis else np.int32(0) for dim in range(x.ndim)]

    def take(x: Array | None, i: Array) -> Array | None:
        if x is None or x.ndim == 0:
            return x
        if x.shape[axis] > 1:
            sizes = [1 if dim == axis else length for dim, length in enumerate(x.shape)]
            x = lax.dynamic_slice(x, start(x, i), sizes)
        return lax.squeeze(x, (axis,))

    def one(i: Array) -> tuple[Array, ...]:
        return _for_each_scale(call, *(take(x, i) for x in operands))  # type: ignore[arg-type]

    def step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        i, *wholes = state
        updated = (
            lax.dynamic_update_slice(whole, lax.expand_dims(part, (axis,)), start(whole, i))
            for whole, part in zip(wholes, one(i), strict=True)
        )
        return i + 1, *updated

    zeros = (
        lax.full((*x.shape[:axis], size, *x.shape[axis:]), 0, x.dtype)
        for x in jax.eval_shape(one, jax.ShapeDtypeStruct((), np.int32))
    )
    _, *results = lax.while_loop(lambda state: state[0] < size, step, (jnp.int32(0), *zeros))
    return tuple(results)

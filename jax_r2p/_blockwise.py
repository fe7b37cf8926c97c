"""Derivatives of attention in plain `jax.numpy`, with memory that is linear in T and in S.

With the scores s and their weights p = exp(s - lse), tangents (primed) and cotangents (d) of attention are

    s'   = scale * (query' . key + query . key') + scale' * (query . key)
    lse' = sum_j p s'
    out' = sum_j p (s' - lse') value + sum_j p value'

    ds     = p * (dout . value - delta)     where delta = sum_h dout * out - dlse
    dquery = scale * sum_j ds key           dkey = scale * sum_i ds query
    dvalue = sum_i p dout                   dscale = sum_i,j ds (query . key)

All of these are sums over keys or arrays of keys, so they are computed for one block of keys after the other,
whose weights are forgotten. Nothing but sums is carried from block to block, and weights are computed again
where a derivative of these functions needs them: so first derivatives of these functions need memory that is
linear in T and S, too.

Hidden keys have derivatives of exactly 0, and so have queries that see no key, whatever their cotangents are.
NaN and infinite elements are constants, as in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_r2p import _scores
from jax_r2p._spec import AttentionSpec
from jax_r2p.reference import compute_dtype

BLOCK = 256
"""Keys of a block. Its weights take the memory of a query in float32 with heads of that many elements."""


def tangent(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    out: Array,
    lse: Array,
    query_dot: Array | None,
    key_dot: Array | None,
    value_dot: Array | None,
    scale_dot: Array | None,
    *,
    spec: AttentionSpec,
    block: int = BLOCK,
) -> tuple[Array, Array]:
    """Computes the tangents of out and lse; linear in those of the operands.

    Args:
      query: (*B, T, N, H).
      key: (*B, S, K, H); here and in all others but query, out and lse, batch dimensions may be 1.
      value: (*B, S, K, Hv).
      scale: () or (*B).
      query_lengths: (*B), or None.
      key_lengths: (*B), or None.
      out: (*B, T, N, Hv), of `reference.attention`.
      lse: (*B, N, T), likewise.
      query_dot: Tangent of query; None for zero, here and below.
      key_dot: Tangent of key.
      value_dot: Tangent of value.
      scale_dot: Tangent of scale.
      spec: The visible keys.
      block: Keys of a block.

    Returns:
      (out_dot, lse_dot), like out and lse.
    """
    dtype = compute_dtype(query.dtype)
    first, end, queries, factor, lse_grouped = _common(
        query, key, scale, query_lengths, key_lengths, lse, spec
    )
    kv_heads = key.shape[-2]
    query_dot, scale_dot = (
        None if query_dot is None else _scores.group_heads(query_dot, kv_heads).astype(dtype),
        None if scale_dot is None else _trailing(scale_dot),
    )
    out = _scores.group_heads(out, kv_heads).astype(dtype)

    def step(start: Array, shared: Any, blocks: Any) -> tuple[tuple[Array, Array], tuple[()]]:
        first, end, queries, factor, lse, query_dot, scale_dot = shared
        key, value, key_dot, value_dot = jax.tree.map(lambda x: x.astype(dtype), blocks)
        seen = _scores.visible(first, end, start + jnp.arange(key.shape[-3]))
        product = jnp.where(seen, _scores.scores(queries, key), 0)
        weights = _weights(product * factor, seen, lse)
        score_dot = jnp.zeros_like(weights)
        if query_dot is not None:
            score_dot += factor * _pair(query_dot, _scores.finite(key))
        if key_dot is not None:
            score_dot += factor * _pair(_scores.finite(queries), key_dot)
        if scale_dot is not None:
            score_dot += scale_dot * product
        weighted = jnp.where(seen, weights * score_dot, 0)
        out_dot = _sum_over_keys(weighted, _scores.finite(value))
        if value_dot is not None:
            out_dot += _sum_over_keys(weights, value_dot)
        return (out_dot, jnp.sum(weighted, axis=-1)), ()

    shared = (first, end, queries, factor, lse_grouped, query_dot, scale_dot)
    (out_dot, lse_dot), _ = _over_blocks(
        step, shared, (key, value, key_dot, value_dot), (_zeros_like(out), _zeros_like(lse_grouped)), block
    )
    out_dot = out_dot - _of_rows(lse_dot) * out
    *batch, rows, heads, _ = query.shape
    out_dot = out_dot.reshape(*batch, rows, heads, value.shape[-1]).astype(query.dtype)
    return out_dot, lse_dot.reshape(lse.shape)


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
    spec: AttentionSpec,
    block: int = BLOCK,
) -> tuple[Array, Array, Array, Array]:
    """Computes the cotangents of the operands.

    Args:
      query: (*B, T, N, H).
      key: (*B, S, K, H); batch dimensions may be 1, here and in value, scale and the lengths.
      value: (*B, S, K, Hv).
      scale: () or (*B).
      query_lengths: (*B), or None.
      key_lengths: (*B), or None.
      out: (*B, T, N, Hv), of `reference.attention`.
      lse: (*B, N, T), likewise.
      dout: Cotangent of out.
      dlse: Cotangent of lse.
      spec: The visible keys.
      block: Keys of a block.

    Returns:
      (dquery, dkey, dvalue, dscale): like query, key and value; dscale is (*B), and for a shared scale is to
      be summed.
    """
    dtype = compute_dtype(query.dtype)
    first, end, queries, factor, lse_grouped = _common(
        query, key, scale, query_lengths, key_lengths, lse, spec
    )
    kv_heads = key.shape[-2]
    delta = row_delta(out, lse, dout, dlse).reshape(lse_grouped.shape)
    dout = _scores.group_heads(cut_empty_rows(dout, lse), kv_heads).astype(dtype)

    def step(start: Array, shared: Any, blocks: Any) -> tuple[Array, tuple[Array, ...]]:
        first, end, queries, factor, lse, dout, delta = shared
        key, value = (x.astype(dtype) for x in blocks)
        seen = _scores.visible(first, end, start + jnp.arange(key.shape[-3]))
        product = jnp.where(seen, _scores.scores(queries, key), 0)
        weights = _weights(product * factor, seen, lse)
        dscore = weights * (_pair(dout, _scores.finite(value)) - delta[..., None])
        dscore = jnp.where(seen, dscore, 0)
        dkey = _sum_over_queries(dscore, _scores.finite(queries) * factor)
        dvalue = _sum_over_queries(weights, dout)
        dkey, dvalue = (
            sum_to(x, like.shape).astype(like.dtype) for x, like in zip((dkey, dvalue), blocks, strict=True)
        )
        return _sum_over_keys(dscore, _scores.finite(key)), (dkey, dvalue)

    shared = (first, end, queries, factor, lse_grouped, dout, delta)
    dquery_sum, (dkey, dvalue) = _over_blocks(step, shared, (key, value), _zeros_like(queries), block)
    dscale = jnp.sum(_scores.finite(queries) * dquery_sum, axis=(-4, -3, -2, -1))
    dquery = (dquery_sum * factor).reshape(query.shape).astype(query.dtype)
    return dquery, dkey, dvalue, dscale


def row_delta(out: Array, lse: Array, dout: Array, dlse: Array) -> Array:
    """Returns delta, (*B, N, T): the sum of dout * out over a row, minus dlse; 0 in rows that see no key.

    The cotangent of lse costs nothing more: d lse / d s is p, which ds has as a factor already.
    """
    products = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    return jnp.where(lse == -jnp.inf, 0, jnp.swapaxes(products, -1, -2) - dlse)


def cut_empty_rows(dout: Array, lse: Array) -> Array:
    """Returns dout with 0 in rows that see no key, where a loss may have made NaN of -inf."""
    return jnp.where(jnp.swapaxes(lse == -jnp.inf, -1, -2)[..., None], 0, dout)


def sum_to(x: Array, shape: Sequence[int]) -> Array:
    """Sums `x` over the dimensions in which `shape`, of the same rank, has 1 instead; all, if it is ()."""
    if not shape:
        return jnp.sum(x)
    axes = [i for i, (size, want) in enumerate(zip(x.shape, shape, strict=True)) if size != want]
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def _common(
    query: Array,
    key: Array,
    scale: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    lse: Array,
    spec: AttentionSpec,
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns what every block needs: the range of visible keys, and query, scale and lse by head groups."""
    *batch, rows, _, _ = query.shape
    keys, kv_heads = key.shape[-3:-1]
    first, end = _scores.visible_range(spec, rows, keys, query_lengths, key_lengths, batch)
    queries = _scores.group_heads(query, kv_heads).astype(compute_dtype(query.dtype))
    lse = lse.reshape(*batch, *queries.shape[-3:-1], rows)
    return first, end, queries, _trailing(scale), lse


def _trailing(scale: Array) -> Array:
    """Returns scale so that it broadcasts against (*B, K, G, T, S), and against (*B, T, K, G, H)."""
    return scale[..., None, None, None, None]


def _weights(scores: Array, seen: Array, lse: Array) -> Array:
    # Hidden scores and rows without any other are cut off before exp, so that its derivative meets neither.
    shift = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    return jnp.exp(jnp.where(seen, scores - shift, -jnp.inf))


def _pair(query: Array, key: Array) -> Array:
    return _scores.einsum("...tkgh,...skh->...kgts", query, key)


def _sum_over_keys(weights: Array, x: Array) -> Array:
    return _scores.einsum("...kgts,...skh->...tkgh", weights, x)


def _sum_over_queries(weights: Array, x: Array) -> Array:
    return _scores.einsum("...kgts,...tkgh->...skh", weights, x)


def _of_rows(x: Array) -> Array:
    """(*B, K, G, T) -> (*B, T, K, G, 1)."""
    return jnp.moveaxis(x, -1, -3)[..., None]


def _zeros_like(x: Array) -> Array:
    """Zeros with the sharding and the manual axes of `x`, which those of `jax.numpy` do not have."""
    return jnp.where(False, x, 0)


def _over_blocks(
    step: Callable[[Any, Any, Any], tuple[Any, Any]], shared: Any, of_keys: Any, zeros: Any, block: int
) -> tuple[Any, Any]:
    """Calls `step(start, shared, blocks)` for each block of keys; sums its first result and joins its second.

    Args:
      step: Computes one block, whose first key is `start`.
      shared: Arrays that every block needs.
      of_keys: Arrays (..., S, K, H), of which each block gets its own keys. After the last key follow zeros.
      zeros: Where the sum begins.
      block: Keys of a block.
    """
    keys = jax.tree.leaves(of_keys)[0].shape[-3]
    # Derivatives keep what goes into a block, and none of the arrays of scores inside.
    step = jax.checkpoint(step, prevent_cse=False)
    if not isinstance(keys, int) or keys <= block:
        return step(0, shared, of_keys)
    count = -(-keys // block)

    def split(x: Array) -> Array:
        padding = [(0, 0, 0)] * (x.ndim - 3) + [(0, count * block - keys, 0), (0, 0, 0), (0, 0, 0)]
        x = lax.pad(x, jnp.zeros((), x.dtype), padding)
        return jnp.moveaxis(x.reshape(*x.shape[:-3], count, block, *x.shape[-2:]), -4, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, -4)
        return lax.slice_in_dim(x.reshape(*x.shape[:-4], count * block, *x.shape[-2:]), 0, keys, axis=-3)

    def body(total: Any, x: Any) -> tuple[Any, Any]:
        start, blocks = x
        summed, own = step(start, shared, blocks)
        return jax.tree.map(jnp.add, total, summed), own

    starts = jnp.arange(count) * block
    total, own = lax.scan(body, zeros, (starts, jax.tree.map(split, of_keys)))
    return total, jax.tree.map(join, own)

"""Attention in plain `jax.numpy`: the contract of every result, and what runs where no kernel does.

For each query i of a row of T queries and S keys, with the visible keys of `AttentionSpec`:

    score[j] = scale * sum_h query[i, h] * key[j, h]      for every visible key j
    lse      = log(sum_j exp(score[j]))                   natural logarithm
    out      = sum_j exp(score[j] - lse) * value[j]      as wide as value

Query head n uses key and value head n // (N // K).

Visible keys. The last query is aligned with the last key, and both ends of a window are inclusive. Rows are
queries, columns are keys, 1 is visible:

    T = 4, S = 4    causal     window (1, 1)   window (1, 0)   causal, T = 2   causal, S = 2
                    1 0 0 0       1 1 0 0         1 0 0 0         1 1 1 0          0 0
                    1 1 0 0       1 1 1 0         1 1 0 0         1 1 1 1          0 0
                    1 1 1 0       0 1 1 1         0 1 1 0                          1 0
                    1 1 1 1       0 0 1 1         0 0 1 1                          1 1

A query that sees no key (the first two rows of the last example, or any row when S = 0) gets out 0 and lse
-inf, and adds exactly 0 to every gradient.

Lengths. Where sequences of a batch differ in length, t <= T of the queries and s <= S of the keys are there.
Visible keys follow from t and s in place of T and S, so the last query that is there is aligned with the last
key that is there. Keys from s on are hidden from all, and queries from t on see no key. Lengths below 0 count
as 0, and those above T or S as T or S.

A hidden key has no influence at all, not even when its key or value is NaN or infinite: 0 * NaN does not
leak. A visible key has: its NaN or infinite value reaches the output as NaN or infinity, however small its
weight. Gradients take such elements as constants, so that those of queries which do not see them stay finite.

Everything is computed in float32 (float64 for float64 inputs) at full matmul precision and rounded once, at
the end.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_r2p import _scores
from jax_r2p._promotion import promoting
from jax_r2p._spec import AttentionSpec


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of scores, weights, scale and lse for inputs of `dtype`: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


# Called outside of jit, its operations would be compiled and run one by one.
@functools.partial(jax.jit, static_argnames="spec", inline=True)
@promoting
def attention(
    query: Array,
    key: Array,
    value: Array,
    scale: ArrayLike,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    *,
    spec: AttentionSpec,
) -> tuple[Array, Array]:
    """Computes attention by the definition above, with all T * S scores in memory.

    Args:
      query: (*B, T, N, H), floating point.
      key: (*B, S, K, H), same dtype; N is a multiple of K. Each batch dimension may also be 1 and is then
        shared.
      value: (*B, S, K, Hv), same dtype; likewise, though other batch dimensions than those of `key` may be 1.
      scale: Factor of the scores, of any sign; a scalar, or an array that broadcasts against the batch
        dimensions *B.
      query_lengths: Queries that are there; integers, a scalar or an array that broadcasts against *B. None
        for T.
      key_lengths: Keys that are there, likewise; None for S. It is a matter of the query's batch, also where
        the keys are shared.
      spec: The visible keys.

    Returns:
      out, (*B, T, N, Hv), of the dtype of `query`, and lse, (*B, N, T), float32 or float64.
    """
    dtype = compute_dtype(query.dtype)
    *batch, queries, heads, _ = query.shape
    keys, kv_heads = key.shape[-3:-1]
    scores = _scores.scores(_scores.group_heads(query, kv_heads).astype(dtype), key.astype(dtype))
    scale = jnp.asarray(scale, dtype)[..., None, None, None, None]
    first, end = _scores.visible_range(spec, queries, keys, query_lengths, key_lengths, batch)
    if spec.effective(queries, keys) == AttentionSpec() and query_lengths is None and key_lengths is None:
        scores = scores * scale
    else:
        visible = _scores.visible(first, end, jnp.arange(keys))
        # Hidden scores may be NaN. They are cut off on both sides of the product, so that neither its value
        # nor its derivative by `scale` meets them.
        scores = jnp.where(visible, jnp.where(visible, scores, 0) * scale, -jnp.inf)

    # Any finite shift gives the same result; the largest score keeps exp in range. It is -inf for a row
    # without visible keys, where exp(-inf - -inf) would be NaN.
    largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, axis=-1)
    empty = total == 0
    divisor = jnp.where(empty, 1, total)

    out = _weighted_values(weights, value.astype(dtype), first, end)
    out = out / jnp.moveaxis(divisor, -1, -3)[..., None]
    lse = jnp.where(empty, -jnp.inf, shift[..., 0] + jnp.log(divisor))
    out = out.reshape(*batch, queries, heads, value.shape[-1]).astype(query.dtype)
    return out, lse.reshape(*batch, heads, queries)


# The derivatives of the product see finite numbers only, as those of the scores do, and hidden elements must
# not enter its value either.


@jax.custom_jvp
def _weighted_values(weights: Array, value: Array, first: Array, end: Array) -> Array:
    """Weights (..., K, G, T, S) times value (..., S, K, Hv) -> (..., T, K, G, Hv)."""
    product = _product(weights, _scores.finite(value))
    return product + _visible_infinities(value, first, end)[..., None, :]


@_weighted_values.defjvp
def _weighted_values_jvp(
    primals: tuple[Array, Array, Array, Array], tangents: tuple[Array, Array, Any, Any]
) -> tuple[Array, Array]:
    (weights, value, first, end), (weights_dot, value_dot, _, _) = primals, tangents
    tangent = _product(weights_dot, _scores.finite(value)) + _product(weights, value_dot)
    return _weighted_values(weights, value, first, end), tangent


def _product(weights: Array, value: Array) -> Array:
    return _scores.einsum("...kgts,...skh->...tkgh", weights, value)


def _visible_infinities(value: Array, first: Array, end: Array) -> Array:
    """Returns (..., T, K, Hv): the sum of the NaN and infinite values that each query sees, else 0."""
    # Visible keys are consecutive, so they are counted as the difference of two prefix sums.
    nan = jnp.isnan(value)
    flags = jnp.concatenate([nan | (value == jnp.inf), nan | (value == -jnp.inf)], axis=-1)
    counts = jnp.cumsum(flags, axis=-3, dtype=jnp.int32)
    before = jnp.pad(counts, [(0, 0)] * (counts.ndim - 3) + [(1, 0), (0, 0), (0, 0)])
    up, down = jnp.split(_take_keys(before, end) > _take_keys(before, first), 2, axis=-1)
    return jnp.where(up, jnp.inf, 0) + jnp.where(down, -jnp.inf, 0)


def _take_keys(x: Array, index: Array) -> Array:
    """Takes from x (*B, S, K, H), for each query, the key `index`, (T,) or (*B, T) -> (*B, T, K, H)."""
    if index.ndim == 1:
        return jnp.take(x, index, axis=-3)
    return jnp.take_along_axis(x, index[..., None, None], axis=-3)

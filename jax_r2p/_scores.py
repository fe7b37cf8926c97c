"""What the definition and its derivatives share: scores, and which of them are visible."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_r2p._spec import AttentionSpec

einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def group_heads(x: Array, kv_heads: int) -> Array:
    """Splits the heads of x (*B, T, N, H) by the key head they use: (*B, T, K, G, H)."""
    *batch, queries, heads, width = x.shape
    group = heads // kv_heads if kv_heads else 0
    return x.reshape(*batch, queries, kv_heads, group, width)


def visible_range(
    spec: AttentionSpec,
    queries: int,
    keys: int,
    query_lengths: Array | None,
    key_lengths: Array | None,
    batch: Sequence[int],
) -> tuple[Array, Array]:
    """Returns (first, end), each (T,) or (*B, T): a query sees keys first ... end - 1; none if end <= first.

    Args:
      spec: The visible keys.
      queries: T.
      keys: S.
      query_lengths: Queries that are there; a scalar or an array that broadcasts against *B. None for T.
      key_lengths: Keys that are there, likewise; None for S.
      batch: *B.
    """
    spec = spec.effective(queries, keys)  # bounds of any size become less than 32 bits
    query_length, key_length = (
        _sequence_lengths(lengths, extent, batch)
        for lengths, extent in ((query_lengths, queries), (key_lengths, keys))
    )
    row = jnp.arange(queries)
    low, high = spec.bounds(query_length, key_length)
    first = jnp.zeros_like(row) if low is None else row + low
    end = jnp.asarray(key_length if high is None else jnp.minimum(row + high + 1, key_length))
    end = jnp.where(row < query_length, end, 0)
    first, end = jnp.broadcast_arrays(first, end)
    return jnp.clip(first, 0, keys), jnp.clip(end, 0, keys)


def _sequence_lengths(lengths: Array | None, extent: int, batch: Sequence[int]) -> Array | int:
    """Returns lengths within 0 and `extent`: one number, or an array of the rank of `batch` and one more."""
    if lengths is None:
        return extent
    lengths = jnp.clip(lengths, 0, extent)
    missing = len(batch) - lengths.ndim
    return lengths.reshape(*(1,) * missing, *lengths.shape, 1) if lengths.ndim else lengths


def visible(first: Array, end: Array, index: Array) -> Array:
    """Whether queries see the keys `index`, (s,): an array that broadcasts against (*B, K, G, T, s)."""
    seen = (index >= first[..., None]) & (index < end[..., None])
    return seen[..., None, None, :, :] if seen.ndim > 2 else seen


# Derivatives see finite numbers only: a hidden key has weight 0, and 0 times an infinite element would spread
# NaN from it to the whole row.


def finite(x: Array) -> Array:
    """Returns `x` with 0 in place of NaN and infinities, which thereby are constants of every derivative."""
    return jnp.where(jnp.isfinite(x), x, 0)


@jax.custom_jvp
def scores(query: Array, key: Array) -> Array:
    """Query (..., T, K, G, H) times key (..., S, K, H) -> (..., K, G, T, S), not scaled."""
    return einsum("...tkgh,...skh->...kgts", query, key)


@scores.defjvp
def _scores_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (query, key), (query_dot, key_dot) = primals, tangents
    return scores(query, key), scores(query_dot, finite(key)) + scores(finite(query), key_dot)

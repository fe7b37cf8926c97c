"""The path of a sharded call on CPU devices: all that runs for CUDA, but for the kernel's own call."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_r2p import _ffi, _primitives

COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")


class Calls(list[tuple[int, ...]]):
    """Shapes of the query in calls of a forward kernel; `backward` has those of a backward kernel.

    `real_backward` is the function whose place a plain one takes.
    """

    def __init__(self):
        super().__init__()
        self.backward: list[tuple[int, ...]] = []
        self.real_backward = _ffi.attention_backward


@contextlib.contextmanager
def kernel_on_cpu() -> Iterator[Calls]:
    """Lowers for CPU as for CUDA, with plain functions in place of the kernels.

    Yields:
      Lists to which the shape of the query of each kernel call is added, as it is lowered. In a program that
      is split these are the shapes of a shard.
    """
    seen = Calls()

    def forward(query, *operands, **keywords):
        seen.append(query.shape)
        return plain_kernel(query, *operands, **keywords)

    def backward(query, *operands, **keywords):
        seen.backward.append(query.shape)
        return plain_backward_kernel(query, *operands, **keywords)

    production = _ffi.attention_forward, _ffi.attention_backward
    _ffi.attention_forward, _ffi.attention_backward = forward, backward
    rules = {
        _primitives.attention_p: (_primitives._lower_forward_cuda, _primitives._lower_forward_default),
        _primitives.attention_backward_p: (
            _primitives._lower_backward_cuda,
            _primitives._lower_backward_default,
        ),
    }
    for primitive, (cuda, _) in rules.items():
        mlir.register_lowering(primitive, cuda, platform="cpu")
    try:
        yield seen
    finally:
        _ffi.attention_forward, _ffi.attention_backward = production
        for primitive, (_, default) in rules.items():
            mlir.register_lowering(primitive, default, platform="cpu")


def plain_kernel(query, key, value, scale, *lengths, variant, spec, kv_repeat, kv_inner):
    """Computes what a kernel does for finite operands; has the signature of its call.

    The program has no inner functions, as that of a kernel's call has none. Not the reference, then: XLA for
    CPU (jax 0.12) fails to compile those in a program that took the place of a custom call.
    """
    del variant
    dtype, (batch, queries, heads, width), keys, kv_heads = query.dtype, query.shape, *key.shape[1:3]
    query = query.astype(np.float32).reshape(batch, queries, kv_heads, heads // kv_heads, width)
    key, value = (
        lax.broadcast_in_dim(
            x.astype(np.float32).reshape(-1, kv_inner, *x.shape[1:]),
            (batch // (kv_repeat * kv_inner), kv_repeat, kv_inner, *x.shape[1:]),
            (0, 2, 3, 4, 5),
        ).reshape(batch, *x.shape[1:])
        for x in (key, value)
    )
    # Scores are (B, K, T, G, S).
    scores = scale * lax.dot_general(query, key, (([4], [3]), ([0, 2], [0, 2])), "highest")

    visible = _visible((batch, kv_heads, queries, heads // kv_heads, keys), lengths, spec)
    scores = lax.select(visible, scores, lax.full_like(scores, -1e30))
    largest = scores.max(-1, keepdims=True)
    weights = lax.select(visible, lax.exp(scores - largest), lax.full_like(scores, 0))
    total = weights.sum(-1)
    divisor = lax.max(total, lax.full_like(total, 1e-30))
    # Here out is (B, K, T, G, Hv).
    out = lax.dot_general(weights, value, (([4], [1]), ([0, 1], [0, 2])), "highest") / divisor[..., None]
    lse = lax.select(total > 0, largest[..., 0] + lax.log(divisor), lax.full_like(total, -np.inf))
    out = out.transpose(0, 2, 1, 3, 4).reshape(batch, queries, heads, -1).astype(dtype)
    return out, lse.transpose(0, 1, 3, 2).reshape(batch, heads, queries)


def plain_backward_kernel(
    query,
    key,
    value,
    out,
    dout,
    lse,
    dlse,
    scale,
    dquery_factor,
    query_lengths,
    key_lengths,
    *,
    variant,
    spec,
    kv_repeat,
    kv_inner,
    deterministic,
):
    """The same for a backward kernel."""
    del variant, deterministic
    lengths = (query_lengths, key_lengths)
    (batch, queries, heads, width), keys, kv_heads = query.shape, *key.shape[1:3]
    dtype, group = key.dtype, heads // kv_heads
    query = query.astype(np.float32).reshape(batch, queries, kv_heads, group, width)
    delta = (out.astype(np.float32) * dout.astype(np.float32)).sum(-1).transpose(0, 2, 1) - dlse
    dout = dout.astype(np.float32).reshape(batch, queries, kv_heads, group, -1)
    runs = (batch // (kv_repeat * kv_inner), kv_repeat, kv_inner)
    key, value = (
        lax.broadcast_in_dim(
            x.astype(np.float32).reshape(-1, kv_inner, *x.shape[1:]), (*runs, *x.shape[1:]), (0, 2, 3, 4, 5)
        ).reshape(batch, *x.shape[1:])
        for x in (key, value)
    )

    def of_rows(x):
        x = x.reshape(batch, kv_heads, group, queries).transpose(0, 1, 3, 2)
        return lax.broadcast_in_dim(x, (*x.shape, keys), (0, 1, 2, 3))

    def pair(rows, columns):  # (B, K, T, G, S)
        return lax.dot_general(rows, columns, (([4], [3]), ([0, 2], [0, 2])), "highest")

    def over_queries(weights, rows):  # (B, K, S, H)
        return lax.dot_general(weights, rows, (([2, 3], [1, 3]), ([0, 1], [0, 2])), "highest")

    scores = scale * pair(query, key)
    visible = _visible(scores.shape, lengths, spec) & (of_rows(lse) != -np.inf)
    zero = lax.full_like(scores, 0)
    weights = lax.select(visible, lax.exp(lax.select(visible, scores - of_rows(lse), zero)), zero)
    dscores = lax.select(visible, weights * (pair(dout, value) - of_rows(delta)), zero)
    dquery = lax.dot_general(dscores, key, (([4], [1]), ([0, 1], [0, 2])), "highest")
    dkey, dvalue = (
        x.transpose(0, 2, 1, 3)
        .reshape(*runs, keys, kv_heads, -1)
        .sum(1)
        .reshape(-1, keys, kv_heads, x.shape[-1])
        for x in (scale * over_queries(dscores, query), over_queries(weights, dout))
    )
    dquery = dquery.transpose(0, 2, 1, 3, 4).reshape(batch, queries, heads, width)
    return (dquery_factor * dquery).astype(dtype), dkey.astype(dtype), dvalue.astype(dtype)


def _visible(shape, lengths, spec):
    """Which key a query sees, (B, K, T, G, S)."""
    row, column = (lax.broadcasted_iota(np.int32, shape, dim) for dim in (2, 4))
    t, s = (
        np.int32(size) if x is None else lax.broadcast_in_dim(lax.clamp(0, x, size), shape, (0,))
        for x, size in zip(lengths or (None, None), (shape[2], shape[4]), strict=True)
    )
    low, high = spec.bounds(t, s)
    visible = (row < t) & (column < s)
    if low is not None:
        visible &= column - row >= low
    if high is not None:
        visible &= column - row <= high
    return visible


def collectives(text: str) -> dict[str, int]:
    """Counts the collectives of a compiled program; names only those that it has."""
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}

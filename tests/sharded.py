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


@contextlib.contextmanager
def kernel_on_cpu() -> Iterator[list[tuple[int, ...]]]:
    """Lowers for CPU as for CUDA, with `plain_kernel` in place of the kernel.

    Yields:
      A list to which the shape of the query of each kernel call is added, as it is lowered. In a program that
      is split these are the shapes of a shard.
    """
    seen: list[tuple[int, ...]] = []

    def stand_in(query, *operands, **keywords):
        seen.append(query.shape)
        return plain_kernel(query, *operands, **keywords)

    production = _ffi.attention_forward
    _ffi.attention_forward = stand_in
    mlir.register_lowering(_primitives.attention_p, _primitives._lower_forward_cuda, platform="cpu")
    try:
        yield seen
    finally:
        _ffi.attention_forward = production
        mlir.register_lowering(_primitives.attention_p, _primitives._lower_forward_default, platform="cpu")


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

    shape = (batch, kv_heads, queries, heads // kv_heads, keys)
    row, column = (lax.broadcasted_iota(np.int32, shape, dim) for dim in (2, 4))
    t, s = (
        np.int32(size) if x is None else lax.broadcast_in_dim(lax.clamp(0, x, size), shape, (0,))
        for x, size in zip(lengths or (None, None), (queries, keys), strict=True)
    )
    low, high = spec.bounds(t, s)
    visible = (row < t) & (column < s)
    if low is not None:
        visible &= column - row >= low
    if high is not None:
        visible &= column - row <= high

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


def collectives(text: str) -> dict[str, int]:
    """Counts the collectives of a compiled program; names only those that it has."""
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}

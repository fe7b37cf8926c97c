"""Timing on the device, rivals alternating.

A sample is `calls` calls of one compiled function queued without waiting, then one wait; its time over
`calls` is the device's time a call, as long as the host queues faster than the device computes. That is
checked, not assumed: the time until the last call was queued is measured too, and where it is most of the
sample the row says `host_bound`.

In each round every rival gives one sample, in an order that turns round from one round to the next, since a
GPU at its power limit slows down with what ran before. The first round is thrown away. Each call takes the
next of several sets of inputs, together more than twice the L2 cache, so no input is in it from the call
before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from workloads import Workload

L2_BYTES = 60 * 2**20  # H100 and H200: 50 to 60 MB
SAMPLE_SECONDS = 0.03
CALLS = (3, 400)  # least and most calls in a sample
HOST_BOUND = 0.8  # share of a sample spent on queueing from which the device may have been waiting


@dataclasses.dataclass
class Samples:
    """Milliseconds a call, one entry a round: until all was done, and until all was queued."""

    calls: int
    total: list[float] = dataclasses.field(default_factory=list)
    queued: list[float] = dataclasses.field(default_factory=list)

    def median(self) -> float:
        return float(np.median(self.total))

    def host_bound(self) -> bool:
        return float(np.median(self.queued)) > HOST_BOUND * self.median()


def input_sets(w: Workload, seed: int, *, least_bytes: int = 2 * L2_BYTES) -> list[tuple[Any, Any, Any]]:
    """Standard normal bf16 inputs, never zeros (which run faster): at least two sets, and `least_bytes`
    together.
    """
    count = max(2, -(-least_bytes // w.bytes_moved()))
    shape_q = (w.batch, w.length, w.heads, w.head_dim)
    shape_k = (w.batch, w.length, w.kv_heads, w.head_dim)

    @jax.jit
    def make(key):
        keys = jax.random.split(key, 3)
        shapes = (shape_q, shape_k, shape_k)
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))

    return [make(key) for key in jax.random.split(jax.random.key(seed), count)]


def alternate(
    functions: dict[str, Callable[..., Any]],
    inputs: Sequence[tuple[Any, ...]],
    *,
    rounds: int,
    sample_seconds: float = SAMPLE_SECONDS,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Time the functions in turns. `advance` is called after each sample, for a progress bar."""
    samples = {name: Samples(_calls(f, inputs, sample_seconds)) for name, f in functions.items()}
    order = list(functions)
    for number in range(-1, rounds):
        for name in order if number % 2 else order[::-1]:
            total, queued = _sample(functions[name], inputs, samples[name].calls)
            if number >= 0:
                samples[name].total.append(total)
                samples[name].queued.append(queued)
            advance()
    return samples


def _sample(f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int) -> tuple[float, float]:
    """One sample: milliseconds a call until done, and until queued. One call before it is not counted."""
    jax.block_until_ready(f(*inputs[-1]))
    start = time.perf_counter()
    for i in range(calls):
        result = f(*inputs[i % len(inputs)])
    queued = time.perf_counter() - start
    jax.block_until_ready(result)
    total = time.perf_counter() - start
    return total / calls * 1e3, queued / calls * 1e3


def _calls(f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], seconds: float) -> int:
    """How many calls make a sample of `seconds`, by a few calls of warm-up."""
    total, _ = _sample(f, inputs, CALLS[0])
    return int(min(max(seconds * 1e3 / total, CALLS[0]), CALLS[1]))


def relative_error(f: Callable[..., Any], w: Workload, arrays: tuple[Any, Any, Any]) -> float:
    """|f - expected| / |expected| of the last rows of the first head, expected in float32 at full precision.

    A time means nothing beside a wrong result. The last rows alone are a smaller call, since masks are
    aligned to the last key.
    """
    import jax_r2p

    rows = min(256, w.length)
    q, k, v = arrays
    few = (q[:1, -rows:, :1], k[:1, :, :1], v[:1, :, :1])
    with jax.default_matmul_precision("highest"):
        expected = jax_r2p.attention(
            *(x.astype(jnp.float32) for x in few),
            is_causal=w.is_causal,
            local_window_size=w.window,
            implementation="xla",
        )
    got = jnp.asarray(f(*arrays))[:1, -rows:, :1].astype(jnp.float32)
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))

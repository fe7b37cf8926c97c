"""Timing on the device, rivals alternating.

A sample is `calls` calls of one compiled function queued without waiting, then one wait; its time over
`calls` is the device's time a call, as long as the host queues faster than the device computes. That is
checked, not assumed: the time until the last call was queued is measured too, and where it is most of the
sample the row says `host_bound`.

In each round every rival gives one sample. A GPU at its power limit slows down with what ran before, so each
round has an order of its own, drawn at random: in an order that only turned round, a rival would always
follow the same two others. The first round is thrown away, and before it all run in turns until the GPU is
warm. All make the same number of calls: a sample costs about 0.5 ms beside its calls, and a kernel that got 4
where its equals got 17 looked 6 % slower. Each call takes the next of several sets of inputs, together more
than twice the L2 cache, so no input is in it from the call before.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_r2p
from jax_r2p.bench.rivals import Arrays, Function
from jax_r2p.bench.workloads import Workload

L2_BYTES = 60 * 2**20  # H100 and H200: 50 to 60 MB
CALLS = (3, 400)  # least and most calls in a sample
WARM_UP_SECONDS = 0.5
HOST_BOUND = 0.8  # share of a sample spent on queueing from which the device may have been waiting


@dataclasses.dataclass
class Samples:
    """What the samples of one rival took.

    Attributes:
      calls: Calls in a sample.
      total: Milliseconds a call until all was done, one entry a round.
      queued: Milliseconds a call until all was queued, one entry a round.
    """

    calls: int
    total: list[float] = dataclasses.field(default_factory=list)
    queued: list[float] = dataclasses.field(default_factory=list)

    def median(self) -> float:
        """Milliseconds a call until all was done, median over the rounds."""
        return float(np.median(self.total))

    def median_queued(self) -> float:
        """Milliseconds a call until all was queued, median over the rounds."""
        return float(np.median(self.queued))

    def host_bound(self) -> bool:
        """Whether the device may have waited for the host."""
        return self.median_queued() > HOST_BOUND * self.median()


def input_sets(w: Workload, seed: int, *, least_bytes: int = 2 * L2_BYTES) -> list[Arrays]:
    """Returns standard normal bf16 inputs, never zeros, which run faster.

    Args:
      w: Gives the shapes.
      seed: Of the random numbers.
      least_bytes: Of traffic that the sets cause together; there are at least two sets.
    """
    count = max(2, -(-least_bytes // w.bytes_moved()))
    shape_q = (w.batch, w.length, w.heads, w.head_dim)
    shape_k = (w.batch, w.length, w.kv_heads, w.head_dim)
    shape_v = (*shape_k[:-1], w.value_head_dim)

    @jax.jit
    def make(key: jax.Array) -> Arrays:
        key_q, key_k, key_v = jax.random.split(key, 3)
        return (
            jax.random.normal(key_q, shape_q, jnp.bfloat16),
            jax.random.normal(key_k, shape_k, jnp.bfloat16),
            jax.random.normal(key_v, shape_v, jnp.bfloat16),
        )

    return [make(key) for key in jax.random.split(jax.random.key(seed), count)]


def alternate(
    functions: dict[str, Callable[..., Any]],
    inputs: Sequence[tuple[Any, ...]],
    *,
    rounds: int,
    sample_seconds: float,
    warm_up_seconds: float = WARM_UP_SECONDS,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Times the functions in turns.

    Args:
      functions: Compiled functions by name, each called with the same inputs.
      inputs: The sets of arguments that the calls go round.
      rounds: Samples that count; one more, the first, is thrown away.
      sample_seconds: Length of a sample of the fastest function, as far as `CALLS` allows.
      warm_up_seconds: How long the functions run in turns, once each at least, before anything is timed.
      advance: Called after each of the `rounds + 1` samples of each function.
    """
    end = time.perf_counter() + warm_up_seconds
    while True:
        for f in functions.values():
            jax.block_until_ready(f(*inputs[0]))
        if time.perf_counter() >= end:
            break
    calls = max((_calls(f, inputs, sample_seconds) for f in functions.values()), default=0)
    samples = {name: Samples(calls) for name in functions}
    orders = random.Random(0)  # the same in every run
    for number in range(-1, rounds):
        for name in orders.sample(list(functions), len(functions)):
            total, queued = _sample(functions[name], inputs, samples[name].calls)
            if number >= 0:
                samples[name].total.append(total)
                samples[name].queued.append(queued)
            advance()
    return samples


def _sample(f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int) -> tuple[float, float]:
    """Returns milliseconds a call until done, and until queued. One call before them is not counted."""
    jax.block_until_ready(f(*inputs[-1]))
    start = time.perf_counter()
    for i in range(calls):
        result = f(*inputs[i % len(inputs)])
    queued = time.perf_counter() - start
    jax.block_until_ready(result)
    total = time.perf_counter() - start
    return total / calls * 1e3, queued / calls * 1e3


def _calls(f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], seconds: float) -> int:
    """Returns how many calls make a sample of `seconds`, by a few calls of warm-up."""
    total, _ = _sample(f, inputs, CALLS[0])
    return int(min(max(seconds * 1e3 / total, CALLS[0]), CALLS[1]))


def relative_error(f: Function, w: Workload, arrays: Arrays) -> float:
    """Returns |f - expected| / |expected|, expected in float32 at full precision; NaN if `f` gives NaN.

    A time means nothing beside a wrong result. Only the last rows of the first head are compared: they are a
    smaller call, since masks are aligned to the last key.

    Args:
      f: What is timed.
      w: The workload that it was built for.
      arrays: Inputs of that workload.
    """
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

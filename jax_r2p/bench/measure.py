"""Timing on the device, rivals alternating.

A sample is `calls` calls of one compiled function queued without waiting, then one wait; its time over
`calls` is the device's time a call, as long as the host queues faster than the device computes. That is
checked, not assumed: how long the host takes to queue a call is measured too, and where it is most of a call
the row says `host_bound`. It is measured in the first calls of a sample, since JAX lets no more than 32 be
under way: from then on the host waits for the device, which the time until all was queued has in it.

In each round every rival gives one sample. A GPU at its power limit slows down with what ran before, so each
round has an order of its own, drawn at random: in an order that only turned round, a rival would always
follow the same two others. The first round is thrown away, and before it all run in turns until the GPU is
warm. All make the same number of calls: a sample costs about 0.5 ms beside its calls, and a kernel that got 4
where its equals got 17 looked 6 % slower. Each call takes the next of several sets of inputs, together more
than twice the L2 cache, so no input is in it from the call before.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_r2p
from jax_r2p.bench.rivals import Arrays, Timed
from jax_r2p.bench.workloads import Matmul, Workload

L2_BYTES = 60 * 2**20  # H100 and H200: 50 to 60 MB
CALLS = (3, 400)  # least and most calls in a sample
HOST_CALLS = 16  # calls in which the host does not wait for the device yet
WARM_UP_SECONDS = 0.5
HOST_BOUND = 0.8  # share of a call that the host needs from which the device may have been waiting


@dataclasses.dataclass
class Samples:
    """What the samples of one rival took.

    Attributes:
      calls: Calls in a sample.
      total: Milliseconds a call until all was done, one entry a round.
      queued: Milliseconds a call until all was queued, one entry a round; waits for the device included.
      host: Milliseconds that the host took to queue one of the first calls, one entry a round.
    """

    calls: int
    total: list[float] = dataclasses.field(default_factory=list)
    queued: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)

    def median(self) -> float:
        """Milliseconds a call until all was done, median over the rounds."""
        return float(np.median(self.total))

    def median_queued(self) -> float:
        """Milliseconds a call until all was queued, median over the rounds."""
        return float(np.median(self.queued))

    def median_host(self) -> float:
        """Milliseconds that the host takes to queue a call, median over the rounds."""
        return float(np.median(self.host))

    def host_bound(self) -> bool:
        """Whether the device may have waited for the host."""
        return self.median_host() > HOST_BOUND * self.median()


def input_sets(w: Workload, seed: int, *, least_bytes: int = 2 * L2_BYTES) -> list[Arrays]:
    """Returns standard normal bf16 inputs, never zeros, which run faster: query, key, value.

    For training the cotangent of out is the fourth.

    Args:
      w: Gives the shapes.
      seed: Of the random numbers.
      least_bytes: Of traffic that the sets cause together; there are at least two sets.
    """
    count = max(2, w.calls, -(-least_bytes // w.bytes_moved()))
    shape_q = (w.batch, w.length, w.heads, w.head_dim)
    shape_k = (w.batch, w.length, w.kv_heads, w.head_dim)
    shapes = [shape_q, shape_k, (*shape_k[:-1], w.value_head_dim)]
    if w.training:
        shapes.append((*shape_q[:-1], w.value_head_dim))

    @jax.jit
    def make(key: jax.Array) -> Arrays:
        keys = jax.random.split(key, len(shapes))
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))

    return [make(key) for key in jax.random.split(jax.random.key(seed), count)]


def in_one_program(f: Timed, calls: int) -> Callable[..., jax.Array]:
    """Returns a compiled chain of forward calls, each with the out of the one before as its query.

    Args:
      f: Maps query, key and value to out, which is like query.
      calls: How many. The chain takes as many sets of query, key and value, or more, which it ignores.
    """

    def chain(*sets: Arrays) -> jax.Array:
        query = sets[0][0]
        for _, key, value in sets[:calls]:
            query = f(query, key, value)
        return query

    return jax.jit(chain)


def as_called(
    w: Workload, functions: dict[str, Timed], inputs: Sequence[Arrays]
) -> tuple[dict[str, Callable[..., Any]], Sequence[tuple[Any, ...]]]:
    """Returns functions and inputs for `alternate`: as they are, or with all calls of `w` in one program."""
    if w.calls == 1:
        return dict(functions), inputs
    return {name: in_one_program(f, w.calls) for name, f in functions.items()}, [tuple(inputs)]


def alternate(
    functions: dict[str, Callable[..., Any]],
    inputs: Sequence[tuple[Any, ...]],
    *,
    rounds: int,
    sample_seconds: float,
    calls_each: int = 1,
    warm_up_seconds: float = WARM_UP_SECONDS,
    settle_seconds: float = 0.0,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Times the functions in turns.

    Args:
      functions: Compiled functions by name, each called with the same inputs.
      inputs: The sets of arguments that the calls go round.
      rounds: Samples that count; one more, the first, is thrown away.
      sample_seconds: Length of a sample of the fastest function, as far as `CALLS` allows.
      calls_each: Calls of an implementation in one of a function, among which its time is divided.
      warm_up_seconds: How long the functions run in turns, once each at least, before anything is timed.
      settle_seconds: How long each runs before each of its samples, which matters where they are of several
        GPUs: one that was idle for the samples of others has cooled, and is faster for the first moments.
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
            settled = time.perf_counter() + settle_seconds
            while time.perf_counter() < settled:
                jax.block_until_ready(functions[name](*inputs[0]))
            total, queued, host = _sample(functions[name], inputs, samples[name].calls)
            if number >= 0:
                samples[name].total.append(total / calls_each)
                samples[name].queued.append(queued / calls_each)
                samples[name].host.append(host / calls_each)
            advance()
    return samples


def matmul(m: Matmul, seed: int) -> Callable[..., jax.Array]:
    """Returns a compiled product of two random matrices, as a function that ignores its arguments."""
    left, right = (
        jax.random.normal(key, (m.size, m.size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(seed), 2)
    )
    product = jax.jit(jnp.matmul)
    return lambda *_: product(left, right)


def _sample(
    f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int
) -> tuple[float, float, float]:
    """Returns milliseconds a call until done, until all was queued, and of the host for one of the first.

    One call before them is not counted.
    """
    jax.block_until_ready(f(*inputs[-1]))
    first = min(calls, HOST_CALLS)
    start = time.perf_counter()
    for i in range(first):
        result = f(*inputs[i % len(inputs)])
    host = time.perf_counter() - start
    for i in range(first, calls):
        result = f(*inputs[i % len(inputs)])
    queued = time.perf_counter() - start
    jax.block_until_ready(result)
    total = time.perf_counter() - start
    return total / calls * 1e3, queued / calls * 1e3, host / first * 1e3


def _calls(f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], seconds: float) -> int:
    """Returns how many calls make a sample of `seconds`, by a few calls of warm-up."""
    total, *_ = _sample(f, inputs, CALLS[0])
    return int(min(max(seconds * 1e3 / total, CALLS[0]), CALLS[1]))


def relative_error(f: Timed, w: Workload, arrays: Arrays) -> float:
    """Returns |f - expected| / |expected|, expected in float32 at full precision; NaN if `f` gives NaN.

    A time means nothing beside a wrong result. Only the last rows of the first head are compared: they are a
    smaller call, since masks are aligned to the last key. Of gradients it is the largest of the three errors;
    those of the first sequence's first key head are compared, and of the query heads that share it.

    Args:
      f: What is timed.
      w: The workload that it was built for.
      arrays: Inputs of that workload.
    """
    if w.training:
        return _error_of_gradients(f, w, arrays)
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


def _error_of_gradients(f: Timed, w: Workload, arrays: Arrays) -> float:
    group = w.heads // w.kv_heads
    heads = (group, 1, 1, group)  # of query, key, value, cotangent
    few = (x[:1, :, :n].astype(jnp.float32) for x, n in zip(arrays, heads, strict=True))
    expected = _expected_gradients(*few, w=w)
    got = [x[:1, :, :n].astype(jnp.float32) for x, n in zip(f(*arrays), heads[:3], strict=True)]
    errors = [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in zip(got, expected, strict=True)]
    return float(jnp.max(jnp.stack(errors)))  # NaN if one is


@functools.partial(jax.jit, static_argnames="w")
def _expected_gradients(
    query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array, *, w: Workload
) -> tuple[jax.Array, ...]:
    """The gradients of a call with one key head by the definition, some query rows after the other."""
    left, right = (w.length, w.length) if w.window is None else w.window
    right = 0 if w.is_causal else right
    rows = max(n for n in range(1, min(256, w.length) + 1) if w.length % n == 0)

    def attend(first: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        distance = jnp.arange(w.length) - (first + jnp.arange(rows))[:, None]
        scores = jnp.einsum("btnh,bsoh->bnts", query, key) * w.head_dim**-0.5
        visible = (distance >= -left) & (distance <= right)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        return jnp.einsum("bnts,bsov->btnv", weights, value)

    def step(sums: tuple[jax.Array, jax.Array], first: jax.Array) -> Any:
        query_rows, dout_rows = (jax.lax.dynamic_slice_in_dim(x, first, rows, 1) for x in (query, dout))
        _, pull_back = jax.vjp(functools.partial(attend, first), query_rows, key, value)
        dquery, dkey, dvalue = pull_back(dout_rows)
        return (sums[0] + dkey, sums[1] + dvalue), dquery

    with jax.default_matmul_precision("highest"):
        zeros = (jnp.zeros_like(key), jnp.zeros_like(value))
        (dkey, dvalue), parts = jax.lax.scan(step, zeros, jnp.arange(0, w.length, rows))
    return jnp.moveaxis(parts, 0, 1).reshape(query.shape), dkey, dvalue

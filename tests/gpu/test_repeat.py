"""The same call gives the same bits: fifty times, beside other work on the GPU, and from several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call, busy_gpu, kernel, poisoned
from numerics import check as compare
from numerics import expected

# long enough for many blocks to run at once and in an order that changes; grouped heads; not a multiple of a
# tile
CALLS = [
    Call(t=1000, b=2, n=8, k=2, h=h, dtype=dtype, **mask)
    for h, dtype in ((128, "bfloat16"), (64, "float16"))
    for mask in ({}, {"is_causal": True}, {"window": (100, 0)})
]
# Several tiles for each CTA of an H200; so many that causal ones are dealt out in pairs (`MakeSchedule` in
# ffi/forward.cc).
CALLS += [
    Call(t=1000, b=12, n=16, k=4, h=h, hv=hv, **mask)
    for h, hv in ((96, 96), (192, 192), (192, 128), (256, 256))
    for mask in ({}, {"is_causal": True}, {"window": (100, 0)})
]
# Also in the causal kernels for few keys and for many, and in the one for wide windows.
CALLS += [
    Call(t=1000, b=12, n=16, k=16, h=64, is_causal=True),
    Call(t=1000, s=3100, b=6, n=16, k=4, h=64, is_causal=True),
    Call(t=250, b=20, n=16, k=16, h=128, is_causal=True),
    Call(t=1000, b=12, n=16, k=4, h=128, is_causal=True),
    Call(t=1000, b=6, n=16, k=4, h=128, window=(800, 0)),
]


def _bits(results) -> tuple[bytes, ...]:
    return tuple(np.asarray(x).tobytes() for x in results)


def _compiled(call: Call):
    p = call.problem()
    arrays = jax.device_put((p.query, p.key, p.value))
    return jax.jit(lambda *a: kernel(*a, **call.keywords())), arrays, p


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_fifty_runs_are_bit_equal(call):
    """https://github.com/Dao-AILab/flash-attention/issues/2244; the first run is also compared with the
    definition.
    """
    f, arrays, p = _compiled(call)
    first = poisoned(lambda *a: kernel(*a, **call.keywords()), *arrays)
    compare(first[0], np.swapaxes(np.asarray(first[1]), 1, 2), expected([p])[0], name=str(call))
    want = _bits(first)
    assert all(_bits(f(*arrays)) == want for _ in range(50))


@pytest.mark.parametrize("call", CALLS[1:3], ids=str)
def test_bit_equal_while_the_gpu_is_busy(call):
    """Kernels of a second stream hold some SMs, so blocks start at other times and on other SMs."""
    f, arrays, _ = _compiled(call)
    want = _bits(f(*arrays))
    with busy_gpu():
        same = [_bits(f(*arrays)) == want for _ in range(50)]
    assert all(same), f"{same.count(False)} of 50 runs differ"


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"window": (300, 4096)}], ids=str)
@pytest.mark.parametrize("h", [64, 128])
def test_next_query_rows_come_no_sooner_than_these_are_read(h, mask):
    """Two thousand launches, bit-equal: tiles of one block of keys, each followed in its CTA by the next.

    The last tile of each head has one row. The others are zeros that TMA does not fetch, so they come at
    once.
    """
    call = Call(t=257, s=4096, b=100, n=4, k=2, h=h, kv_lengths=(63,) * 100, **mask)
    p = call.problem()
    arrays = jax.device_put((p.query, p.key, p.value))
    lengths = jax.device_put(call.lengths())

    def attend(scale):
        return kernel(*arrays, **lengths, **call.keywords() | {"scale": scale})

    @jax.jit
    def different_elements(wanted):
        def launch(i, count):
            # A scale that depends on the round keeps XLA from launching once.
            results = attend(jnp.where(i < 0, 1.0, jnp.float32(h**-0.5)))
            pairs = zip(results, wanted, strict=True)
            return count + sum(jnp.sum((a != b).astype(jnp.int32)) for a, b in pairs)

        return jax.lax.fori_loop(0, 100, launch, jnp.int32(0))

    wanted = jax.jit(attend)(jnp.float32(h**-0.5))
    assert sum(int(different_elements(wanted)) for _ in range(20)) == 0


def test_threads():
    """Four threads, each compiling and running its own shapes from the first call on: no mix-up."""
    calls = [
        Call(t=100 + 30 * i, n=4, k=2, h=64 * (1 + i % 2), is_causal=i % 3 == 0, seed=i) for i in range(8)
    ]
    start = threading.Barrier(4)

    def work(mine):
        made = [_compiled(call) for call in mine]
        start.wait()
        outcomes = []
        for f, arrays, _ in made:
            runs = [_bits(f(*arrays)) for _ in range(20)]
            assert len(set(runs)) == 1
            outcomes.append(f(*arrays))
        return outcomes

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, [calls[i::4] for i in range(4)]))
    for i in range(4):
        wanted = [expected([call.problem()])[0] for call in calls[i::4]]
        for call, (out, residual), want in zip(calls[i::4], results[i], wanted, strict=True):
            compare(out, np.swapaxes(np.asarray(residual), 1, 2), want, name=str(call))

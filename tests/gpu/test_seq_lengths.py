"""Lengths of the sequences of a batch: every mask, every kernel, around tiles, with NaN beyond the lengths.

The arrays are larger than two tiles each way; results are written over NaN, and what lies beyond a length has
to be exactly 0 and -inf.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call, check_visible_keys, fill_shared_memory_with_nan, kernel, run
from numerics import check as compare
from numerics import expected

import jax_r2p

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (37, 11)},
    "left": {"window": (70, 1000)},
}
DTYPES = ("bfloat16", "float16")
T, S = 401, 420  # two tiles of 192 rows and a partial one; three blocks of 128 keys and a partial one
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
QUERY_LENGTHS = (*EDGES, 384, 385, T - 1, T)
KEY_LENGTHS = (*EDGES, 319, 320, 321, 384, 385, S)
OTHER_WIDTHS = ((96, 96), (192, 192), (192, 128), (256, 256))
# Causal calls so long or short, and windows so wide, that they have kernels of their own. Blocks of 128 keys
# are where they are for S.
OTHER_SPANS = {
    "long causal": {"h": 64, "s": S + 2688, "is_causal": True},
    "short causal": {"h": 128, "s": 255, "is_causal": True},
    "wide window": {"h": 128, "s": S + 512, "window": (700, 90)},
}

kernels = pytest.mark.parametrize(
    ("dtype", "h", "mask"), [(d, h, m) for d in DTYPES for h in (64, 128) for m in MASKS]
)


def pairs(count: int, seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Lengths for `count` sequences: all of the above, in pairs that chance puts together."""
    rng = np.random.default_rng(seed)
    return {
        name: tuple(int(x) for x in rng.permutation(np.resize(lengths, count)))
        for name, lengths in (("q_lengths", QUERY_LENGTHS), ("kv_lengths", KEY_LENGTHS))
    }


def check_results(calls, problems, results, wanted) -> None:
    """As `harness.check`; beyond a query's length results are exactly what is promised."""
    for call, p, (out, residual), want in zip(calls, problems, results, wanted, strict=True):
        compare(out, residual, want, name=str(call))
        for b in range(call.b):
            t, _ = p.lengths(b)
            np.testing.assert_array_equal(np.asarray(out[b, t:], np.float32), 0)
            np.testing.assert_array_equal(residual[b, t:], -np.inf)


def check(calls) -> None:
    problems = [call.problem() for call in calls]
    check_results(calls, problems, run(calls, problems), expected(problems))


def filled_beyond(p, bad: float):
    """The problem with a bad value in queries, keys and values beyond the lengths."""
    dirty = dataclasses.replace(p, **{x: getattr(p, x).copy() for x in ("query", "key", "value")})
    for b in range(len(p.query)):
        t, s = p.lengths(b)
        dirty.query[b, t:] = bad
        dirty.key[b, s:] = bad
        dirty.value[b, s:] = bad
    return dirty


def check_and_fill(calls) -> None:
    """As `check`, and with NaN beyond the lengths, where rows are repaired whose last block has some."""
    problems = [call.problem() for call in calls]
    dirty = [filled_beyond(p, np.nan) for p in problems]
    results = run([*calls, *calls], [*problems, *dirty])
    check_results([*calls, *calls], [*problems, *dirty], results, expected(problems) * 2)


@kernels
@pytest.mark.parametrize("given", ["query", "key", "both"])
def test_lengths(dtype, h, mask, given):
    fill_shared_memory_with_nan(h, dtype)
    lengths = pairs(40)
    for other, name in (("key", "q_lengths"), ("query", "kv_lengths")):
        if given == other:
            del lengths[name]
    check([Call(t=T, s=S, b=40, n=4, k=2, h=h, dtype=dtype, **lengths, **MASKS[mask])])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("h", [64, 128])
def test_lengths_see_exactly_their_keys(h, mask):
    check_visible_keys(
        [Call(t=T, s=S, b=40, n=1, h=h, **pairs(40, seed), **MASKS[mask]) for seed in range(3)]
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("h", "hv"), OTHER_WIDTHS)
def test_lengths_of_other_widths(h, hv, mask):
    fill_shared_memory_with_nan(h, "bfloat16")
    call = Call(t=T, s=S, b=20, n=2, h=h, hv=hv, **pairs(20, 3), **MASKS[mask])
    check_and_fill([dataclasses.replace(call, dtype=dtype) for dtype in DTYPES])
    check_visible_keys([dataclasses.replace(call, n=1)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHER_SPANS)
def test_lengths_where_rows_see_many_keys_or_few(name, dtype):
    """Lengths of few blocks, and of all but few."""
    some = {"t": T, "b": 20, "dtype": dtype, **OTHER_SPANS[name]}
    fill_shared_memory_with_nan(some["h"], dtype)
    calls = []
    for more in sorted({0, max(some["s"] - S, 0)}):
        lengths = pairs(20, more)
        lengths["kv_lengths"] = tuple(more + x for x in lengths["kv_lengths"])
        calls.append(Call(n=2, **lengths, **some))
    check_and_fill(calls)
    check_visible_keys([dataclasses.replace(call, n=1) for call in calls])


@pytest.mark.parametrize("mask", MASKS)
def test_equal_lengths_around_tiles(mask):
    """Self-attention over padded sequences: the most common use."""
    lengths = tuple(range(0, T + 1, 13))
    calls = [
        Call(t=T, b=len(lengths), n=2, k=1, h=h, q_lengths=lengths, kv_lengths=lengths, **MASKS[mask])
        for h in (64, 128, 40)
    ]
    check(calls)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("t", [1, 3])
def test_decoding(t, mask):
    """A few queries against caches of different fill."""
    lengths = (0, 1, 2, 3, 100, 128, 129, 1000, 2048)
    some = {"t": t, "b": len(lengths), **MASKS[mask]}
    calls = [Call(s=2048, n=8, k=2, h=h, kv_lengths=lengths, **some) for h in (64, 128)]
    calls += [Call(s=2048, h=h, hv=hv, kv_lengths=lengths, **some) for h, hv in OTHER_WIDTHS]
    # Causal calls have another kernel then.
    calls.append(Call(s=3100, h=64, kv_lengths=(*lengths[:-2], 3072, 3100), **some))
    check(calls)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_scales(scale):
    check([Call(t=T, s=S, b=20, n=2, h=64, scale=scale, **pairs(20), **mask) for mask in MASKS.values()])


def test_lengths_out_of_range_are_clamped():
    wild = (-(2**31), -1, T + 1, 2**31 - 1)
    for mask in MASKS.values():
        check([Call(t=T, b=4, n=2, h=64, q_lengths=wild, kv_lengths=wild[::-1], **mask)])
        check([Call(t=T, b=4, n=2, h=64, kv_lengths=wild, **mask)])


@kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_lies_beyond_never_matters(dtype, h, mask, bad):
    """NaN or infinity in queries, keys and values beyond the lengths: as if they held anything else."""
    call = Call(t=T, s=S, b=40, n=4, k=2, h=h, dtype=dtype, **pairs(40, 1), **MASKS[mask])
    clean = call.problem()
    dirty = filled_beyond(clean, bad)
    check_results([call], [dirty], run([call], [dirty]), expected([clean]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("h", [64, 128])
def test_rows_that_are_computed_again(h, mask):
    """Scores so large that every row is repaired: over the keys of its sequence alone."""
    call = Call(t=T, s=S, b=20, n=2, h=h, **pairs(20, 2), **MASKS[mask])
    p = call.problem()
    p.query[...] = 3000
    p.key[...] = 3000
    clean = expected([p])
    for b in range(call.b):
        t, s = p.lengths(b)
        p.query[b, t:] = np.nan
        p.key[b, s:] = np.nan
        p.value[b, s:] = np.nan
    check_results([call], [p], run([call], [p]), clean)


def test_no_lengths_and_full_lengths_give_equal_bits():
    calls = [Call(t=T, s=S, b=2, n=4, k=2, h=h, **mask) for h in (64, 128) for mask in MASKS.values()]
    full = [dataclasses.replace(call, q_lengths=(T,) * 2, kv_lengths=(S,) * 2) for call in calls]
    problems = [call.problem() for call in calls]
    for call, got, want in zip(calls, run(full, problems), run(calls, problems), strict=True):
        for x, y in zip(got, want, strict=True):
            assert x.tobytes() == y.tobytes(), str(call)


def test_new_lengths_compile_nothing():
    call = Call(t=T, s=S, b=8, n=2, h=64, is_causal=True)
    p = call.problem()
    arrays = jax.device_put((p.query, p.key, p.value))
    function = jax.jit(lambda a, lengths: kernel(*a, **lengths, **call.keywords()))
    for seed in range(4):
        own = dataclasses.replace(call, **pairs(8, seed))
        q = dataclasses.replace(p, q_lengths=own.q_lengths, kv_lengths=own.kv_lengths)
        out, residual = function(arrays, own.lengths())
        compare(out, np.swapaxes(np.asarray(residual), 1, 2), expected([q])[0], name=str(own))
    assert function._cache_size() == 1


@pytest.mark.parametrize("shared", ["keys", "lengths", "both"])
def test_vmap(shared):
    """Sequences that share their keys have lengths of their own, or the other way round."""
    size, call = 3, Call(t=130, s=150, b=2, n=4, k=2, h=64, is_causal=True)
    rng = np.random.default_rng(0)
    problems = [dataclasses.replace(call, seed=i).problem() for i in range(size)]
    query = np.stack([p.query for p in problems])
    key, value = (np.stack([getattr(p, x) for p in problems]) for x in ("key", "value"))
    t, s = (rng.integers(0, high + 1, (size, 2)).astype(np.int32) for high in (130, 150))
    if shared != "lengths":
        key, value = key[0], value[0]
    if shared != "keys":
        t, s = t[0], s[0]

    def function(q, k, v, t, s):
        return kernel(q, k, v, is_causal=True, query_seq_lengths=t, key_value_seq_lengths=s)

    axes = (0, *((None,) if shared != "lengths" else (0,)) * 2, *((None,) if shared != "keys" else (0,)) * 2)
    out, residual = jax.jit(jax.vmap(function, axes))(query, key, value, t, s)
    wanted = [
        dataclasses.replace(
            problems[i],
            key=key if shared != "lengths" else key[i],
            value=value if shared != "lengths" else value[i],
            q_lengths=tuple(t if shared != "keys" else t[i]),
            kv_lengths=tuple(s if shared != "keys" else s[i]),
        )
        for i in range(size)
    ]
    for i, want in enumerate(expected(wanted)):
        compare(out[i], np.swapaxes(np.asarray(residual[i]), 1, 2), want, name=f"{shared} {i}")


@pytest.mark.filterwarnings("ignore:derivatives of jax_r2p:jax_r2p.FallbackWarning")
def test_gradients():
    """Around the kernel's results: 0 beyond the lengths."""
    call = Call(t=130, s=150, b=4, n=4, k=2, h=64, is_causal=True, q_lengths=(130, 70, 1, 0))
    p = call.problem()

    def loss(q, k, v, implementation):
        out = jax_r2p.attention(q, k, v, is_causal=True, implementation=implementation, **call.lengths())
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, implementation=x), (0, 1, 2)))(p.query, p.key, p.value)
        for x in ("r2p", "xla")
    )
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=2e-2 * np.abs(y).max())
    for b, t in enumerate(call.q_lengths):
        np.testing.assert_array_equal(np.asarray(got[0][b, t:], np.float32), 0)


def seconds(function, *args) -> float:
    """The least of five times of ten calls."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([function(*args) for _ in range(10)])
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["query_seq_lengths", "key_value_seq_lengths"])
@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"local_window_size": (8192, 0)}], ids=["none", "causal", "window"]
)
def test_what_lies_beyond_takes_no_time(mask, which):
    """128 of 16384: blocks beyond a length are not visited, or else it would take as long as with all.

    With a causal mask or the window 128 keys are seen by the last 128 queries alone. Half leaves room for the
    other test processes on the GPU.
    """
    x = jnp.zeros((1, 16384, 32, 64), jnp.bfloat16)
    function = jax.jit(lambda x, n: kernel(x, x, x, **mask, **{which: n}))
    short, full = (seconds(function, x, jnp.array([n], jnp.int32)) for n in (128, 16384))
    assert short < full / 2, f"{short:.2e} s and {full:.2e} s"

"""Lengths where 32-bit offsets and single-precision counters end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call, kernel
from numerics import Problem, bounds, expected
from numerics import check as compare


def _rows(x, b, start, stop, head) -> np.ndarray:
    return np.asarray(x[b : b + 1, start:stop, head : head + 1])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(65, 65), (130, 1)], ids=["own_keys", "shared_keys"])
def test_more_than_two_billion_elements(n, k):
    """query, out (and with own keys key, value) of 2.2e9 elements each or more: offsets past 2^31, addresses
    past 2^32.

    A window keeps it fast, and lets slices be compared: rows i..i+63 need keys i-96..i+63 only. Inputs repeat
    with a prime period, so a wrapped offset lands on other numbers.
    """
    h, window = 128, (96, 0)
    t = 2**31 // (n * h) + 4321
    period = 4099

    def make(seed, heads):
        base = jax.random.normal(jax.random.key(seed), (period, heads, h), jnp.bfloat16)
        return jax.jit(lambda x: jnp.take(x, jnp.arange(t) % period, axis=0, mode="clip")[None])(base)

    q, key, v = make(0, n), make(1, k), make(2, k)
    assert q.size > 2**31
    out, residual = jax.jit(lambda *a: kernel(*a, local_window_size=window))(q, key, v)
    left, right = bounds(False, window)
    starts = [0, t // 2, 2**31 // (n * h) - 32, t - 64]  # first, middle, across element 2^31, last
    problems, results = [], []
    for start in starts:
        for head in (0, n // 2, n - 1):
            first = max(start - window[0], 0)
            kv_head = head // (n // k)
            problems.append(
                Problem(
                    query=_rows(q, 0, start, start + 64, head),
                    key=_rows(key, 0, first, start + 64, kv_head),
                    value=_rows(v, 0, first, start + 64, kv_head),
                    left=left,
                    right=right,
                )
            )
            results.append(
                (
                    _rows(out, 0, start, start + 64, head),
                    np.asarray(residual[:, head, start : start + 64])[..., None],
                    f"rows {start}.. of head {head}",
                )
            )
    for (o, r, name), want in zip(results, expected(problems), strict=True):
        compare(o, r, want, name=name)
    assert not np.isnan(np.asarray(jnp.sum(residual))), "every row has a residual"
    assert not bool(jnp.any(jnp.isnan(out)))


@pytest.mark.slow
def test_more_than_two_billion_elements_without_a_window():
    """In each array, of short sequences, which keep it fast: equal inputs give equal results everywhere.

    Inputs repeat with a prime period, so a wrapped offset lands on other numbers.
    """
    t, n, h, period = 260, 8, 128, 7
    b = (2**31 // (t * n * h) // period + 1) * period
    call = Call(t=t, b=period, n=n, k=n, h=h)
    p = call.problem()
    repeat = jax.jit(lambda x: jnp.tile(x, (b // period, 1, 1, 1)))
    arrays = [repeat(x) for x in (p.query, p.key, p.value)]
    assert arrays[0].size > 2**31

    @jax.jit
    def others_are_equal(out, residual):
        rounds = [x.reshape(b // period, period, -1) for x in (out, residual)]
        return [jnp.all(x == x[:1]) for x in rounds]

    for mask in ({}, {"is_causal": True}):
        results = jax.jit(lambda *a, mask=mask: kernel(*a, **mask))(*arrays)
        assert all(map(bool, others_are_equal(*results))), f"{mask}: results of equal inputs differ"
        out, residual = (np.asarray(x[:period]) for x in results)
        del results  # or else the next are beside them
        want = dataclasses.replace(call, **mask).problem()
        compare(out, np.swapaxes(residual, 1, 2), expected([want])[0], name=str(mask))


@pytest.mark.slow
def test_long_causal_rows():
    """128k keys: the last rows see all of them, and the sum of their weights must not lose small ones."""
    t, s = 256, 131_072
    rng = np.random.default_rng(0)
    q, key, v = (
        jnp.asarray(rng.standard_normal((1, length, 1, 128), np.float32), jnp.bfloat16)
        for length in (t, s, s)
    )
    out, residual = jax.jit(lambda *a: kernel(*a, is_causal=True))(q, key, v)

    @jax.jit
    def definition(q, key, v):
        with jax.default_matmul_precision("highest"):
            q, key, v = (x[0, :, 0].astype(jnp.float32) for x in (q, key, v))
            scores = q @ key.T / np.sqrt(128)
            scores = jnp.where(jnp.arange(s)[None] <= jnp.arange(t)[:, None] + s - t, scores, -jnp.inf)
            return jax.nn.softmax(scores, axis=1) @ v, jax.nn.logsumexp(scores, axis=1)

    want, want_residual = definition(q, key, v)
    error = np.abs(np.asarray(out[0, :, 0], np.float32) - np.asarray(want))
    # means over 131072 keys are about 0.005; weights and output are rounded to 8 bits
    assert error.max() < 2.0**-7 * np.abs(np.asarray(want)).max(), error.max()
    assert np.abs(np.asarray(residual[0, 0]) - np.asarray(want_residual)).max() < 1e-4


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [({}, None, None), ({"is_causal": True}, None, 0), ({"local_window_size": (1, 0)}, 1, 0)],
    ids=["none", "causal", "window"],
)
def test_many_heads_and_batches(mask, left, right):
    """More than 2^16 batch entries, with a tile each: hundreds of tiles for every CTA."""
    b = 70_000
    rng = np.random.default_rng(0)
    base = rng.standard_normal((3, 7, 3, 1, 64), np.float32)
    q, key, v = (jnp.asarray(np.resize(x, (b, 3, 1, 64)), jnp.bfloat16) for x in base)
    out, residual = jax.jit(lambda *a: kernel(*a, **mask))(q, key, v)
    few = slice(0, 7)
    arrays = {name: np.asarray(x[few]) for name, x in (("query", q), ("key", key), ("value", v))}
    [want] = expected([Problem(**arrays, left=left, right=right)])
    compare(out[few], np.swapaxes(np.asarray(residual[few]), 1, 2), want, name="the first seven")
    full = np.asarray(out).view(np.uint16)
    np.testing.assert_array_equal(full, np.resize(full[few], full.shape))

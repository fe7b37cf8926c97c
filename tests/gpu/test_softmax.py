"""The softmax itself: scale of any kind, huge and tiny logits, residual, weights that sum to one."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call, check, kernel, poisoned, run
from numerics import allowed_error, assert_close, expected, random_problem
from numerics import check as compare

import jax_r2p

# (H, Hv) of every kernel. They differ in when they rescale what is summed, and in whether always.
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
LONG = 3100  # keys with which causal heads of 64 have a kernel of their own


@pytest.mark.parametrize("scale", [0.0, -0.125, 1.0, -3.0, 1e-6, 7.5, 100.0, -100.0])
def test_scale(scale):
    """Any sign, zero, and so large that all weight falls on one key."""
    masks = [{}, {"is_causal": True}, {"window": (33, 4)}]
    calls = [Call(t=150, s=140, h=h, hv=hv, scale=scale, **mask) for h, hv in WIDTHS for mask in masks]
    # Rows that see many keys have kernels of their own.
    calls += [Call(t=150, s=s, h=h, scale=scale, is_causal=True) for h, s in ((64, LONG), (128, 400))]
    check([*calls, Call(t=150, s=900, h=128, scale=scale, window=(700, 90))])


@pytest.mark.parametrize("kind", [np.float32, np.float64, jnp.float32, jnp.bfloat16, np.int32, float])
def test_scale_as_a_value(kind):
    """Traced and untraced scalars of every kind give what the Python number gives, to the bit."""
    p = random_problem(0, t=70, h=64)
    arrays = [jnp.asarray(x) for x in (p.query, p.key, p.value)]
    number = 2.0
    want = kernel(*arrays, scale=number)
    for got in (
        kernel(*arrays, scale=kind(number)),
        jax.jit(lambda *a: kernel(*a[:3], scale=a[3]))(*arrays, kind(number)),
    ):
        np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(want[0], np.float32))
        np.testing.assert_array_equal(got[1], want[1])


def test_scale_does_not_recompile():
    p = random_problem(0, t=70, h=64)
    traces = []

    @jax.jit
    def f(q, k, v, scale):
        traces.append(1)
        return kernel(q, k, v, scale=scale)

    problems = [dataclasses.replace(p, scale=x) for x in (0.1, -0.3, 2.0)]
    for q, want in zip(problems, expected(problems), strict=True):
        out, residual = f(p.query, p.key, p.value, q.scale)
        compare(out, np.swapaxes(np.asarray(residual), 1, 2), want, name=f"scale {q.scale}")
    assert len(traces) == 1
    assert f._cache_size() == 1


@pytest.mark.parametrize("scale", [1.0, None])
@pytest.mark.parametrize("t", [1, 130])
@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (50, 3)}], ids=["none", "causal", "window"]
)
def test_logits_below_any_sentinel(t, scale, mask):
    """All logits far below zero, -576000 with heads of 128: equal, so the output is a mean. A finite "minus
    infinity" would be above them.

    https://github.com/flashinfer-ai/flashinfer/issues/4267
    """
    calls = [Call(t=t, s=130, n=4, k=4, h=h, hv=hv, scale=scale, **mask) for h, hv in WIDTHS]
    problems = [call.problem() for call in calls]
    for p in problems:
        p.query[...], p.key[...] = 450, -10
    results = run(calls, problems)
    for call, p, (out, residual), want in zip(calls, problems, results, expected(problems), strict=True):
        # The weights are equal, so all of them round alike, which those of the definition need not. Heads of
        # 128 are within the rule all the same.
        allowed = allowed_error(want) + (0 if call.h == 128 else 2.0**-9 * np.abs(want.out))
        assert_close(out, want.out, allowed, name=str(call))
        assert np.abs(out.astype(np.float32)).max() > 0.1, "values average to something"
        # float32 at 576000 has steps of 1/16; the residual goes through base 2, two more roundings
        logit = 4500 * call.h * p.softmax_scale()
        assert_close(residual, want.residual, 0.25 / 576000 * logit, name=f"{call}: residual")


@pytest.mark.parametrize("scale", [0.25, None])
@pytest.mark.parametrize("c", [147456, 163840, 180224])
def test_huge_equal_logits(c, scale):
    """Equal logits up to 8e9: the scaled maximum rounds, and the exponent's argument must not turn positive.

    https://github.com/ROCm/aotriton/issues/54
    """
    calls = [Call(t=16, n=1, k=1, h=h, scale=scale) for h in (16, 96, 128, 192, 256)]
    problems = [call.problem() for call in calls]
    for p in problems:
        p.query[...], p.key[...] = 0, 0
        p.query[..., 3], p.key[..., 3] = c, c
    for call, p, (out, residual) in zip(calls, problems, run(calls, problems), strict=True):
        mean = np.broadcast_to(p.value.astype(np.float64).mean(axis=1, keepdims=True), out.shape)
        assert_close(out, mean, 2.0**-8 * np.abs(mean) + 2.0**-9, name=str(call))
        logit = float(c) ** 2 * p.softmax_scale()
        want = np.full(residual.shape, logit + math.log(16), np.float32)
        assert_close(residual, want, 1e-6 * logit, name=f"{call}: residual")


@pytest.mark.parametrize("logit", [20.7, -20.7, 3000.7, 1e5])
@pytest.mark.parametrize("h", [64, 96, 128, 256])
def test_many_blocks_of_equal_logits(h, logit):
    """The first block of thousands of keys weighs as much as the last, also where the logit is not a multiple
    of a power of two: a base that differed from block to block by a rounding would add up.
    """
    s = 16_384
    calls = [Call(t=64, s=s, n=1, k=1, h=h, scale=1.0, **m) for m in ({}, {"is_causal": True})]
    problems = []
    for call in calls:
        p = call.problem()
        p.query[...], p.key[...] = 0, 0
        p.query[..., 0], p.key[..., 0] = math.sqrt(abs(logit)), math.copysign(math.sqrt(abs(logit)), logit)
        # 1 in the first half of the keys, -1 in the second: any unevenness shows in the mean.
        p.value[:, : s // 2], p.value[:, s // 2 :] = 1, -1
        problems.append(p)
    for call, p, (out, residual) in zip(calls, problems, run(calls, problems), strict=True):
        [want] = expected([p])
        assert_close(out, want.out, 2e-5, name=str(call))
        # float32 carries the logit with a relative rounding, in base 2 and back
        assert_close(residual, want.residual, 2e-7 * abs(logit) + 2e-6, name=f"{call}: residual")


@pytest.mark.parametrize("offset", [-200.0, 200.0, -3e4, 3e4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shifted_logits(offset, dtype):
    """Logits far from zero but close to each other: one lane adds a constant to every score."""
    calls = [
        Call(t=129, s=129, h=h, dtype=dtype, scale=1.0, **m)
        for h in (64, 96, 256)
        for m in ({}, {"is_causal": True})
    ]
    problems = [c.problem() for c in calls]
    for p in problems:
        p.query[...] = (p.query.astype(np.float32) / 8).astype(p.query.dtype)
        p.query[..., 0], p.key[..., 0] = offset / 200, 200
    for call, p, (out, residual) in zip(calls, problems, run(calls, problems), strict=True):
        [want] = expected([p])
        compare(out, residual, want, name=f"{call} offset={offset}")


@pytest.mark.parametrize(("h", "hv"), WIDTHS)
def test_rising_and_falling_logits(h, hv):
    """Blocks are visited from the last key's: scores that fall along the keys rescale the accumulator at
    every block; rising ones never do.
    """
    sizes = [
        {"s": 900},
        {"s": 900, "is_causal": True},
        *([{"s": LONG, "is_causal": True}] if h == 64 else []),
    ]
    calls = [Call(t=200, h=h, hv=hv, scale=1.0, seed=seed, **size) for seed in (1, 2) for size in sizes]
    problems = []
    for call in calls:
        p = call.problem()
        ramp = np.linspace(-60, 60, call.s) * (1 if call.seed == 1 else -1)
        p.query[..., 0] = 1
        p.key[..., 0] = ramp[None, :, None]
        p.query[..., 1:] = (p.query[..., 1:].astype(np.float32) / 16).astype(p.query.dtype)
        problems.append(p)
    results = run(calls, problems)
    for call, (out, residual), want in zip(calls, results, expected(problems), strict=True):
        compare(out, residual, want, name=f"{call} seed={call.seed}")


@pytest.mark.parametrize(("h", "hv"), WIDTHS)
def test_a_row_whose_maximum_rises_alone(h, hv):
    """Of the 16 rows of a warp one, another in each head, has a new maximum in every block, the others in
    their first alone. Values are about 1, so an accumulator that is not rescaled is far off.
    """
    sizes = [{"s": 900, **m} for m in ({}, {"is_causal": True}, {"window": (300, 40)})]
    # Rows that see many keys have kernels of their own.
    sizes += {64: [{"s": LONG, "is_causal": True}], 128: [{"s": 900, "window": (700, 90)}]}.get(h, [])
    some = {"t": 200, "n": 16, "h": h, "hv": hv, "scale": 1.0}
    calls = [Call(dtype=d, **some, **m) for d in ("bfloat16", "float16") for m in sizes]
    problems = [call.problem() for call in calls]
    for call, p in zip(calls, problems, strict=True):
        row, head = np.arange(call.t)[:, None], np.arange(call.n)[None]
        p.query[...] = 0
        # Blocks are visited from the last key's.
        p.query[..., 0] = np.where(row % 16 == head, -1, 1)
        p.key[..., 0] = ((np.arange(call.s) - call.s / 2) / 64)[:, None]
        p.value[...] = (p.value.astype(np.float32) / 4 + 1).astype(p.value.dtype)
    for call, (out, residual), want in zip(calls, run(calls, problems), expected(problems), strict=True):
        compare(out, residual, want, name=str(call))


@pytest.mark.parametrize(("h", "hv"), WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_sum_to_one(h, hv, dtype):
    """With value 1 everywhere the output is the sum of the weights."""
    masks = [{}, {"is_causal": True}, {"window": (90, 17)}]
    some = {"t": 333, "h": h, "hv": hv, "dtype": dtype}
    calls = [Call(scale=s, **some, **m) for m in masks for s in (None, 3.0)]
    if h == 64:
        calls += [Call(s=LONG, scale=s, is_causal=True, **some) for s in (None, 3.0)]
    problems = [c.problem() for c in calls]
    for p in problems:
        p.value[...] = 1
    for call, (out, _) in zip(calls, run(calls, problems), strict=True):
        # weights are rounded to the dtype for the second matmul, their sum is not: half a unit in the last
        # place, then the rounding of the output
        assert_close(out, np.ones(out.shape), float(jnp.finfo(dtype).eps), name=str(call))


def test_residual_is_the_log_of_the_sum():
    """Against its definition in float64, without the reference."""
    call = Call(t=50, s=77, n=2, k=1, h=64)
    p = call.problem()
    [(_, residual)] = run([call], [p])
    q, k = p.query.astype(np.float64), np.repeat(p.key.astype(np.float64), 2, axis=2)
    scores = np.einsum("btnh,bsnh->btns", q, k) / math.sqrt(64)
    want = np.log(np.sum(np.exp(scores), axis=-1))
    assert_close(residual, want, 2e-5, name="residual")


def test_residual_does_not_change_the_output():
    p = random_problem(0, t=200, h=64)
    both, _ = poisoned(lambda *a: kernel(*a), p.query, p.key, p.value)
    alone = poisoned(lambda *a: jax_r2p.attention(*a, implementation="r2p"), p.query, p.key, p.value)
    np.testing.assert_array_equal(np.asarray(both).view(np.uint16), np.asarray(alone).view(np.uint16))

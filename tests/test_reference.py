"""The reference against its definition, written out in numpy with explicit masks, and its properties."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from cases import CASES, Case, ids
from jax.test_util import check_grads
from numerics import assert_close

import jax_r2p
from jax_r2p import reference
from jax_r2p._spec import AttentionSpec

# Compiled as a whole: evaluated one by one, the operations of each new shape would be compiled one by one.
attention = jax.jit(
    functools.partial(jax_r2p.attention, implementation="xla"),
    static_argnames=("is_causal", "local_window_size", "return_residual"),
)
with_residual = functools.partial(attention, return_residual=True)


def visible(case: Case) -> np.ndarray:
    """bool (T, S)."""
    return numerics.visible(case.T, case.S, *numerics.bounds(case.causal, case.window))


def explicit(query, key, value, mask, scale) -> tuple[np.ndarray, np.ndarray]:
    """Attention in numpy and float64, head by head: out (B, T, N, Hv), residual (B, T, N)."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, t, heads, _ = query.shape
    group = heads // key.shape[2]
    out, residual = np.zeros((*query.shape[:-1], value.shape[-1])), np.full((batch, t, heads), -np.inf)
    for b, i, n in np.ndindex(batch, t, heads):
        seen = mask[i]
        if seen.any():
            scores = scale * key[b, seen, n // group] @ query[b, i, n]
            top = scores.max()
            residual[b, i, n] = top + math.log(np.exp(scores - top).sum())
            out[b, i, n] = np.exp(scores - residual[b, i, n]) @ value[b, seen, n // group]
    return out, residual


@pytest.mark.parametrize("scale", ["default", -0.7, 0.0], ids="scale={}".format)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_values(case, scale):
    arrays = case.arrays()
    if scale == "default":
        scale = 1 / math.sqrt(case.H)
        out, residual = with_residual(*arrays, **case.mask)
    else:
        out, residual = with_residual(*arrays, **case.mask, scale=scale)
    want_out, want_residual = explicit(*arrays, visible(case), scale)
    assert out.dtype == case.dtype
    assert residual.dtype == jnp.float32
    rounding = float(jnp.finfo(case.dtype).eps) / 2  # of the result; all before it is float32
    assert_close(out, want_out, rounding * np.abs(want_out) + 2e-6, name="out")
    assert_close(
        residual, want_residual, 2e-6 * np.abs(np.nan_to_num(want_residual, neginf=0)) + 2e-6, name="residual"
    )


@pytest.mark.parametrize("window", [None, (3, 0), (2, 4), 3], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_agrees_with_jax_where_the_alignment_does(is_causal, window):
    """With equal lengths, first and last positions align alike."""
    arrays = Case(id="", T=9, S=9, N=6, K=2).arrays()
    mask = {"is_causal": is_causal, "local_window_size": window}
    out, residual = with_residual(*arrays, **mask)
    rival = jax.jit(functools.partial(jax.nn.dot_product_attention, **mask, return_residual=True))
    want_out, want_residual = rival(*arrays)
    assert_close(out, want_out, 1e-6, name="out")
    assert_close(residual, want_residual, 1e-6, name="residual")


@pytest.mark.parametrize(
    ("t", "s", "mask", "want"),
    [
        (4, 4, {"is_causal": True}, "1000 1100 1110 1111"),
        (4, 4, {"local_window_size": (1, 1)}, "1100 1110 0111 0011"),
        (4, 4, {"local_window_size": (1, 0)}, "1000 1100 0110 0011"),
        (4, 4, {"local_window_size": (2, 3), "is_causal": True}, "1000 1100 1110 0111"),
        (2, 4, {"is_causal": True}, "1110 1111"),
        (4, 2, {"is_causal": True}, "00 00 10 11"),
    ],
)
def test_examples_of_the_documentation(t, s, mask, want):
    """With values that are unit vectors, the output is the weights."""
    query, key = jnp.ones((t, 1, s)), jnp.ones((s, 1, s))
    out = attention(query, key, jnp.eye(s)[:, None], **mask)[:, 0]
    got = " ".join("".join("1" if weight > 0 else "0" for weight in row) for row in out)
    assert got == want
    np.testing.assert_allclose(out.sum(-1), [float("1" in row) for row in want.split()], rtol=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case.id in ("mqa", "window-both")], ids=ids)
def test_explicit_batch_dimensions(case):
    """None, and two; the keys of the second call are shared along one of them, as vmap makes it."""
    query, key, value = case.arrays()
    want = with_residual(query, key, value, **case.mask)
    single = with_residual(query[0], key[0], value[0], **case.mask)
    for got, full in zip(single, want, strict=True):
        assert_close(got, full[0], 1e-6, name="no batch")

    spec = AttentionSpec(
        **dict(zip(("left", "right"), numerics.bounds(case.causal, case.window), strict=True))
    )
    out, lse = reference.attention(
        jnp.stack([query, -query]), key[None], jnp.stack([value, value + 1]), 0.3, spec=spec
    )
    for i, (q, v) in enumerate([(query, value), (-query, value + 1)]):
        want_out, want_lse = reference.attention(q, key, v, 0.3, spec=spec)
        assert_close(out[i], want_out, 1e-6, name="out")
        assert_close(lse[i], want_lse, 1e-6, name="lse")


def test_scale_per_batch_element():
    query, key, value = Case(id="", B=3, T=4, S=5).arrays()
    scales = jnp.array([0.3, -1.0, 0.0])
    out, _ = reference.attention(query, key, value, scales, spec=AttentionSpec(right=0))
    for i, scale in enumerate(scales):
        want, _ = reference.attention(query[i], key[i], value[i], scale, spec=AttentionSpec(right=0))
        assert_close(out[i], want, 1e-6, name=f"scale {scale}")


SIZES = [(2, 0, 5), (2, 5, 0), (0, 5, 5), (2, 0, 0)]


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"local_window_size": (1, 2)}], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids="B{0[0]}-T{0[1]}-S{0[2]}".format)
def test_zero_sizes(sizes, mask):
    b, t, s = sizes
    arrays = Case(id="", B=b, T=t, S=s).arrays()
    out, residual = with_residual(*arrays, **mask)
    np.testing.assert_array_equal(out, np.zeros((b, t, 4, 16)))
    np.testing.assert_array_equal(residual, np.full((b, t, 4), -np.inf))
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(attention(*a, **mask)), (0, 1, 2)))(*arrays)
    for array, gradient in zip(arrays, gradients, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(array.shape))


def test_no_heads():
    for kv_heads in (0, 2):
        query, key = jnp.ones((2, 5, 0, 16)), jnp.ones((2, 7, kv_heads, 16))
        out, residual = with_residual(query, key, key)
        assert out.shape == query.shape
        assert residual.shape == (2, 5, 0)


@pytest.mark.parametrize("scale", [1.0, None], ids=str)
@pytest.mark.parametrize("t", [1, 130])
def test_scores_below_any_sentinel(t, scale):
    """Finite stand-ins for minus infinity are beaten here. github.com/flashinfer-ai/flashinfer/issues/4267"""
    query = jnp.full((t, 2, 128), 450, jnp.bfloat16)
    key = jnp.full((130, 2, 128), -10, jnp.bfloat16)
    value = jnp.broadcast_to(jnp.arange(130.0)[:, None, None] / 128, key.shape).astype(jnp.bfloat16)
    out, residual = with_residual(query, key, value, scale=scale)
    score = -576000 * (1 if scale else 1 / math.sqrt(128))
    assert_close(out, np.broadcast_to(value.astype(jnp.float32).mean(0), out.shape), 2**-8, name="out")
    assert_close(residual, np.full(residual.shape, score + math.log(130)), 0.1, name="residual")


@pytest.mark.parametrize("scale", [0.25, None], ids=str)
@pytest.mark.parametrize("c", [147456, 163840, 180224])
def test_huge_equal_scores(c, scale):
    """Rounding of scale * max must not make exp overflow. github.com/ROCm/aotriton/issues/54"""
    query = jnp.zeros((16, 1, 16), jnp.bfloat16).at[..., 0].set(c)
    value = jax.random.normal(jax.random.key(0), query.shape, jnp.bfloat16)
    out = attention(query, query, value, scale=scale)
    assert_close(out, np.broadcast_to(value.astype(jnp.float32).mean(0), out.shape), 2**-8, name="out")


# What is hidden.

MASKED = Case(id="", T=6, S=9, window=(2, 1))  # keys 0 and 1 are hidden from all, the others from some
UNSEEN = ~visible(MASKED).any(0)
assert UNSEEN.any()


def with_bad(array, keys, bad):
    return array.at[:, np.asarray(keys)].set(bad)


def loss(query, key, value, scale, *, mask=MASKED.mask):
    out, residual = with_residual(query, key, value, **mask, scale=scale)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(residual), jnp.cos(residual), 0))


query_gradient = jax.jit(jax.grad(loss))
all_gradients = jax.grad(loss, (0, 1, 2, 3))
FUNCTIONS = {
    "value": jax.jit(lambda *a: with_residual(*a[:3], **MASKED.mask, scale=a[3])),
    "gradient": jax.jit(all_gradients),
    "second": jax.jit(jax.grad(lambda *a: sum(jnp.sum(x * x) for x in all_gradients(*a)), (0, 1, 2, 3))),
}


@pytest.mark.parametrize("order", ["value", "gradient", "second"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_what_nobody_sees_changes_no_bit(where, bad, order):
    query, key, value = MASKED.arrays()
    dirty_key = with_bad(key, UNSEEN, bad) if where != "value" else key
    dirty_value = with_bad(value, UNSEEN, bad) if where != "key" else value
    clean = FUNCTIONS[order](query, key, value, 0.3)
    dirty = FUNCTIONS[order](query, dirty_key, dirty_value, 0.3)
    for want, got in zip(clean, dirty, strict=True):
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(got, want)
    if order == "gradient":
        for got in dirty[1:3]:
            np.testing.assert_array_equal(got[:, UNSEEN], 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("at", [2, 5, 8])
def test_what_is_seen_spreads_no_further(at, where, bad):
    """Neither its value nor, in the other queries, the gradient."""
    query, key, value = MASKED.arrays()
    dirty = [query, key, value]
    dirty[1 if where == "key" else 2] = with_bad(key if where == "key" else value, [at], bad)
    hidden = ~visible(MASKED)[:, at]
    assert hidden.any()
    assert not hidden.all()
    out, want = attention(*dirty, **MASKED.mask), attention(query, key, value, **MASKED.mask)
    np.testing.assert_array_equal(out[:, hidden], want[:, hidden])
    if where == "value":
        np.testing.assert_array_equal(out[:, ~hidden], np.full(out[:, ~hidden].shape, bad))
    elif np.isnan(bad):
        assert np.isnan(out[:, ~hidden]).all()

    gradient, want = query_gradient(*dirty, 0.3), query_gradient(query, key, value, 0.3)
    np.testing.assert_array_equal(gradient[:, hidden], want[:, hidden])


def test_infinite_values_of_both_signs_make_nan():
    query, key, value = MASKED.arrays()
    out = attention(query, key, value.at[:, 4, 0, 3].set(np.inf).at[:, 5, 0, 3].set(-np.inf), **MASKED.mask)
    plus, minus = visible(MASKED)[:, 4], visible(MASKED)[:, 5]
    lane = np.asarray(out)[0, :, 0, 3]
    assert (plus & minus).any()
    assert (plus & ~minus).any()
    np.testing.assert_array_equal(np.isnan(lane), plus & minus)
    np.testing.assert_array_equal(np.isposinf(lane), plus & ~minus)
    np.testing.assert_array_equal(np.isneginf(lane), minus & ~plus)
    assert np.isfinite(np.delete(out, 3, axis=-1)).all()


EMPTY = Case(id="", T=8, S=5, causal=True)  # the first three queries see nothing


@pytest.mark.parametrize("bad", [1.0, np.nan, np.inf])
def test_queries_that_see_nothing_add_nothing(bad):
    """Whatever they hold: result 0 and -inf, gradients as if they were not there."""
    query, key, value = EMPTY.arrays()
    query = with_bad(query, range(3), bad)
    out, residual = with_residual(query, key, value, **EMPTY.mask)
    np.testing.assert_array_equal(out[:, :3], 0)
    np.testing.assert_array_equal(residual[:, :3], -np.inf)
    assert np.isfinite(residual[:, 3:]).all()

    gradients = jax.jit(jax.grad(functools.partial(loss, mask=EMPTY.mask), (0, 1, 2, 3)))
    got, want = gradients(query, key, value, 0.3), gradients(query[:, 3:], key, value, 0.3)
    np.testing.assert_array_equal(got[0][:, :3], 0)
    assert_close(got[0][:, 3:], want[0], 1e-6, name="query")
    for name, x, y in zip(("key", "value", "scale"), got[1:], want[1:], strict=True):
        assert_close(x, y, 1e-5, name=name)


def test_cotangents_of_empty_rows_stop_there():
    query, key, value = EMPTY.arrays()
    _, pull = jax.vjp(lambda *a: with_residual(*a, **EMPTY.mask), query, key, value)
    ones = jnp.zeros(query.shape).at[:, :3].set(1.0), jnp.zeros(query.shape[:-1]).at[:, :3].set(1.0)
    for gradient in pull(ones):
        np.testing.assert_array_equal(gradient, 0)


# Wide types.


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.id in ("gqa", "causal-few-keys", "window-both", "window-causal")],
    ids=ids,
)
def test_float64_stays_float64(case):
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in case.arrays()]
        out, residual = with_residual(*arrays, **case.mask)
        assert out.dtype == residual.dtype == jnp.float64
        want_out, want_residual = explicit(*arrays, visible(case), 1 / math.sqrt(case.H))
        np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(residual, want_residual, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "case",
    [
        Case(id="none", B=1, T=3, S=4, H=3),
        # The first query sees nothing, the last key is hidden from the second, and so on.
        Case(id="window", B=1, T=4, S=3, H=3, window=(0, 1)),
        Case(id="wide-values", B=1, T=3, S=3, H=2, Hv=5, causal=True),
    ],
    ids=ids,
)
def test_derivatives_are_those_of_the_values(case):
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in case.arrays()]
        function = jax.jit(functools.partial(loss, mask=case.mask))
        # Compared with differences of nearby values, whose own error is some 1e-5.
        check_grads(function, (*arrays, jnp.float64(0.3)), order=2, atol=1e-4, rtol=1e-4)


def test_constant_added_to_all_scores():
    """It shifts the residual by as much and leaves the output alone."""
    query, key, value = MASKED.arrays()
    out, residual = with_residual(query, key, value, **MASKED.mask, scale=0.3)
    shifted_out, shifted_residual = with_residual(query, key + 1.0, value, **MASKED.mask, scale=0.3)
    assert_close(shifted_out, out, 1e-5, name="out")
    assert_close(shifted_residual - residual, 0.3 * query.sum(-1), 1e-5, name="residual")

"""The comparison itself: what it expects is the definition, and its tolerance passes no mistake."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from numerics import Expected, Problem, allowed_error, assert_close, bounds, check, expected, random_problem

import jax_r2p

# Unequal lengths both ways, grouped heads, windows that leave rows empty; small, since the loop below is in
# Python.
PROBLEMS = {
    "none": random_problem(0, t=5, s=7, b=2, n=4, k=2, h=8),
    "causal": random_problem(1, t=9, s=6, n=3, k=1, h=16, is_causal=True),
    "window": random_problem(2, t=8, s=8, n=2, k=2, h=8, window=(2, 1)),
    "window_empty_rows": random_problem(3, t=12, s=4, n=1, k=1, h=8, window=(1, 0), dtype="float16"),
    "other_values": random_problem(5, t=4, s=6, h=8, hv=200, is_causal=True),
    "scale": random_problem(4, t=4, s=4, h=8, scale=-0.7, dtype="float16"),
}


def _one_by_one(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64, an element at a time."""
    b, t, s, n, k, _ = p.shape
    q, key, v = (x.astype(np.float64) for x in (p.query, p.key, p.value))
    out, residual = np.zeros(p.out_shape), np.full((b, t, n), -np.inf)
    for x in range(b):
        for head in range(n):
            kv = head // (n // k)
            for i in range(t):
                low = -np.inf if p.left is None else i + s - t - p.left
                high = np.inf if p.right is None else i + s - t + p.right
                keys = [j for j in range(s) if low <= j <= high]
                if keys:
                    scores = np.array([q[x, i, head] @ key[x, j, kv] for j in keys]) * p.softmax_scale()
                    residual[x, i, head] = np.log(np.sum(np.exp(scores)))
                    weights = np.exp(scores - residual[x, i, head])
                    out[x, i, head] = sum(w * v[x, j, kv] for w, j in zip(weights, keys, strict=True))
    return out, residual


@pytest.mark.parametrize("name", PROBLEMS)
def test_expectation_is_the_definition(name):
    [got] = expected([PROBLEMS[name]])
    out, residual = _one_by_one(PROBLEMS[name])
    assert_close(got.out, out, 2e-6, name="out")
    assert_close(got.residual, residual, 2e-6, name="residual")


def test_problems_together_are_as_problems_alone():
    """Mixed shapes and dtypes are regrouped; none may get another's numbers."""
    together = expected(list(PROBLEMS.values()))
    for p, got in zip(PROBLEMS.values(), together, strict=True):
        [alone] = expected([p])
        for field in dataclasses.fields(Expected):
            np.testing.assert_allclose(getattr(got, field.name), getattr(alone, field.name), atol=1e-6)


@pytest.mark.parametrize("name", PROBLEMS)
def test_reference_agrees(name):
    p = PROBLEMS[name]
    spec = {"is_causal": p.left is None and p.right == 0}
    if p.left is not None:
        spec["local_window_size"] = (p.left, p.right)
    arrays = (p.query, p.key, p.value)
    out, residual = jax_r2p.attention(
        *arrays, **spec, scale=p.scale, return_residual=True, implementation="xla"
    )
    check(out, residual, expected([p])[0], name=name)


def test_low_is_rounded_after_every_operation():
    """Equal weights of 1/3 in bfloat16: what XLA makes of the same lines in one program would keep more
    digits.
    """
    p = random_problem(0, t=1, s=3, n=1, k=1, h=8, scale=0.0)
    [got] = expected([p])
    third = np.asarray(1 / 3, jnp.bfloat16).astype(np.float64)
    want = (p.value.astype(np.float64)[0, :, 0] * third).sum(axis=0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got.low[0, 0, 0], want.astype(np.float32))


def test_tolerance_is_twice_the_rounding():
    out = np.ones((1, 2, 1, 2), np.float32)
    low = out.copy()
    low[0, 1, 0, 0] = 1.25
    low[0, 0, 0, 0] = np.nan  # where the dtype itself fails it says nothing
    want = Expected(out, np.zeros((1, 2, 1), np.float32), low)
    assert allowed_error(want) == pytest.approx(0.5 + 1e-5)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("scale", "out: .* of .* elements are off; the worst at"),
        ("mask", r"out: .*worst at \(0, 3, "),
        ("head", "out: .*elements are off"),
        ("nan", r"worst at \(0, 4, 0, 2\): got np.float32\(nan\)"),
        ("inf", r"worst at \(0, 4, 0, 2\): got np.float32\(inf\)"),
        ("residual", r"residual: 1 of 12 elements are off; the worst at \(0, 5, 1\)"),
    ],
)
def test_mistakes_are_found(mistake, message):
    """Wrong scale, one key too many in one row, swapped heads, an unwritten element, a wrong residual."""
    p = random_problem(5, t=6, s=6, n=2, k=2, h=8, is_causal=True)
    [want] = expected([p])
    out, residual = want.out.copy(), want.residual.copy()
    if mistake == "scale":
        out = expected([dataclasses.replace(p, scale=0.4)])[0].out
    elif mistake == "mask":
        out[:, 3] = expected([dataclasses.replace(p, right=1)])[0].out[:, 3]
    elif mistake == "head":
        out = out[:, :, ::-1]
    elif mistake == "residual":
        residual[0, 5, 1] += 3e-4
    else:
        out[0, 4, 0, 2] = float(mistake)
    check(want.out, want.residual, want, name="right")
    with pytest.raises(AssertionError, match=message):
        check(out, residual, want, name=mistake)


def test_not_a_number_has_to_be_where_it_is_expected():
    want = np.array([np.nan, np.inf, 1.0])
    assert_close(want, want, 0.0, name="same")
    for got in ([0.0, np.inf, 1.0], [np.nan, np.nan, 1.0], [np.nan, -np.inf, 1.0], [np.nan, np.inf, np.nan]):
        with pytest.raises(AssertionError, match="1 of 3 elements"):
            assert_close(np.array(got), want, 1e9, name="other")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_hidden_values_do_not_matter_and_visible_ones_do(bad):
    p = random_problem(6, t=6, s=6, n=2, k=1, h=8, is_causal=True)
    [clean] = expected([p])
    q = dataclasses.replace(p, value=p.value.copy())
    q.value[0, 4, 0, 1] = bad
    [got] = expected([q])
    reached = np.zeros(got.out.shape, bool)
    reached[:, 4:, :, 1] = True
    np.testing.assert_array_equal(got.out[reached], np.full(reached.sum(), bad))
    np.testing.assert_allclose(got.out[~reached], clean.out[~reached], atol=1e-6)
    np.testing.assert_allclose(got.residual, clean.residual, atol=1e-6)


def test_nan_keys_reach_their_rows_only():
    p = random_problem(7, t=6, s=6, n=2, k=1, h=8, is_causal=True)
    [clean] = expected([p])
    q = dataclasses.replace(p, key=p.key.copy())
    q.key[0, 4] = np.nan
    [got] = expected([q])
    assert np.isnan(got.out[:, 4:]).all()
    assert np.isnan(got.residual[:, 4:]).all()
    np.testing.assert_allclose(got.out[:, :4], clean.out[:, :4], atol=1e-6)


def test_bounds():
    assert bounds(False, None) == (None, None)
    assert bounds(True, None) == (None, 0)
    assert bounds(False, 3) == (3, 3)
    assert bounds(True, (3, 5)) == (3, 0)


def test_visible_is_aligned_to_the_last_key():
    np.testing.assert_array_equal(
        numerics.visible(2, 4, None, 0), np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    )
    np.testing.assert_array_equal(
        numerics.visible(4, 2, None, 0), np.array([[0, 0], [0, 0], [1, 0], [1, 1]], bool)
    )
    np.testing.assert_array_equal(
        numerics.visible(4, 4, 1, 1), np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]], bool)
    )


def test_padding_changes_nothing():
    """32 and 33 are padded to different sizes; the first 32 keys of a window see the same."""
    p = random_problem(8, t=33, s=33, n=1, k=1, h=8, window=(3, 0))
    q = dataclasses.replace(p, query=p.query[:, :32], key=p.key[:, :32], value=p.value[:, :32])
    a, b = expected([p, q])
    np.testing.assert_allclose(a.out[:, :32], b.out, atol=1e-6)


def test_lengths_beyond_the_table_are_refused():
    x = np.zeros((1, 40_000, 1, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="40000"):
        expected([Problem(query=x, key=x, value=x)])


def test_zero_sizes():
    x, none = np.ones((1, 3, 2, 8), jnp.bfloat16), np.ones((1, 0, 2, 8), jnp.bfloat16)
    [got] = expected([Problem(query=x, key=none, value=none)])
    assert not got.out.any()
    assert np.isneginf(got.residual).all()
    [got] = expected([Problem(query=none, key=x, value=x)])
    assert got.out.shape == (1, 0, 2, 8)


def test_expectation_is_computed_at_full_precision():
    """A GPU's default for float32 matmuls has ten bits."""
    text = jax.jit(
        lambda *a: numerics._attend_heads(*a, finite=True),
    ).lower(
        *(np.zeros(s, np.float32) for s in ((1, 32, 128),) * 3),
        np.zeros((1, 4), np.int32),
        np.zeros(1, np.float32),
    )
    assert text.as_text().count("precision = [HIGHEST, HIGHEST]") == 2

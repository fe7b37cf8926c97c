"""Lengths of the sequences of a batch: against the definition in numpy, and under every transformation.

`explicit` is the definition: each sequence cut to its own length, then masked by the rule of visible keys.
Everything here runs on CPU, where the primitive is lowered to the reference.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from cases import Case
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close

import jax_r2p
from jax_r2p import reference
from jax_r2p._spec import AttentionSpec

pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")

B, T, S = 4, 7, 9
CASE = Case(id="", B=B, T=T, S=S, N=4, K=2, H=8)
QUERY, KEY, VALUE = CASE.arrays()
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "left": {"local_window_size": (2, 100)},
    "right": {"local_window_size": (100, 1)},
}
LENGTHS = (jnp.array([5, 0, 7, 2], jnp.int32), jnp.array([3, 4, 9, 6], jnp.int32))


def attend(query, key, value, query_lengths, key_lengths, *, implementation=None, **mask):
    return jax_r2p.attention(
        query,
        key,
        value,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        return_residual=True,
        implementation=implementation,
        **mask,
    )


compiled = jax.jit(attend, static_argnames=("implementation", "is_causal", "local_window_size"))


def explicit(query, key, value, query_lengths, key_lengths, *, is_causal=False, local_window_size=None):
    """The definition in numpy and float64: out (B, T, N, H) and residual (B, T, N)."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out, residual = np.zeros(query.shape), np.full(query.shape[:-1], -np.inf)
    group = query.shape[2] // key.shape[2]
    left, right = numerics.bounds(is_causal, local_window_size)
    for b in range(query.shape[0]):
        t = query.shape[1] if query_lengths is None else int(np.clip(query_lengths[b], 0, query.shape[1]))
        s = key.shape[1] if key_lengths is None else int(np.clip(key_lengths[b], 0, key.shape[1]))
        seen = numerics.visible(t, s, left, right)
        for i, n in np.ndindex(t, query.shape[2]):
            j = np.flatnonzero(seen[i])
            if j.size:
                scores = key[b, j, n // group] @ query[b, i, n] / math.sqrt(query.shape[3])
                residual[b, i, n] = scores.max() + math.log(np.exp(scores - scores.max()).sum())
                out[b, i, n] = np.exp(scores - residual[b, i, n]) @ value[b, j, n // group]
    return out, residual


def assert_same(got, want, tolerance=3e-6):
    for name, x, y in zip(("out", "residual"), got, want, strict=True):
        assert_close(x, y, tolerance, name=name)


# Beyond both ends, too: they are clamped. None: not given.
query_lengths = st.none() | st.lists(st.integers(-2, T + 2), min_size=B, max_size=B)
key_lengths = st.none() | st.lists(st.integers(-2, S + 2), min_size=B, max_size=B)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(MASKS)), query_lengths, key_lengths)
@example("causal", [0] * B, [0] * B)
@example("window", [T] * B, [0, 1, S, S + 1])
@example("causal", [-(2**31), 2**31 - 1, 1, 0], [2**31 - 1, -(2**31), 1, 0])
def test_values(mask, t, s):
    given_lengths = [x if x is None else np.array(x, np.int32) for x in (t, s)]
    got = compiled(QUERY, KEY, VALUE, *given_lengths, **MASKS[mask])
    assert_same(got, explicit(QUERY, KEY, VALUE, *given_lengths, **MASKS[mask]))
    beyond = np.arange(T) >= np.full(B, T if t is None else t)[:, None]
    np.testing.assert_array_equal(np.asarray(got[0])[beyond], 0)
    np.testing.assert_array_equal(np.asarray(got[1])[beyond], -np.inf)


def test_example_of_the_documentation():
    """With values that are unit vectors, the output is the weights."""

    def seen(t, s, **mask):
        lengths = [None if x is None else jnp.int32(x) for x in (t, s)]
        out, _ = attend(jnp.ones((4, 1, 4)), jnp.ones((4, 1, 4)), jnp.eye(4)[:, None], *lengths, **mask)
        return " ".join("".join("1" if weight > 0 else "0" for weight in row) for row in out[:, 0])

    assert seen(None, 3, is_causal=True) == "0000 1000 1100 1110"
    assert seen(2, 3, is_causal=True) == "1100 1110 0000 0000"
    assert seen(2, 3) == "1110 1110 0000 0000"


@pytest.mark.parametrize("mask", MASKS)
def test_full_lengths_change_nothing(mask):
    full = jnp.full(B, T, jnp.int32), jnp.full(B, S, jnp.int32)
    got, want = (compiled(QUERY, KEY, VALUE, *x, **MASKS[mask]) for x in (full, (None, None)))
    assert_same(got, want, 1e-6)


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"local_window_size": (2, 1)}], ids=str)
def test_agrees_with_jax_where_the_alignment_does(mask):
    """As many keys as queries; without a mask any lengths. Rows beyond a length are 0 in jax.nn, too."""
    t = jnp.array([5, 9, 1, 3], jnp.int32)
    query, key, value = CASE.replace(T=S).arrays()
    lengths = (t, t) if mask else (t, jnp.array([1, 9, 4, 7], jnp.int32))
    out, _ = compiled(query, key, value, *lengths, **mask)
    want = jax.nn.dot_product_attention(
        query, key, value, query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1], **mask
    )
    assert_close(out, want, 1e-6, name="out")


def test_other_batch_dimensions():
    want = compiled(QUERY, KEY, VALUE, *LENGTHS, is_causal=True)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (QUERY, KEY, VALUE, *LENGTHS)]
    for got, whole in zip(compiled(*split, is_causal=True), want, strict=True):
        np.testing.assert_array_equal(got.reshape(whole.shape), whole)
    one = compiled(QUERY[3], KEY[3], VALUE[3], 2, jnp.int32(6), is_causal=True)
    assert_same(one, [x[3] for x in want], 1e-6)


def test_reference_broadcasts_lengths():
    """As scale: a scalar for all sequences, or fewer dimensions than the batch has."""
    query, key, value = (x.reshape(2, 2, *x.shape[1:]) for x in (QUERY, KEY, VALUE))
    spec = AttentionSpec(right=0)
    got = reference.attention(query, key, value, 0.3, jnp.int32(5), jnp.array([3, 6]), spec=spec)
    five, own = jnp.full((2, 2), 5), jnp.array([[3, 6], [3, 6]])
    for x, y in zip(got, reference.attention(query, key, value, 0.3, five, own, spec=spec), strict=True):
        np.testing.assert_array_equal(x, y)


def test_float64():
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in (QUERY, KEY, VALUE)]
        got = attend(*arrays, *LENGTHS, is_causal=True)
        assert got[0].dtype == got[1].dtype == jnp.float64
        for x, y in zip(got, explicit(*arrays, *LENGTHS, is_causal=True), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


# What lies beyond the lengths


def fill(bad):
    """The arrays with `bad` in everything that is beyond a length."""
    filled = []
    for x, lengths in zip((QUERY, KEY, VALUE), (LENGTHS[0], LENGTHS[1], LENGTHS[1]), strict=True):
        beyond = np.arange(x.shape[1]) >= np.asarray(lengths)[:, None]
        filled.append(jnp.where(beyond[..., None, None], bad, x))
    return filled


def loss(query, key, value, *lengths, **keywords):
    """A number that depends on every visible part of both results."""
    out, residual = attend(query, key, value, *lengths, **keywords)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(residual), jnp.cos(residual), 0))


gradients = jax.jit(
    jax.grad(loss, (0, 1, 2)), static_argnames=("implementation", "is_causal", "local_window_size")
)


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_lies_beyond_changes_no_bit(bad, mask):
    """Neither of the results nor of the gradients, which are 0 there."""
    for function in (compiled, gradients):
        clean = function(QUERY, KEY, VALUE, *LENGTHS, **MASKS[mask])
        for x, y in zip(function(*fill(bad), *LENGTHS, **MASKS[mask]), clean, strict=True):
            np.testing.assert_array_equal(x, y)
    for gradient, lengths in zip(clean, (LENGTHS[0], LENGTHS[1], LENGTHS[1]), strict=True):
        beyond = np.arange(gradient.shape[1]) >= np.asarray(lengths)[:, None]
        np.testing.assert_array_equal(np.asarray(gradient)[beyond], 0)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_gradients_are_those_of_the_sequences(mask):
    got = gradients(QUERY, KEY, VALUE, *LENGTHS, **MASKS[mask])
    for b, (t, s) in enumerate(zip(*map(np.asarray, LENGTHS), strict=True)):
        cut = QUERY[b, :t], KEY[b, :s], VALUE[b, :s]
        want = gradients(*cut, None, None, **MASKS[mask], implementation="xla")
        for name, x, y in zip(("query", "key", "value"), got, want, strict=True):
            assert_close(x[b, : len(y)], y, 1e-5, name=f"{name} of sequence {b}")


def test_derivatives_of_second_order():
    def second(function):
        return jax.jit(
            jax.grad(
                lambda *a: sum(jnp.sum(g * g) for g in jax.grad(function, (0, 1, 2))(*a, *LENGTHS)), (0, 1, 2)
            )
        )

    function = functools.partial(loss, is_causal=True)
    got = second(function)(*fill(np.nan))
    want = second(functools.partial(function, implementation="xla"))(QUERY, KEY, VALUE)
    for x, y in zip(got, want, strict=True):
        assert np.isfinite(x).all()
        assert_close(x, y, 1e-4, name="second")


def test_lengths_have_no_derivative():
    function = functools.partial(loss, is_causal=True)
    gradient = jax.grad(function, 3, allow_int=True)(QUERY, KEY, VALUE, *LENGTHS)
    assert gradient.dtype == jax.dtypes.float0
    nothing = np.zeros(B, jax.dtypes.float0)
    ones = jnp.ones_like(QUERY), jnp.ones_like(KEY), jnp.ones_like(VALUE)
    _, tangent = jax.jvp(function, (QUERY, KEY, VALUE, *LENGTHS), (*ones, nothing, nothing))
    _, want = jax.jvp(lambda *a: function(*a, *LENGTHS), (QUERY, KEY, VALUE), ones)
    assert_close(tangent, want, 1e-5, name="tangent")


# Transformations


def test_new_values_compile_nothing():
    traces = []

    @jax.jit
    def function(*args):
        traces.append(1)
        return attend(*args, is_causal=True)

    for shift in range(3):
        lengths = [x - shift for x in LENGTHS]
        want = explicit(QUERY, KEY, VALUE, *lengths, is_causal=True)
        assert_same(function(QUERY, KEY, VALUE, *lengths), want)
    assert len(traces) == 1
    assert function._cache_size() == 1


def test_scan_over_lengths():
    """As when tokens are added to a cache one by one."""

    def step(length, query):
        return length + 1, attend(query[:, None], KEY, VALUE, None, length)

    _, (out, residual) = jax.jit(lambda: lax.scan(step, LENGTHS[1] - 2, jnp.moveaxis(QUERY, 1, 0)[:3]))()
    for i in range(3):
        want = explicit(QUERY[:, i : i + 1], KEY, VALUE, None, LENGTHS[1] - 2 + i)
        assert_same((out[i], residual[i]), want)


@pytest.mark.parametrize(
    "axes",
    [(0, 0, 0, 0, 0), (0, None, None, None, None), (0, 0, 0, None, 0), (None, None, None, 0, None)],
    ids=["all", "query", "key-lengths", "query-lengths"],
)
def test_vmap(axes):
    rng = np.random.default_rng(0)
    size = 3
    args = [jnp.stack([x + 0.1 * i for i in range(size)]) for x in (QUERY, KEY, VALUE)]
    args += [jnp.asarray(rng.integers(0, high + 1, (size, B)), jnp.int32) for high in (T, S)]
    args = [x if axis == 0 else x[0] for x, axis in zip(args, axes, strict=True)]
    function = functools.partial(attend, is_causal=True)
    got = jax.jit(jax.vmap(function, axes))(*args)
    for i in range(size):
        own = [x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True)]
        assert_same([x[i] for x in got], explicit(*own, is_causal=True))


def test_vmap_of_single_sequences():
    """Each with its own length, which is a scalar there: the same as a batch with lengths."""
    got = jax.vmap(functools.partial(attend, is_causal=True))(QUERY, KEY, VALUE, *LENGTHS)
    for x, y in zip(got, compiled(QUERY, KEY, VALUE, *LENGTHS, is_causal=True), strict=True):
        assert_close(x, y, 1e-6, name="vmap")


def test_nested_vmap():
    """Lengths differ along the inner dimension, queries along the outer one."""
    query = jnp.stack([QUERY, -QUERY])
    lengths = jnp.stack([LENGTHS[1], LENGTHS[1] - 1, LENGTHS[1] + 1])
    inner = jax.vmap(lambda q, s: attend(q, KEY, VALUE, None, s, is_causal=True), (None, 0))
    got = jax.jit(jax.vmap(inner, (0, None)))(query, lengths)
    for i, j in np.ndindex(2, 3):
        want = explicit(query[i], KEY, VALUE, None, lengths[j], is_causal=True)
        assert_same([x[i, j] for x in got], want)


def test_gradient_of_vmap():
    axes = (0, None, None, None, 0)
    query = jnp.stack([QUERY, -QUERY])
    lengths = jnp.stack([LENGTHS[1], LENGTHS[1] - 1])

    def total(q, k, v, implementation):
        function = functools.partial(loss, is_causal=True, implementation=implementation)
        return jnp.sum(jax.vmap(function, axes)(q, k, v, LENGTHS[0], lengths))

    got, want = (
        jax.jit(jax.grad(functools.partial(total, implementation=x), (0, 1, 2)))(query, KEY, VALUE)
        for x in (None, "xla")
    )
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, 1e-5, name="gradient")


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "unchecked"])
def test_shard_map(check_vma):
    """Lengths are split like the batch; query lengths that all devices share are made to vary."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    both = P("x", None, "y", None)

    def local(q, k, v, t, s):
        return attend(q, k, v, jnp.broadcast_to(t, q.shape[:1]), s, is_causal=True)

    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(both, both, both, P(), P("x")),
        out_specs=(both, P("x", None, "y")),
        check_vma=check_vma,
    )
    got = jax.jit(function)(QUERY, KEY, VALUE, jnp.int32(5), LENGTHS[1])
    assert_same(got, explicit(QUERY, KEY, VALUE, np.full(B, 5), LENGTHS[1], is_causal=True))


def test_explicit_mesh():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        spec = NamedSharding(mesh, P("x", None, "y", None))
        arrays = [jax.device_put(x, spec) for x in (QUERY, KEY, VALUE)]
        lengths = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in LENGTHS]
        out, residual = jax.jit(functools.partial(attend, is_causal=True))(*arrays, *lengths)
        assert out.sharding.is_equivalent_to(spec, 4)
    assert_same((out, residual), explicit(QUERY, KEY, VALUE, *LENGTHS, is_causal=True))


def test_zero_sizes():
    for b, t, s in ((2, 0, 7), (2, 5, 0), (0, 5, 7)):
        arrays = CASE.replace(B=b, T=t, S=s).arrays()
        lengths = jnp.full(b, 3, jnp.int32)
        out, residual = compiled(*arrays, lengths, lengths, is_causal=True)
        np.testing.assert_array_equal(out, np.zeros((b, t, 4, 8)))
        np.testing.assert_array_equal(residual, np.full((b, t, 4), -np.inf))

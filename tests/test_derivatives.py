"""Derivatives: against those of the reference, which JAX takes itself and which hold all scores.

What transformations do to them is tested in `test_primitive`, and lengths of sequences in `test_seq_lengths`,
too. Here are their values, the blocks of keys that they are summed over, and their memory.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from numerics import assert_close

import jax_r2p
from jax_r2p import _arguments, _blockwise, _primitives, reference
from jax_r2p._spec import AttentionSpec

pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")

ALL = (0, 1, 2, 3)
NAMES = ("query", "key", "value", "scale")
SPECS = {
    "none": AttentionSpec(),
    "causal": AttentionSpec(right=0),
    "left": AttentionSpec(left=7, right=0),
    "right": AttentionSpec(left=0, right=5),
    "left-only": AttentionSpec(left=2),
}
# Four blocks of keys, the last with a single one.
B, T, S, BLOCK = 3, 9, 13, 4
ARRAYS = Case(id="", B=B, T=T, S=S, N=4, K=2, H=6, Hv=5).arrays()
SCALE = jnp.float32(0.4)


def assert_each(got, want, tolerance=3e-6):
    for name, x, y in zip(NAMES, got, want, strict=True):
        size = max(1.0, float(np.max(np.abs(np.asarray(y, np.float32)), initial=0)))
        assert_close(x, y, tolerance * size, name=name)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.cache
def derivatives(spec):
    """Cotangents and tangents of the reference and of the blocks, for traced lengths and directions."""

    def both(lengths, cotangents, tangents):
        def function(*a):
            return reference.attention(*a, *lengths, spec=spec)

        results, transpose = jax.vjp(function, *ARRAYS, SCALE)
        want = transpose(cotangents), jax.jvp(function, (*ARRAYS, SCALE), tangents)[1]
        call = (*ARRAYS, SCALE, *lengths, *results)
        dquery, dkey, dvalue, dscale = _blockwise.backward(*call, *cotangents, spec=spec, block=BLOCK)
        got = _blockwise.tangent(*call, *tangents, spec=spec, block=BLOCK)
        return ((dquery, dkey, dvalue, dscale.sum()), got), want

    return jax.jit(both)


def lengths_up_to(extent):
    return st.lists(st.integers(-1, extent + 1), min_size=B, max_size=B)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(SPECS)),
    lengths_up_to(T),
    lengths_up_to(S),
    st.sampled_from([(1, 0), (0, 1), (1, 1)]),
)
@example("causal", [T] * B, [0, 1, S], (1, 1))
@example("none", [T, T, 0], [3, 4, 5], (1, 1))
@example("left", [T] * B, [S] * B, (0, 1))
def test_blocks_give_the_derivatives_of_the_reference(name, t, s, losses):
    """Of out alone, of the residual alone, and of both."""
    spec = SPECS[name]
    lengths = [jnp.array(x, jnp.int32) for x in (t, s)]
    dout, dlse = normal(1, B, T, 4, 5) * losses[0], normal(2, B, 4, T) * losses[1]
    tangents = (*(normal(3 + i, *x.shape) for i, x in enumerate(ARRAYS)), jnp.float32(0.7))
    (cotangents, got), (want_cotangents, want) = derivatives(spec)(lengths, (dout, dlse), tangents)
    assert_each(cotangents, want_cotangents, 2e-5)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, 2e-5, name="tangent")

    dquery, dkey, dvalue, _ = map(np.asarray, cotangents)
    for b, (own_t, own_s) in enumerate(zip(np.clip(t, 0, T), np.clip(s, 0, S), strict=True)):
        low, high = spec.bounds(own_t, own_s)
        distance = np.arange(S)[None] - np.arange(T)[:, None]
        seen = (np.arange(S)[None] < own_s) & (np.arange(T)[:, None] < own_t)
        seen &= (low is None or distance >= low) & (high is None or distance <= high)
        assert not dquery[b, ~seen.any(1)].any(), "queries that see no key"
        assert not dkey[b, ~seen.any(0)].any(), "keys that no query sees"
        assert not dvalue[b, ~seen.any(0)].any(), "values that no query sees"


def test_cotangents_of_rows_without_keys_do_not_matter():
    """NaN comes there from what a loss does with -inf."""
    spec, lengths = AttentionSpec(right=0), (None, jnp.array([4, S, 2], jnp.int32))
    results = reference.attention(*ARRAYS, SCALE, *lengths, spec=spec)
    empty = results[1] == -jnp.inf
    assert empty.any()
    dout, dlse = normal(1, *results[0].shape), normal(2, *results[1].shape)
    nan = jnp.where(jnp.swapaxes(empty, 1, 2)[..., None], jnp.nan, dout), jnp.where(empty, jnp.nan, dlse)
    call = functools.partial(_blockwise.backward, *ARRAYS, SCALE, *lengths, *results, spec=spec, block=BLOCK)
    for x, y in zip(call(*nan), call(dout, dlse), strict=True):
        np.testing.assert_array_equal(x, y)


def test_finite_differences():
    """Of derivatives of first and second order, by every operand and along random directions, in float64."""
    with jax.enable_x64(True):
        spec, lengths = AttentionSpec(left=5, right=1), (jnp.array([T, 7]), jnp.array([S, 6]))
        args = (*(x[:2].astype(jnp.float64) for x in ARRAYS), jnp.float64(0.4))

        def cotangents(*a):
            out, lse = reference.attention(*a, *lengths, spec=spec)
            dout, dlse = jnp.cos(out), jnp.where(lse == -jnp.inf, 0, jnp.cos(lse))
            return _blockwise.backward(*a, *lengths, out, lse, dout, dlse, spec=spec, block=BLOCK)

        def tangents(*a):
            call = (*a, *lengths, *reference.attention(*a, *lengths, spec=spec))
            return _blockwise.tangent(*call, *map(jnp.sin, a), spec=spec, block=BLOCK)

        def public(*a):
            return jax_r2p.attention(*a[:3], scale=a[3], local_window_size=(15, 0), return_residual=True)

        check_grads(jax.jit(cotangents), args, order=1, modes=("fwd", "rev"))
        check_grads(jax.jit(tangents), args, order=1, modes=("rev",))
        check_grads(jax.jit(public), args, order=1, modes=("fwd", "rev"))


# The public function


def loss(query, key, value, scale, *, implementation=None, **keywords):
    out, residual = jax_r2p.attention(
        query, key, value, scale=scale, return_residual=True, implementation=implementation, **keywords
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(residual == -jnp.inf, 0, jnp.cos(residual)))


def both_gradients(args, dtype=jnp.float32, **keywords):
    """Those of the primitive, and those of the reference in another dtype."""
    got = jax.jit(jax.grad(functools.partial(loss, **keywords), ALL))(*args)
    wide = [*(x.astype(dtype) for x in args[:3]), args[3]]
    want = jax.jit(jax.grad(functools.partial(loss, implementation="xla", **keywords), ALL))(*wide)
    return got, want


@pytest.mark.parametrize(
    ("t", "s", "keywords"),
    [
        (3, 256, {}),
        (2, 257, {"is_causal": True}),
        (200, 72, {"is_causal": True}),  # github.com/Dao-AILab/flash-attention/issues/1778, and the next two
        (5, 2, {"is_causal": True}),
        (3, 528, {"is_causal": True}),
        (96, 96, {"local_window_size": (7, 0)}),  # github.com/jax-ml/jax/pull/39576, and the next two
        (96, 96, {"local_window_size": (0, 5)}),
        (96, 96, {"local_window_size": (200, 200)}),
        (40, 600, {"local_window_size": (300, 3)}),
    ],
    ids=str,
)
def test_gradients(t, s, keywords):
    args = (*Case(id="", B=1, T=t, S=s, N=4, K=1, H=8).arrays(), SCALE)
    got, want = both_gradients(args, **keywords)
    assert_each(got, want, 1e-5)
    if keywords.get("is_causal") and t > s:
        np.testing.assert_array_equal(got[0][:, : t - s], 0)


@pytest.mark.parametrize("s", [96, 128, 129])
def test_very_negative_residuals(s):
    """github.com/NVIDIA/cudnn-frontend/issues/1072: one query, logits about -200."""
    query, key, value = Case(id="", T=1, S=s, N=2, K=2, H=64, dtype="bfloat16").arrays()
    args = (0.1 * query - 5, 0.1 * key + 5, value, jnp.float32(0.125))
    _, residual = jax_r2p.attention(*args[:3], scale=args[3], return_residual=True)
    assert float(residual.max()) < -150
    got, want = both_gradients(args)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in got)
    assert_each(got, want, 2**-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2**-6), ("float16", 2**-9)])
def test_half_precision(dtype, tolerance):
    """Against the reference's in float32: the kernel's arithmetic, whose only roundings are those of out, its
    cotangent and the results.
    """
    args = (*Case(id="", T=33, S=40, N=4, K=2, H=24, dtype=dtype).arrays(), SCALE)
    got, want = both_gradients(args, is_causal=True)
    assert [x.dtype for x in got] == [dtype] * 3 + [jnp.float32]
    assert_each(got, want, tolerance)


def test_float64():
    with jax.enable_x64(True):
        args = (*Case(id="", T=5, S=7, dtype="float64").arrays(), jnp.float64(0.4))
        got, want = both_gradients(args, jnp.float64, is_causal=True)
        for x, y in zip(got, want, strict=True):
            assert x.dtype == jnp.float64
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_nothing_is_read_beyond_the_lengths():
    """NaN there leaves all gradients and their derivatives finite, those by scale too."""
    lengths = {"query_seq_lengths": jnp.array([9, 5, 0]), "key_value_seq_lengths": jnp.array([6, 13, 2])}
    names = ("query_seq_lengths", "key_value_seq_lengths", "key_value_seq_lengths")
    arrays = [
        jnp.where(jnp.arange(x.shape[1])[:, None, None] < lengths[name][:, None, None, None], x, jnp.nan)
        for name, x in zip(names, ARRAYS, strict=True)
    ]
    keywords = {"local_window_size": (3, 4), **lengths}
    gradient = jax.grad(functools.partial(loss, **keywords), ALL)
    second = jax.grad(lambda *a: sum(jnp.sum(x * x) for x in gradient(*a)), ALL)
    for function in (gradient, second):
        clean = jax.jit(function)(*ARRAYS, SCALE)
        for x, y in zip(jax.jit(function)(*arrays, SCALE), clean, strict=True):
            assert np.isfinite(x).all()
            np.testing.assert_array_equal(x, y)


def layers(*args, keys=300, implementation=None):
    """A scan over layers, each with more keys than a block has."""
    query, key, value, scale = args

    def layer(carry, x):
        out = jax_r2p.attention(
            carry, key + x, value, scale=scale, is_causal=True, implementation=implementation
        )
        return carry + out, None

    return jnp.sum(jnp.sin(lax.scan(layer, query, jnp.array([0.1, -0.2]))[0]))


LONG = (*Case(id="", B=4, T=5, S=300, N=4, K=2, H=4).arrays(), SCALE)


def hvp(function):
    def along(*a):
        gradient = jax.grad(function, ALL)(*a)
        return sum(jnp.vdot(g, lax.stop_gradient(jnp.cos(x))) for g, x in zip(gradient, a, strict=True))

    return jax.grad(along, ALL)


SECOND = {
    "jvp-of-grad": lambda f: lambda *a: jax.jvp(jax.grad(f, ALL), a, tuple(map(jnp.cos, a))),
    "grad-of-grad": lambda f: jax.grad(lambda *a: sum(jnp.sum(g * g) for g in jax.grad(f, ALL)(*a)), ALL),
    "hvp": hvp,
    "grad-of-linearize": lambda f: jax.grad(lambda *a: jax.linearize(f, *a)[1](*map(jnp.cos, a)), ALL),
}


@pytest.mark.parametrize("derivative", SECOND.values(), ids=SECOND.keys())
def test_second_order_over_several_blocks(derivative):
    """In a scan over layers, with remat."""
    got = jax.jit(derivative(jax.checkpoint(layers)))(*LONG)
    want = jax.jit(derivative(functools.partial(layers, implementation="xla")))(*LONG)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, y, 2e-5 * max(1.0, float(jnp.max(jnp.abs(y)))), name="derivative")


def test_jacobians():
    """Forward and backward: `vmap` over tangents, and over cotangents, where the operands are shared."""
    args = (*Case(id="", B=1, T=2, S=3, N=2, K=1, H=4).arrays(), SCALE)

    def function(*a, implementation=None):
        return jax_r2p.attention(
            *a[:3], scale=a[3], is_causal=True, return_residual=True, implementation=implementation
        )

    want = jax.jit(jax.jacfwd(functools.partial(function, implementation="xla"), ALL))(*args)
    for jacobian in (jax.jacfwd, jax.jacrev):
        got = jax.jit(jacobian(function, ALL))(*args)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(x, y, 1e-5, name=jacobian.__name__)


def test_transpose_of_a_mapped_linear_function():
    """Tangents with a mapped dimension that the keys, which are not mapped, do not have."""
    args = (*Case(id="", B=2, T=2, S=3, N=2, K=1, H=4).arrays(), SCALE)

    def transposed(implementation):
        def function(*a):
            return jax_r2p.attention(*a[:3], scale=a[3], is_causal=True, implementation=implementation)

        linear = jax.vmap(jax.linearize(function, *args)[1])
        structs = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in args]
        return jax.linear_transpose(linear, *structs)(normal(0, 3, 2, 2, 2, 4))

    got, want = (jax.jit(functools.partial(transposed, x))() for x in (None, "xla"))
    assert_each(got, want)


def test_gradient_by_shared_keys_is_one_for_each_mapped_query():
    """`vmap` of `grad`, with keys and scale that are not mapped."""
    query = normal(0, 3, *ARRAYS[0].shape)
    rest = (*ARRAYS[1:], SCALE)
    axes = (0, None, None, None)
    got = jax.jit(jax.vmap(jax.grad(loss, ALL), axes))(query, *rest)
    one = jax.jit(jax.grad(functools.partial(loss, implementation="xla"), ALL))
    want = [one(q, *rest) for q in query]
    assert_each(got, [jnp.stack(x) for x in zip(*want, strict=True)], 1e-5)


def test_gradient_by_queries_copies_no_keys():
    query = normal(0, 3, *ARRAYS[0].shape)
    function = jax.vmap(jax.grad(loss), (0, None, None, None))
    eqns = equations(jax.make_jaxpr(function)(query, *ARRAYS[1:], SCALE).jaxpr)
    (eqn,) = (eqn for eqn in eqns if eqn.primitive.name == "jax_r2p_attention_backward")
    shapes = [x.aval.shape for x in eqn.invars]
    assert shapes[1:4] == [(1, *ARRAYS[1].shape), (1, *ARRAYS[2].shape), ()]
    assert [x.aval.shape for x in eqn.outvars] == [query.shape]


# Rematerialisation


def equations(jaxpr):
    """Every equation of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


POLICIES = {
    "none": (None, 1),
    "nothing": (jax.checkpoint_policies.nothing_saveable, 2),
    "out": (jax.checkpoint_policies.save_only_these_names(jax_r2p.OUT_NAME), 2),
    "residual": (jax.checkpoint_policies.save_only_these_names(jax_r2p.RESIDUAL_NAME), 2),
    "both": (jax.checkpoint_policies.save_only_these_names(jax_r2p.OUT_NAME, jax_r2p.RESIDUAL_NAME), 1),
}


@pytest.mark.parametrize("scanned", [False, True], ids=["", "scan"])
@pytest.mark.parametrize(("policy", "calls"), POLICIES.values(), ids=POLICIES.keys())
def test_policies(policy, calls, scanned):
    """How often the forward pass stands in the program of the gradient, and that nothing else changes."""
    query, key, value, scale = (*Case(id="", B=3, T=16, S=17, N=5, K=5, H=24).arrays(), SCALE)

    def layer(x, _=None):
        return jnp.sin(x + jax_r2p.attention(x, key, value, scale=scale, is_causal=True)), None

    body = layer if policy is None else jax.checkpoint(layer, policy=policy)

    def total(x):
        return jnp.sum(lax.scan(body, x, None, length=2)[0] if scanned else body(x)[0])

    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.grad(total))(query).jaxpr)]
    assert names.count("jax_r2p_attention") == calls
    assert names.count("jax_r2p_attention_backward") == 1
    assert "jax_r2p_attention_tangent" not in names
    if scanned:
        want = jax.jit(jax.grad(lambda x: jnp.sum(layer(layer(x)[0])[0])))(query)
        assert_close(jax.jit(jax.grad(total))(query), want, 1e-5, name="gradient")


# Several devices


@pytest.mark.parametrize("derivative", ["grad", "jvp-of-grad", "hvp"])
def test_inside_shard_map(derivative):
    """Keys are the same on all four devices, and have more than a block; their gradients are summed."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    query, key, value, scale = LONG
    specs = (P("x"), P(), P(), P())

    def local(query, key, value, scale):
        return lax.psum(loss(query, key, value, scale, is_causal=True), "x")

    def whole(query, key, value, scale):
        key, value = (jnp.broadcast_to(x, (4, *x.shape[1:])) for x in (key, value))
        return loss(query, key, value, scale, is_causal=True, implementation="xla")

    args = (query, key[:1], value[:1], scale)
    derive = SECOND.get(derivative, lambda f: jax.grad(f, ALL))
    got = jax.jit(derive(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())))(*args)
    want = jax.jit(derive(whole))(*args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, y, 2e-5 * max(1.0, float(jnp.max(jnp.abs(y)))), name=derivative)


@pytest.mark.parametrize("derivative", ["grad", "grad-of-grad"])
def test_on_an_explicit_mesh(derivative):
    """Gradients are sharded like what they are gradients of."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    derive = SECOND.get(derivative, lambda f: jax.grad(f, ALL))
    function = functools.partial(loss, is_causal=True)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("x", None, "y", None))
        placed = [*(jax.device_put(x, sharding) for x in LONG[:3]), SCALE]
        got = jax.jit(derive(function))(*placed)
        for x in jax.tree.leaves(got)[:3]:
            assert x.sharding.is_equivalent_to(sharding, 4)
    want = jax.jit(derive(functools.partial(function, implementation="xla")))(*LONG)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, y, 2e-5 * max(1.0, float(jnp.max(jnp.abs(y)))), name=derivative)


# Memory


def gradient_of_sum(function):
    return jax.grad(lambda *a: sum(jnp.sum(jnp.sin(x)) for x in function(*a)), (0, 1, 2))


def directional(function):
    return lambda *a: jax.jvp(function, a, a)[1]


# And what share of all scores is more than each may hold at length 8192. A block has 1/32 of them; the third
# order holds some dozens of such arrays.
MEMORY = {
    "grad": (gradient_of_sum, 0.5),
    "jvp": (directional, 0.5),
    "jvp-of-grad": (lambda f: directional(gradient_of_sum(f)), 0.5),
    "grad-of-grad": (lambda f: gradient_of_sum(gradient_of_sum(f)), 0.5),
    "grad-of-jvp": (lambda f: gradient_of_sum(directional(f)), 0.5),
    "grad-of-grad-of-grad": (lambda f: gradient_of_sum(gradient_of_sum(gradient_of_sum(f))), 1),
    "jvp-of-jvp-of-grad": (lambda f: directional(directional(gradient_of_sum(f))), 1),
}


@pytest.mark.parametrize(("derivative", "most"), MEMORY.values(), ids=MEMORY.keys())
def test_memory_is_linear(derivative, most, monkeypatch):
    """That of the derivatives: the reference, which is the forward pass here, holds all scores."""

    def no_memory(query, *_, spec, lengths):
        return query * 2, jnp.swapaxes(query.sum(-1), -1, -2)

    monkeypatch.setattr(_primitives, "_attention", no_memory)

    def function(*a):
        return jax_r2p.attention(*a, is_causal=True, return_residual=True)

    def needed(size):
        x = jax.ShapeDtypeStruct((1, size, 1, 8), jnp.float32)
        compiled = jax.jit(derivative(function)).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = needed(4096), needed(8192)
    assert long / short < 2.6
    assert long < most * 8192 * 8192 * 4


# Determinism


def test_deterministic_reaches_the_backward_primitive():
    def parameter(deterministic, function=jax_r2p.attention, **keywords):
        if function is jax_r2p.attention:
            keywords["deterministic"] = deterministic
        gradient = jax.grad(lambda x: jnp.sum(function(x, x, x, **keywords)))
        eqns = equations(jax.make_jaxpr(gradient)(jnp.ones((1, 2, 1, 8), jnp.bfloat16)).jaxpr)
        (eqn,) = (eqn for eqn in eqns if eqn.primitive.name == "jax_r2p_attention_backward")
        return eqn.params["deterministic"]

    assert parameter(None) is False
    assert parameter(False) is False
    assert parameter(True) is True
    assert parameter(np.True_) is True


def test_default_of_deterministic_is_that_of_xla(monkeypatch):
    for flags, wanted in {
        "": False,
        "--xla_gpu_deterministic_ops": True,
        "--xla_gpu_deterministic_ops=true --xla_dump_to=x": True,
        "--xla_gpu_deterministic_ops=false": False,
        "--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=0": False,
        "--xla_gpu_exclude_nondeterministic_ops=True": True,
        "--xla_gpu_autotune_level=0": False,
    }.items():
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert _arguments.check_deterministic(None) is wanted, flags
        assert _arguments.check_deterministic(False) is False


def test_deterministic_is_static():
    x = jnp.ones((1, 2, 1, 8))
    with pytest.raises(TypeError, match="deterministic must be a bool, got 1"):
        jax_r2p.attention(x, x, x, deterministic=1)
    with pytest.raises(TypeError, match="deterministic must be a bool known when tracing"):
        jax.jit(lambda flag: jax_r2p.attention(x, x, x, deterministic=flag))(True)
    with pytest.raises(TypeError, match="deterministic must be a bool"):
        jax_r2p.explain(x, x, x, deterministic="yes")


# Documentation


def blocks():
    text = (Path(__file__).resolve().parent.parent / "docs" / "derivatives.md").read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks())))
def test_code_of_the_documentation(number, tmp_path):
    """It runs, and prints what its comments say."""
    block = blocks()[number]
    script = tmp_path / "block.py"
    script.write_text(block, "utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"print\(.*\) *# (.*)$", block, re.MULTILINE)

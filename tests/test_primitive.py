"""The primitive under every transformation, on CPU, where it is lowered to the reference.

Results are compared with the reference called without the primitive, in loops where something is mapped.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case, ids
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close

import jax_r2p
from jax_r2p import _dispatch, _ffi, _kernel_call, reference
from jax_r2p._spec import AttentionSpec

pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")

CASE = Case(id="", B=2, T=5, S=7, N=4, K=2, H=8, window=(3, 1))
EMPTY_ROWS = Case(id="", B=2, T=7, S=4, N=4, K=2, H=8, causal=True)  # the first three queries see nothing
OTHER_VALUES = CASE.replace(Hv=12)
SCALE = jnp.float32(0.4)
V = 3


def attend(query, key, value, scale, *, case=CASE, implementation=None):
    return jax_r2p.attention(
        query, key, value, scale=scale, **case.mask, return_residual=True, implementation=implementation
    )


direct = functools.partial(attend, implementation="xla")
compiled = jax.jit(direct)


def loss(*args, case=CASE, implementation=None):
    """A number that depends on every visible part of both results."""
    out, residual = attend(*args, case=case, implementation=implementation)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(residual), jnp.cos(residual), 0))


direct_loss = functools.partial(loss, implementation="xla")
ALL = (0, 1, 2, 3)


def operands(case=CASE, count=None):
    """query, key, value and scale; with `count`, that many of each along a new first axis, all different."""
    if count is None:
        return [*case.arrays(), SCALE]
    each = [case.arrays(seed) for seed in range(count)]
    return [*map(jnp.stack, zip(*each, strict=True)), jnp.linspace(-0.5, 0.7, count)]


def assert_equal(got, want, tolerance=2e-6):
    leaves, structure = jax.tree.flatten(got)
    want_leaves, want_structure = jax.tree.flatten(want)
    assert structure == want_structure
    for i, (x, y) in enumerate(zip(leaves, want_leaves, strict=True)):
        assert x.dtype == y.dtype
        scale = max(1.0, float(np.max(np.abs(np.nan_to_num(y, neginf=0)), initial=0)))
        assert_close(x, y, tolerance * scale, name=f"result {i}")


def count_primitives(jaxpr, name="jax_r2p_attention") -> int:
    """How often a primitive stands in a jaxpr, at any depth."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == name
        for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                count += count_primitives(inner, name)
    return count


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != "float16"], ids=ids)
def test_jit_and_eager_equal_the_reference(case):
    args = operands(case)
    want = jax.jit(functools.partial(direct, case=case))(*args)
    assert_equal(attend(*args, case=case), want)
    assert_equal(jax.jit(functools.partial(attend, case=case))(*args), want)


def test_types_without_running():
    structs = [*CASE.structs, jax.ShapeDtypeStruct((), jnp.float32)]
    out, residual = jax.eval_shape(attend, *structs)
    assert (out.shape, out.dtype) == ((2, 5, 4, 8), jnp.float32)
    assert (residual.shape, residual.dtype) == ((2, 5, 4), jnp.float32)
    half = Case(id="", T=5, S=7, dtype="bfloat16").structs
    out, residual = jax.eval_shape(lambda *a: attend(*a, None), *half)
    assert (out.dtype, residual.dtype) == (jnp.bfloat16, jnp.float32)


def test_types_where_values_have_another_width():
    structs = [*OTHER_VALUES.structs, jax.ShapeDtypeStruct((), jnp.float32)]
    out, residual = jax.eval_shape(attend, *structs)
    assert (out.shape, residual.shape) == ((2, 5, 4, 12), (2, 5, 4))


def test_one_primitive_in_the_jaxpr():
    jaxpr = jax.make_jaxpr(lambda *a: jax_r2p.attention(*a, is_causal=True))(*CASE.structs).jaxpr
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jax_r2p_attention")
    assert eqn.params["spec"] == jax_r2p._spec.AttentionSpec(right=0)
    assert eqn.invars[3].aval.shape == ()
    assert str(eqn.invars[3].aval.dtype) == "float32"


def test_scale_is_no_parameter():
    """So that another one does not compile anew."""
    compilations = []

    @jax.jit
    def function(*args):
        compilations.append(1)
        return attend(*args)

    query, key, value = CASE.arrays()
    for scale in (0.1, 0.2, -3.0, 0.0):
        assert_equal(function(query, key, value, scale), compiled(query, key, value, scale))
    assert len(compilations) == 1
    jaxprs = {
        str(jax.make_jaxpr(lambda q, k, v, s=s: attend(q, k, v, s)[0])(query, key, value)).replace(str(s), "")
        for s in (0.25, 0.75)
    }
    assert len(jaxprs) == 1


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_any_number_of_batch_dimensions(batch):
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((*batch, *own), np.float32))
        for own in ((5, 4, 8), (7, 2, 8), (7, 2, 8))
    )
    got = attend(query, key, value, SCALE)
    want = compiled(*(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)), SCALE)
    assert_equal(got, tuple(x.reshape(*batch, *x.shape[1:]) for x in want))


# vmap


def loop(axes, args, function=compiled):
    """What `vmap` means."""
    results = [
        function(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(args, axes, strict=True)))
        for i in range(V)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


MAPPED = [axes for axes in itertools.product((0, None), repeat=4) if any(axis == 0 for axis in axes)]


def named(axes):
    return "-".join(
        name for name, axis in zip(("query", "key", "value", "scale"), axes, strict=True) if axis == 0
    )


@pytest.mark.parametrize("axes", MAPPED, ids=named)
def test_vmap(axes):
    args = [x if axis == 0 else x[0] for x, axis in zip(operands(count=V), axes, strict=True)]
    assert_equal(jax.jit(jax.vmap(attend, axes))(*args), loop(axes, args))


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, None, 0, 0)], ids=named)
def test_vmap_where_values_have_another_width(axes):
    stacked = operands(OTHER_VALUES, count=V)
    args = [x if axis == 0 else x[0] for x, axis in zip(stacked, axes, strict=True)]
    assert_equal(jax.jit(jax.vmap(attend, axes))(*args), loop(axes, args))
    got = jax.jit(jax.vmap(jax.grad(loss, ALL), axes))(*args)
    assert_equal(got, loop(axes, args, jax.jit(jax.grad(direct_loss, ALL))), 1e-5)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, 0)], ids=named)
def test_vmap_of_the_gradient(axes):
    args = [x if axis == 0 else x[0] for x, axis in zip(operands(count=V), axes, strict=True)]
    got = jax.jit(jax.vmap(jax.grad(loss, ALL), axes))(*args)
    assert_equal(got, loop(axes, args, jax.jit(jax.grad(direct_loss, ALL))), 1e-5)


def test_gradient_of_the_vmap():
    """The query's is summed over the copies; the shared keys' are, too."""
    axes = (0, None, None, 0)
    args = [x if axis == 0 else x[0] for x, axis in zip(operands(count=V), axes, strict=True)]

    def total(*args, function):
        return jnp.sum(jax.vmap(function, axes)(*args))

    got = jax.jit(jax.grad(functools.partial(total, function=loss), ALL))(*args)
    want = jax.jit(jax.grad(functools.partial(total, function=direct_loss), ALL))(*args)
    assert_equal(got, want, 1e-5)


def test_vmap_over_other_axes():
    args = operands(count=V)
    axes, out_axes = (1, 2, 4, 0), (2, -1)
    moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip(args, axes, strict=True)]
    got = jax.jit(jax.vmap(attend, axes, out_axes))(*moved)
    want = [jnp.moveaxis(x, 0, axis) for x, axis in zip(loop((0,) * 4, args), out_axes, strict=True)]
    assert_equal(got, tuple(want))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ((0, None, None, None), (0, None, None, None)),
        ((0, None, None, None), (None, 0, 0, None)),
        ((None, 0, 0, None), (0, None, None, 0)),
        ((None, None, None, 0), (None, None, 0, None)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((None, None, None, 0), (0, 0, 0, 0)),
    ],
    ids=lambda axes: named(axes),
)
def test_nested_vmap(outer, inner):
    args = []
    for x, o, i in zip(operands(count=V * V), outer, inner, strict=True):
        x = x.reshape(V, V, *x.shape[1:])
        args.append(x[(slice(None) if o == 0 else 0, slice(None) if i == 0 else 0)])
    got = jax.jit(jax.vmap(jax.vmap(attend, inner), outer))(*args)
    want = loop(outer, args, lambda *a: loop(inner, a))
    assert_equal(got, want)


def test_vmap_of_queries_copies_no_keys():
    args = [operands(count=V)[0], *operands()[1:]]
    jaxpr = jax.make_jaxpr(jax.vmap(attend, (0, None, None, None)))(*args).jaxpr
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jax_r2p_attention")
    assert [x.aval.shape for x in eqn.invars] == [(V, 2, 5, 4, 8), (1, 2, 7, 2, 8), (1, 2, 7, 2, 8), ()]


# Differentiation


@pytest.mark.parametrize(
    "case", [CASE, EMPTY_ROWS, OTHER_VALUES], ids=["window", "empty-rows", "other-values"]
)
def test_gradients(case):
    args = operands(case)
    got = jax.jit(jax.value_and_grad(functools.partial(loss, case=case), ALL))(*args)
    want = jax.jit(jax.value_and_grad(functools.partial(direct_loss, case=case), ALL))(*args)
    assert_equal(got, want, 1e-5)
    if case is EMPTY_ROWS:
        np.testing.assert_array_equal(got[1][0][:, :3], 0)


def test_gradients_outside_of_jit():
    want = jax.jit(jax.grad(direct_loss, ALL))(*operands())
    assert_equal(jax.grad(loss, ALL)(*operands()), want, 1e-5)


@pytest.mark.parametrize("argument", ALL)
def test_gradient_of_one_operand(argument):
    args = operands()
    got = jax.jit(jax.grad(loss, argument))(*args)
    assert_equal(got, jax.jit(jax.grad(direct_loss, ALL))(*args)[argument], 1e-5)


def test_gradient_agrees_with_jax():
    args = CASE.replace(T=7).arrays()
    mask = {"is_causal": True, "local_window_size": (3, 1)}
    got, want = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a, **mask))), (0, 1, 2)))(*args)
        for f in (jax_r2p.attention, jax.nn.dot_product_attention)
    )
    assert_equal(got, want, 1e-5)


def test_hidden_nan_leaves_gradients_finite():
    query, key, value, scale = operands()
    key = key.at[:, 0].set(jnp.nan)  # hidden from the last two queries only
    value = value.at[:, 0].set(jnp.inf)
    gradient = jax.jit(jax.grad(loss))(query, key, value, scale)
    np.testing.assert_array_equal(np.isfinite(gradient).all((0, 2, 3)), [False, False, True, True, True])


def directions(args):
    return tuple(map(jnp.cos, args))


DERIVATIVES = {
    "jvp": lambda f: lambda *a: jax.jvp(f, a, directions(a)),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*directions(a)),
    "jvp-of-grad": lambda f: lambda *a: jax.jvp(jax.grad(f, ALL), a, directions(a)),
    "grad-of-jvp": lambda f: jax.grad(lambda *a: jax.jvp(f, a, directions(a))[1], ALL),
    "grad-of-grad": lambda f: jax.grad(lambda *a: sum(jnp.sum(g * g) for g in jax.grad(f, ALL)(*a)), ALL),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES.keys())
def test_other_derivatives(derivative):
    """With queries that see nothing: the case where a derivative of the second order turns NaN first."""
    args = operands(EMPTY_ROWS)
    got, want = (
        jax.jit(derivative(functools.partial(f, case=EMPTY_ROWS)))(*args) for f in (loss, direct_loss)
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    assert_equal(got, want, 1e-5)


def test_jvp_along_one_operand():
    """The residual does not depend on the value, so its tangent is zero, not missing."""
    query, key, value, scale = operands()
    results, tangents = jax.jvp(lambda v: attend(query, key, v, scale), (value,), (jnp.ones_like(value),))
    assert_equal(results, compiled(query, key, value, scale))
    assert_equal(tangents, (compiled(query, key, jnp.ones_like(value), scale)[0], jnp.zeros((2, 5, 4))))


# Widths that no kernel has


@pytest.mark.parametrize(("h", "hv"), [(8, 8), (5, 5), (12, 8), (8, 3), (9, 17)])
def test_padding_changes_nothing(monkeypatch, h, hv):
    """With the definition in the kernel's place: one call, and one for each scale."""
    spec = AttentionSpec(left=3, right=1)
    calls = []

    def in_its_place(query, key, value, scale, *lengths, variant, spec, kv_repeat, kv_inner):
        assert lengths == (None, None)
        calls.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        assert (kv_repeat, kv_inner) == (1, 1)
        return reference.attention(query, key, value, scale, spec=spec)

    monkeypatch.setattr(_ffi, "attention_forward", in_its_place)
    query, key, value = CASE.replace(H=h, Hv=hv).arrays()
    call = functools.partial(_kernel_call.forward, query, key, value, variant=None, spec=spec)
    for scale in (SCALE, jnp.array([0.4, -0.3], jnp.float32)):
        assert_equal(call(scale, None, None), reference.attention(query, key, value, scale, spec=spec))
    assert set(calls) == {tuple(map(_dispatch.padded_head_dim, (h, h, hv)))}


# Control flow and rematerialisation


def test_scan():
    query, key, value, scales = operands(count=V)

    def step(carry, x):
        out, residual = attend(carry, *x)
        return out, residual

    got = jax.jit(lambda: lax.scan(step, query[0], (key, value, scales)))()
    carry, residuals = query[0], []
    for x in zip(key, value, scales, strict=True):
        carry, residual = compiled(carry, *x)
        residuals.append(residual)
    assert_equal(got, (carry, jnp.stack(residuals)), 1e-5)


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (None, 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (lambda primitive, *_, **__: primitive.name == "jax_r2p_attention", 1),
    ],
    ids=["no-checkpoint", "save-nothing", "save-the-results"],
)
def test_checkpoint(policy, calls):
    """Odd sizes, and remat that must change nothing. github.com/lucidrains/flash-attention-jax/issues/7"""
    case = Case(id="", B=3, T=16, S=17, N=5, K=5, H=24, causal=True)
    args = operands(case)

    def layers(*args):
        function = functools.partial(loss, case=case)
        return (function if policy is None else jax.checkpoint(function, policy=policy))(*args)

    gradient = jax.grad(layers, ALL)
    want = jax.jit(jax.grad(functools.partial(direct_loss, case=case), ALL))(*args)
    assert_equal(jax.jit(gradient)(*args), want, 1e-5)
    assert count_primitives(jax.make_jaxpr(gradient)(*args).jaxpr) == calls


def test_zero_sizes():
    for b, t, s in ((2, 0, 7), (2, 5, 0), (0, 5, 7)):
        args = operands(CASE.replace(B=b, T=t, S=s))
        out, residual = jax.jit(attend)(*args)
        np.testing.assert_array_equal(out, np.zeros((b, t, 4, 8)))
        np.testing.assert_array_equal(residual, np.full((b, t, 4), -np.inf))
        for x, gradient in zip(args, jax.jit(jax.grad(loss, ALL))(*args), strict=True):
            np.testing.assert_array_equal(gradient, np.zeros(x.shape))


# Several devices


def mesh(kind, x=4, y=2):
    return jax.make_mesh((x, y), ("x", "y"), axis_types=(kind, kind))


COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")
SHARDED = Case(id="", B=4, T=5, S=7, N=4, K=2, H=8, window=(3, 1))


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "unchecked"])
def test_shard_map(check_vma):
    """Batch over one axis, heads over the other: nothing needs to be exchanged."""
    args = operands(SHARDED)
    both = P("x", None, "y", None)
    function = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh(AxisType.Auto),
            in_specs=(both, both, both, P()),
            out_specs=(both, P("x", None, "y")),
            check_vma=check_vma,
        )
    )
    assert_equal(function(*args), compiled(*args))
    placed = [jax.device_put(x, NamedSharding(mesh(AxisType.Auto), both)) for x in args[:3]]
    text = function.lower(*placed, args[3]).compile().as_text()
    assert not [name for name in COLLECTIVES if name in text]


@pytest.mark.parametrize("derivative", ["gradient", "jvp", "second"])
def test_derivatives_inside_shard_map(derivative):
    """Keys and scale are the same on all devices of an axis; their gradients are summed over it."""
    query, *shared = operands(SHARDED)
    key, value, scale = (x if x.ndim == 0 else x[:1] for x in shared)
    spec = (P("x", None, "y"), P(None, None, "y"), P(None, None, "y"), P())

    def local(query, key, value, scale):
        key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
        return lax.psum(loss(query, key, value, scale), ("x", "y"))

    def whole(query, key, value, scale):
        key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
        return direct_loss(query, key, value, scale)

    sharded = jax.shard_map(local, mesh=mesh(AxisType.Auto), in_specs=spec, out_specs=P())
    derive = {
        "gradient": lambda f: jax.grad(f, ALL),
        "jvp": DERIVATIVES["jvp"],
        "second": DERIVATIVES["jvp-of-grad"],
    }[derivative]
    args = (query, key, value, scale)
    assert_equal(jax.jit(derive(sharded))(*args), jax.jit(derive(whole))(*args), 2e-5)


@pytest.mark.parametrize("varying", ["query", "key", "value", "scale", "key-value"])
def test_operands_that_differ_between_devices(varying):
    """The others are the same on all: the results differ all the same, and their gradients are summed."""
    axes = tuple(0 if name in varying.split("-") else None for name in ("query", "key", "value", "scale"))
    args = [x if axis == 0 else x[0] for x, axis in zip(operands(count=2), axes, strict=True)]
    specs = tuple(P("x") if axis == 0 else P() for axis in axes)

    def one(function, *args):
        return function(*(x[0] if axis == 0 else x for x, axis in zip(args, axes, strict=True)))

    sharded = functools.partial(jax.shard_map, mesh=mesh(AxisType.Auto, 2, 1), in_specs=specs)
    total = sharded(lambda *a: lax.psum(one(loss, *a), "x"), out_specs=P())
    want = jax.vmap(direct_loss, axes)
    assert_equal(
        jax.jit(jax.grad(total, ALL))(*args), jax.jit(jax.grad(lambda *a: want(*a).sum(), ALL))(*args), 1e-5
    )

    def tangents(*args):  # along the query alone: the value may vary over more axes than all the rest
        query, *rest = args
        return jax.jvp(lambda query: attend(query, *rest), (query,), (jnp.cos(query),))

    got = jax.jit(sharded(lambda *a: jax.tree.map(lambda x: x[None], one(tangents, *a)), out_specs=P("x")))(
        *args
    )
    direct_tangents = jax.vmap(
        lambda q, *rest: jax.jvp(lambda q: direct(q, *rest), (q,), (jnp.cos(q),)), axes
    )
    assert_equal(got, jax.jit(direct_tangents)(*args), 1e-5)


def test_gradient_taken_inside_shard_map():
    """Some operands vary over fewer axes than others, the residual's tangent would over fewer still."""
    query, key, value, scale = operands(SHARDED)
    spec = P("x", None, "y", None)

    def local(query, key, value, scale):
        return jax.grad(loss, 2)(query, key, value, scale), jax.jvp(
            lambda v: attend(query, key, v, scale), (value,), (jnp.ones_like(value),)
        )[1]

    value = value[:1]  # the same value everywhere, which the local batch of one makes right
    function = jax.shard_map(
        local,
        mesh=mesh(AxisType.Auto),
        in_specs=(spec, spec, P(None, None, "y"), P()),
        out_specs=(P(None, None, "y"), (spec, P("x", None, "y"))),
    )
    gradient, (out_dot, residual_dot) = jax.jit(function)(query, key, value, scale)

    everywhere = jnp.broadcast_to(value, key.shape)
    want = jax.jit(jax.grad(direct_loss, 2))(query, key, everywhere, scale)
    assert_close(gradient, want.sum(0, keepdims=True), 1e-5, name="gradient of the value")
    assert_close(out_dot, compiled(query, key, jnp.ones_like(key), scale)[0], 1e-5, name="tangent of out")
    np.testing.assert_array_equal(residual_dot, np.zeros(residual_dot.shape))


def test_explicit_mesh():
    """Results are typed as sharded like the query, and are so."""
    args = operands(SHARDED)
    the_mesh = mesh(AxisType.Explicit)
    with jax.set_mesh(the_mesh):
        spec = NamedSharding(the_mesh, P("x", None, "y", None))
        placed = [*(jax.device_put(x, spec) for x in args[:3]), args[3]]
        types = []

        def function(*args):
            results = attend(*args)
            types.extend(map(jax.typeof, results))
            return results

        out, residual = jax.jit(function)(*placed)
        assert str(types[0].sharding.spec) == str(P("x", None, "y", None))
        assert str(types[1].sharding.spec) == str(P("x", None, "y"))
        assert out.sharding.is_equivalent_to(spec, 4)
        assert residual.sharding.is_equivalent_to(NamedSharding(the_mesh, P("x", None, "y")), 3)
        gradient = jax.jit(jax.grad(loss, ALL))(*placed)
    assert_equal((out, residual), compiled(*args))
    assert_equal(gradient, jax.jit(jax.grad(direct_loss, ALL))(*args), 1e-5)


def test_explicit_mesh_where_values_have_another_width():
    args = operands(SHARDED.replace(Hv=12))
    the_mesh = mesh(AxisType.Explicit)
    with jax.set_mesh(the_mesh):
        spec = NamedSharding(the_mesh, P("x", None, "y", None))
        placed = [*(jax.device_put(x, spec) for x in args[:3]), args[3]]
        out, residual = jax.jit(attend)(*placed)
        assert out.sharding.is_equivalent_to(spec, 4)
    assert_equal((out, residual), compiled(*args))


def test_vmap_on_an_explicit_mesh():
    """A new dimension in front of a sharded batch. Merging the two is what an explicit mesh refuses."""
    args = operands(SHARDED, count=V)
    the_mesh = mesh(AxisType.Explicit)
    with jax.set_mesh(the_mesh):
        spec = NamedSharding(the_mesh, P(None, "x", None, "y", None))
        placed = [*(jax.device_put(x, spec) for x in args[:3]), args[3][0]]
        out, residual = jax.jit(jax.vmap(attend, (0, 0, 0, None)))(*placed)
        assert out.sharding.is_equivalent_to(spec, 5)
    want = loop((0, 0, 0, None), [*args[:3], args[3][0]])
    assert_equal((out, residual), want)


def test_auto_mesh():
    args = operands(SHARDED)
    spec = NamedSharding(mesh(AxisType.Auto), P("x", None, "y", None))
    placed = [*(jax.device_put(x, spec) for x in args[:3]), args[3]]
    function = jax.jit(attend)
    assert_equal(function(*placed), compiled(*args))
    text = function.lower(*placed).compile().as_text()
    assert not [name for name in COLLECTIVES if name in text]

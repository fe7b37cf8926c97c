"""`ring_attention` on eight CPU devices, against attention of the whole sequence on one."""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close, visible
from sharded import collectives, kernel_on_cpu, plain_backward_kernel

import jax_r2p
from jax_r2p import _ring
from jax_r2p._spec import UNBOUNDED, AttentionSpec

pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARD = 16
SPLIT = P(None, "s")
# Of shards of 16: to a part of the next shard, over two and a bit, to both sides, to the right only, over
# so much on both sides that all shards are seen, and no further than a shard's own end.
WINDOWS = {
    "left": (37, 0),
    "both": (5, 9),
    "right": (0, 20),
    "wide": (40, 40),
    "all": (500, 500),
    "self": (0, 0),
}
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "zigzag": {"is_causal": True, "layout": "zigzag"},
    **{name: {"local_window_size": window} for name, window in WINDOWS.items()},
    "causal-window": {"is_causal": True, "local_window_size": (20, 5)},
}


@functools.cache
def mesh(devices):
    return jax.make_mesh((devices,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def arrays(devices, queries=SHARD, keys=SHARD, **changes):
    """query, key and value of a sequence, and a scale."""
    case = Case(id="", T=queries * devices, S=keys * devices, N=4, K=2, H=8, **changes)
    return [*case.arrays(), jnp.float32(0.4)]


def sharded(devices, *, method="ring", check_vma=True, **keywords):
    """`ring_attention` as a function of whole arrays in sequence order."""
    local = jax.shard_map(
        lambda q, k, v, scale: jax_r2p.ring_attention(
            q, k, v, axis_name="s", scale=scale, method=method, return_residual=True, **keywords
        ),
        mesh=mesh(devices),
        in_specs=(SPLIT, SPLIT, SPLIT, P()),
        out_specs=SPLIT,
        check_vma=check_vma,
    )
    if keywords.get("layout") != "zigzag":
        return local

    def reordered(query, key, value, scale):
        arrays = (jax_r2p.to_zigzag(x, devices, 1) for x in (query, key, value))
        return tuple(jax_r2p.from_zigzag(x, devices, 1) for x in local(*arrays, scale))

    return reordered


def whole(*, layout=None, **keywords):
    del layout

    def function(query, key, value, scale):
        return jax_r2p.attention(
            query, key, value, scale=scale, return_residual=True, implementation="xla", **keywords
        )

    return function


def with_gradients(function):
    """Results, and gradients of a number that depends on all of them."""

    def loss(*args):
        out, residual = results = function(*args)
        seen = jnp.isfinite(residual)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(
            jnp.where(seen, jnp.cos(residual), 0)
        ), results

    return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))


def check(got, want, tolerance=3e-6):
    """The gradient of scale is a sum over everything, so its own size says little about its rounding."""
    for i, (x, y) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert x.dtype == y.dtype
        size = max(1.0, float(np.max(np.abs(np.nan_to_num(np.float32(y), neginf=0)))))
        assert_close(
            np.float32(x), np.float32(y), tolerance * size * (20 if x.ndim == 0 else 1), name=f"result {i}"
        )


@functools.cache
def expected(devices, name):
    mask = {key: value for key, value in MASKS[name].items() if key != "layout"}
    return (
        with_gradients(whole(**mask))(*arrays(devices)) if name != "zigzag" else expected(devices, "causal")
    )


# Values and gradients


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(("ring", name) for name in MASKS),
        *(("all_gather", name) for name in MASKS if name not in ("right", "wide", "all", "self")),
    ],
)
def test_equals_attention_of_the_whole_sequence(method, name):
    check(with_gradients(sharded(4, method=method, **MASKS[name]))(*arrays(4)), expected(4, name))


@pytest.mark.parametrize(
    ("devices", "name"),
    [(1, "none"), (1, "zigzag"), (2, "none"), (2, "zigzag"), (8, "causal"), (8, "zigzag"), (8, "both")],
)
def test_number_of_devices(devices, name):
    check(with_gradients(sharded(devices, **MASKS[name]))(*arrays(devices)), expected(devices, name))


def test_bfloat16():
    """Of what each hop rounds, a weighted mean remains: no more than one rounding. Gradients are sums."""
    args = arrays(4, dtype="bfloat16")
    exact = [x.astype(jnp.float32) for x in args]
    want = with_gradients(whole(is_causal=True))(*exact)
    got = with_gradients(sharded(4, **MASKS["zigzag"]))(*args)
    types = jax.tree.map(lambda x: x.dtype, got)
    assert types == ((*[jnp.bfloat16] * 3, jnp.float32), (jnp.bfloat16, jnp.float32))
    check(jax.tree.map(jnp.float32, got), want, 2**-7)


def test_plain_xla():
    """Which binds no primitive; and the ring that does, in both trips."""
    args = arrays(4)
    plain = with_gradients(sharded(4, implementation="xla", **MASKS["zigzag"]))
    check(plain(*args), expected(4, "zigzag"))
    counts = [
        len(re.findall(rf" = {name}\[", str(jax.make_jaxpr(f)(*args))))
        for f in (plain, with_gradients(sharded(4, **MASKS["zigzag"])))
        for name in ("jax_r2p_attention", "jax_r2p_attention_backward", "jax_r2p_attention_tangent")
    ]
    # At the first hop, in the loop and at the last one, where one of two tiles is computed.
    assert counts == [0, 0, 0, 5, 5, 0]


@pytest.mark.parametrize("name", ["none", "causal", "zigzag", "both"])
def test_kernels_run_twice_only_for_the_gradient_of_scale(name, monkeypatch):
    """The ring always asks for it, and XLA leaves out what is for it alone where nothing reads it."""
    calls = []

    def marked(*operands, **keywords):
        dquery, *rest = plain_backward_kernel(*operands, **keywords)
        calls.append(dquery.shape)
        # Every other call is for the gradient of scale. Nothing else in the program takes a tangent.
        return dquery if len(calls) % 2 else lax.tan(dquery), *rest

    def tangents(argnums):
        def function(*args):
            return jnp.sum(sharded(4, **MASKS[name])(*args)[0].astype(jnp.float32))

        lowered = jax.jit(jax.grad(function, argnums)).lower(*arrays(4, dtype="bfloat16"))
        assert "stablehlo.tan" in lowered.as_text()
        return lowered.compile().as_text().count(" tan(")

    monkeypatch.setattr("sharded.plain_backward_kernel", marked)
    with kernel_on_cpu():
        assert tangents((0, 1, 2)) == 0
        assert tangents(3) > 0


def test_what_is_hidden_does_not_matter():
    """NaN in the last key and value, which only the last query sees."""
    query, key, value, scale = arrays(4)
    key, value = key.at[:, -1].set(jnp.nan), value.at[:, -1].set(jnp.inf)
    (dquery, *_), (out, residual) = with_gradients(sharded(4, **MASKS["causal"]))(query, key, value, scale)
    want = expected(4, "causal")
    for got, exact in ((dquery, want[0][0]), (out, want[1][0]), (residual, want[1][1])):
        check(got[:, :-1], exact[:, :-1])
    assert not np.isfinite(out[:, -1]).any()


def test_without_check_vma():
    got = with_gradients(sharded(4, check_vma=False, **MASKS["causal"]))(*arrays(4))
    check(got, expected(4, "causal"))


def test_other_lengths_and_widths():
    """Without a mask, and with one by gathering; values wider than keys."""
    args = arrays(4, queries=8, keys=12, Hv=20)
    check(jax.jit(sharded(4))(*args), jax.jit(whole())(*args))
    causal, window, wide = {"is_causal": True}, *({"local_window_size": x} for x in ((9, 7), (99, 99)))
    for queries, keys, mask in ((8, 12, causal), (8, 12, window), (12, 8, wide)):
        args = arrays(4, queries, keys)
        got = jax.jit(sharded(4, method="all_gather", **mask))(*args)
        check(got, jax.jit(whole(**mask))(*args))


def test_empty():
    args = arrays(2, queries=0, keys=0)
    for name in ("none", "causal", "zigzag", "both"):
        out, residual = jax.jit(sharded(2, **MASKS[name]))(*args)
        assert (out.shape, residual.shape) == ((2, 0, 4, 8), (2, 0, 4))
    args = arrays(2, queries=3, keys=0)
    out, residual = jax.jit(sharded(2))(*args)
    np.testing.assert_array_equal(out, np.zeros((2, 6, 4, 8)))
    np.testing.assert_array_equal(residual, np.full((2, 6, 4), -np.inf))


def test_rows_that_see_nothing_so_far():
    """Parts of a row that have seen no key, both or one of them, merge without NaN."""
    empty = jnp.zeros((1, 2, 3, 4)), jnp.full((1, 3, 2), -jnp.inf)
    some = jnp.ones((1, 2, 3, 4)), jnp.full((1, 3, 2), -900.0)
    for one, other, want in ((empty, empty, empty), (empty, some, some), (some, empty, some)):
        for x, y in zip(_ring._merge(one, other, (0, 2)), want, strict=True):
            np.testing.assert_array_equal(x, y)


def test_beside_other_axes():
    """Batch and heads over axes of their own, `scale` the same on all; the gradient taken inside."""
    args = arrays(2)
    many = jax.make_mesh((2, 2, 2), ("b", "s", "h"), axis_types=(AxisType.Auto,) * 3)
    spec = P("b", "s", "h")

    def local(query, key, value, scale):
        def loss(*args):
            return lax.psum(
                jnp.sum(
                    jnp.sin(jax_r2p.ring_attention(*args[:3], axis_name="s", scale=args[3], is_causal=True))
                ),
                ("b", "s", "h"),
            )

        return jax.grad(loss, (0, 1, 2, 3))(query, key, value, scale)

    got = jax.jit(
        jax.shard_map(local, mesh=many, in_specs=(spec, spec, spec, P()), out_specs=(spec, spec, spec, P()))
    )(*args)
    want = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(whole(is_causal=True)(*args)[0])), (0, 1, 2, 3)))(
        *args
    )
    check(got, want)


def test_axis_of_two_names():
    args = arrays(4)
    both = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = P(None, ("a", "b"))
    function = jax.shard_map(
        functools.partial(
            jax_r2p.ring_attention, axis_name=("a", "b"), is_causal=True, return_residual=True, scale=0.4
        ),
        mesh=both,
        in_specs=(spec,) * 3,
        out_specs=spec,
    )
    check(jax.jit(function)(*args[:3]), expected(4, "causal")[1])


def test_under_scan_checkpoint_and_vmap():
    """As layers of a model have it."""
    args = arrays(2)
    several = [jnp.stack([x, x[::-1]]) for x in args[:3]]
    mapped = jax.vmap(sharded(2, is_causal=True), (0, 0, 0, None))
    check(
        jax.jit(mapped)(*several, args[3]),
        jax.jit(jax.vmap(whole(is_causal=True), (0, 0, 0, None)))(*several, args[3]),
    )

    def layers(attend, query, key, value, scale):
        @jax.checkpoint
        def layer(x, _):
            return attend(x, key, value, scale)[0], None

        return jnp.sum(jnp.sin(lax.scan(layer, query, length=2)[0]))

    got, want = (
        jax.jit(jax.grad(functools.partial(layers, f(is_causal=True)), (0, 1, 2, 3)))(*args)
        for f in (functools.partial(sharded, 2), whole)
    )
    check(got, want)


def test_forward_mode_by_gathering():
    args = arrays(2)
    moving = [jnp.cos(x) for x in args]
    got, want = (
        jax.jit(lambda f=f: jax.jvp(f, args, moving))()
        for f in (sharded(2, method="all_gather", is_causal=True), whole(is_causal=True))
    )
    check(got, want, 1e-5)


def _under(transform):
    """Values of what `transform` makes of the ring, as a function of whole arrays; outside of jit."""
    return lambda *args: transform(lambda *args: jnp.sum(sharded(2)(*args)[0]))(*args)


def _inside(*args):
    """Forward mode within the shard_map."""

    def local(*args):
        return jax.jvp(functools.partial(jax_r2p.ring_attention, axis_name="s"), args, args)[1]

    return jax.shard_map(local, mesh=mesh(2), in_specs=(SPLIT,) * 3, out_specs=SPLIT)(*args[:3])


@pytest.mark.parametrize(
    ("message", "function"),
    [
        *((r"method='all_gather' has", f) for f in (_under(jax.jacfwd), _under(jax.hessian), _inside)),
        (r"method='all_gather' has", lambda *args: jax.jvp(_under(lambda f: f), args, args)),
        (r"forward-mode", _under(lambda f: jax.jacfwd(jax.jit(f)))),  # JAX's own
    ],
    ids=["jacfwd", "hessian", "inside", "jvp", "inner jit"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_forward_mode_of_the_ring_is_refused(message, function, jit):
    with pytest.raises(TypeError, match=message):
        (jax.jit(function) if jit else function)(*arrays(2))


def test_reverse_mode_outside_of_jit():
    """Of calls that the refusal of forward mode must not meet."""
    args = arrays(2)
    want = jax.grad(lambda *args: jnp.sum(jnp.sin(whole()(*args)[0])), (0, 1, 2, 3))(*args)

    def loss(*args):
        return jnp.sum(jnp.sin(sharded(2)(*args)[0]))

    check(jax.grad(loss, (0, 1, 2, 3))(*args), want)
    check(jax.vjp(loss, *args)[1](jnp.float32(1)), want)
    check(jax.grad(jax.checkpoint(loss), (0, 1, 2, 3))(*args), want)


@pytest.mark.parametrize("name", ["causal", "zigzag"])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_beside_an_explicit_axis(method, name):
    """The gradient inside a shard_map that is manual over the sequence alone, and around it."""
    args = arrays(2)[:3]
    explicit = jax.make_mesh((2, 2), ("b", "s"), axis_types=(AxisType.Explicit,) * 2)
    attend = functools.partial(jax_r2p.ring_attention, axis_name="s", method=method, scale=0.4, **MASKS[name])
    want = jax.grad(_loss(whole(**MASKS[name])), (0, 1, 2))(*args, 0.4)
    if name == "zigzag":
        args, want = ([jax_r2p.to_zigzag(x, 2, 1) for x in arrays] for arrays in (args, want))
    with jax.set_mesh(explicit):
        placed = [jax.device_put(x, NamedSharding(explicit, P("b", "s"))) for x in args]
        over_s = functools.partial(jax.shard_map, in_specs=(SPLIT,) * 3, axis_names={"s"})
        inside = over_s(jax.grad(_loss(attend), (0, 1, 2)), out_specs=(SPLIT,) * 3)
        around = jax.grad(_loss(over_s(attend, out_specs=SPLIT)), (0, 1, 2))
        # jax 0.8.2 takes no gradient around a shard_map that is manual over some axes of an explicit mesh.
        for function in (inside, around) if jax.__version_info__ >= (0, 10) else (inside,):
            got = jax.jit(function)(*placed)
            assert all(x.sharding.spec[0] == "b" for x in got)
            check(jax.device_get(got), want)


def _loss(function):
    return lambda *args: jnp.sum(jnp.sin(jax.tree.leaves(function(*args))[0]))


# What travels, what is computed, what memory it takes


def program(devices, function, shard=SHARD):
    args = arrays(devices, shard, shard)
    placed = [jax.device_put(x, NamedSharding(mesh(devices), SPLIT)) for x in args[:3]]
    return jax.jit(function).lower(*placed, args[3]).compile()


@pytest.mark.parametrize(
    ("devices", "name", "hops"),
    [
        (4, "left", 3),  # ceil(37 / 16)
        (8, "left", 3),
        (8, "both", 2),  # one in either direction
        (8, "right", 2),
        (8, "self", 0),
        (4, "wide", 3),  # once around
    ],
)
def test_windows_fetch_the_shards_they_see(devices, name, hops):
    text = program(devices, sharded(devices, **MASKS[name])).as_text()
    assert collectives(text) == ({"collective-permute": 2 * hops} if hops else {})


@pytest.mark.parametrize("name", ["none", "causal"])
def test_nothing_is_gathered(name):
    """Key and value leave for the next device at the first hop, and in the loop over the other ones. In the
    gradient's trip their gradients follow in the loop and at the last hop, and then go home.
    """
    function = sharded(8, **MASKS[name])
    assert collectives(program(8, function).as_text()) == {"collective-permute": 2 * 2}
    gradient = jax.grad(lambda *args: jnp.sum(function(*args)[0]), (0, 1, 2))
    trips = 2 * 2, 2 * 2 + 2 * 3
    jaxpr = str(jax.make_jaxpr(gradient)(*arrays(8)))
    assert (jaxpr.count(" ppermute["), jaxpr.count(" optimization_barrier")) == (sum(trips), 1)
    # XLA for CPU drops the barrier between the two trips, and finds that they begin with the same transfer.
    counts = collectives(program(8, gradient).as_text())
    assert set(counts) == {"collective-permute"}
    assert sum(trips) - 2 <= counts["collective-permute"] <= sum(trips)


@pytest.mark.parametrize(("name", "sizes"), [("none", (4, 8)), ("causal", (2, 4, 8)), ("zigzag", (2, 8))])
def test_memory_and_program_do_not_grow_with_the_ring(name, sizes):
    """Scratch memory of a device for shards of one length, in both trips. (Of two devices without a mask, XLA
    for CPU runs both hops at once, which takes the scores of both.)
    """

    def local(*args):
        return jnp.sum(jnp.sin(jax_r2p.ring_attention(*args, axis_name="s", **MASKS[name])))

    memory, lines = {}, {}
    for devices in sizes:
        gradient = jax.shard_map(
            jax.grad(local, (0, 1, 2)), mesh=mesh(devices), in_specs=(SPLIT,) * 3, out_specs=SPLIT
        )
        compiled = program(devices, lambda q, k, v, scale, f=gradient: f(q, k, v), shard=64)
        memory[devices] = compiled.memory_analysis().temp_size_in_bytes
        lines[devices] = compiled.as_text().count("\n")
    assert max(memory.values()) < 1.1 * min(memory.values()), memory
    assert lines[8] <= 1.01 * lines.get(4, lines[8]), lines


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("none", lambda i: 4.0),
        ("causal", lambda i: 1.0 + i),  # the own shard, and those before
        ("zigzag", lambda i: 1.0 + 3 / 2),
        ("right", lambda i: [1 + 1 + 4**2 / 16**2, 2.0, 1.0][max(0, i - 1)]),
    ],
)
def test_work_of_each_device(monkeypatch, name, work):
    """Tiles that are computed, in shards times shards; what no query sees is not computed."""
    done = np.zeros(4)

    def count(device, size):
        done[device] += size / SHARD**2

    def counted(self, query, key, *rest):
        jax.debug.callback(count, lax.axis_index("s"), query.shape[-3] * key.shape[-3])
        return forward(self, query, key, *rest)

    forward = _ring._Backend.forward
    monkeypatch.setattr(_ring._Backend, "forward", counted)
    jax.block_until_ready(jax.jit(sharded(4, **MASKS[name]))(*arrays(4)))
    jax.effects_barrier()
    np.testing.assert_allclose(done, [work(i) for i in range(4)])


@pytest.mark.parametrize(
    ("keywords", "kernels"),
    [
        ({}, [("none", None, None)] * 3),  # the first hop, the loop, the last hop
        (MASKS["causal"], [("causal", None, 0), ("none", None, None), ("none", None, None)]),
        (MASKS["zigzag"], [("causal", None, 0), *[("none", None, None)] * 4]),
        # Shards of 128 positions: at the second hop all but 72 keys before the own, at the third a triangle.
        (
            {"local_window_size": (200, 0)},
            [("causal", None, 0), ("window", 72, None), ("window", 0, None)],
        ),
        ({"method": "all_gather", **MASKS["causal"]}, [("causal", None, 0)]),
    ],
    ids=["none", "causal", "zigzag", "window", "all_gather"],
)
def test_kernels_in_a_program_for_cuda(keywords, kernels):
    function = sharded(4, implementation="r2p", **keywords)
    query, key = (jax.ShapeDtypeStruct((2, 512, n, 64), jnp.bfloat16) for n in (4, 2))
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    text = jax.jit(function).trace(query, key, key, scale).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'variant = "fwd_bf16_d64_(\w+)", window_left = (\d+).*?window_right = (\d+)', text)
    got = [(mask, *(None if int(x) == UNBOUNDED else int(x) for x in ends)) for mask, *ends in found]
    assert sorted(got, key=str) == sorted(kernels, key=str)


# Plans


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_plans_are_the_mask(size, length):
    """Every tile of every plan, put in its place: each visible pair once, and nothing else."""
    windows = [(None, None), (None, 0), *((a, b) for a in (0, 1, 5, 6, 7, 13, 99) for b in (0, 1, 6, 8, 99))]
    calls = [(AttentionSpec(left=a, right=b), "contiguous") for a, b in windows]
    calls += [(AttentionSpec(right=0), "zigzag")] * (length % 2 == 0)
    for spec, layout in calls:
        total = size * length
        order = _order(layout, total, size)
        seen = np.zeros((total, total), int)
        for chain in _ring._plan(spec, layout, length, length, size):
            assert [n for start, stop in chain.runs() for n in range(start, stop)] == list(
                range(chain.first, chain.last + 1)
            )
            for device in range(size):
                for number, hop in enumerate(chain.hops, chain.first):
                    origin = device - chain.direction * number
                    tile = hop.near if 0 <= origin < size else hop.wrapped
                    if tile is not None:
                        rows = order[device * length :][slice(*tile.rows)]
                        columns = order[origin % size * length :][slice(*tile.columns)]
                        mask = visible(len(rows), len(columns), tile.spec.left, tile.spec.right)
                        seen[np.ix_(rows, columns)] += mask
        np.testing.assert_array_equal(seen, visible(total, total, spec.left, spec.right), str(spec))


def _order(layout, length, devices):
    return jax_r2p.zigzag_order(length, devices) if layout == "zigzag" else np.arange(length)


def test_runs_of_hops():
    """The first and the last alone, as one has nothing to wait for and the other nothing to send."""

    def runs(size, spec=AttentionSpec()):  # noqa: B008
        return [list(chain.runs()) for chain in _ring._plan(spec, "contiguous", 4, 4, size)]

    assert runs(1) == [[(0, 1)]]
    assert runs(2) == [[(0, 1), (1, 2)]]
    assert runs(3) == [[(0, 1), (1, 2), (2, 3)]]
    assert runs(8) == [[(0, 1), (1, 7), (7, 8)]]
    assert runs(8, AttentionSpec(left=9, right=5)) == [[(0, 1), (1, 2), (2, 3), (3, 4)], [(1, 2), (2, 3)]]


# The zigzag layout


def test_zigzag_order():
    np.testing.assert_array_equal(jax_r2p.zigzag_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(jax_r2p.zigzag_order(6, 3), [0, 5, 1, 4, 2, 3])
    np.testing.assert_array_equal(jax_r2p.zigzag_order(4, 1), np.arange(4))


def test_to_and_from_zigzag():
    x = np.arange(48).reshape(2, 24)
    there = jax_r2p.to_zigzag(x, 4, axis=1)
    assert isinstance(there, np.ndarray)
    np.testing.assert_array_equal(there, x[:, jax_r2p.zigzag_order(24, 4)])
    np.testing.assert_array_equal(jax_r2p.from_zigzag(there, 4, axis=1), x)
    on_device = jax.jit(lambda x: jax_r2p.to_zigzag(x, 4, axis=-1))(jnp.asarray(x))
    np.testing.assert_array_equal(on_device, there)


@pytest.mark.parametrize(
    ("length", "devices", "match"),
    [(12, 4, r"length=12 must be a multiple of 2 \* devices = 8"), (8, 0, "devices=0 must be at least 1")],
)
def test_zigzag_of_a_wrong_length(length, devices, match):
    for call in (
        lambda: jax_r2p.zigzag_order(length, devices),
        lambda: jax_r2p.to_zigzag(np.zeros(length), devices, 0),
        lambda: jax_r2p.from_zigzag(np.zeros(length), devices, 0),
    ):
        with pytest.raises(ValueError, match=match):
            call()


# Wrong calls


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"layout": "striped"}, ValueError, "layout must be one of .*zigzag.*, got 'striped'"),
        ({"method": None}, ValueError, "method must be one of .*all_gather.*, got None"),
        ({"layout": "zigzag"}, ValueError, "layout='zigzag' is for is_causal=True"),
        (
            {"layout": "zigzag", "is_causal": True, "local_window_size": 3},
            NotImplementedError,
            "layout='zigzag' takes no local_window_size",
        ),
        ({"layout": "zigzag", "local_window_size": 3}, NotImplementedError, "takes no local_window_size"),
        ({"axis_name": "t"}, ValueError, "axis_name must be an axis of a mesh, .* got 't'"),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool"),
        ({"implementation": "cudnn"}, ValueError, "implementation must be one of"),
        ({"implementation": "r2p"}, NotImplementedError, "float32"),
    ],
)
def test_wrong_arguments(keywords, error, match):
    def local(query, key, value):
        return jax_r2p.ring_attention(query, key, value, **({"axis_name": "s"} | keywords))

    function = jax.shard_map(local, mesh=mesh(2), in_specs=(SPLIT,) * 3, out_specs=SPLIT)
    with pytest.raises(error, match=match):
        jax.eval_shape(function, *arrays(2)[:3])


@pytest.mark.parametrize(
    ("queries", "keys", "keywords", "error", "match"),
    [
        (5, 5, MASKS["zigzag"], ValueError, "two equal parts, got an odd length, 5"),
        (4, 6, MASKS["zigzag"], ValueError, "got 4 queries and 6 keys"),
        (
            4,
            6,
            MASKS["causal"],
            NotImplementedError,
            "got 4 queries and 6 keys; method='all_gather' takes them",
        ),
    ],
)
def test_wrong_shards(queries, keys, keywords, error, match):
    function = jax.shard_map(
        functools.partial(jax_r2p.ring_attention, axis_name="s", **keywords),
        mesh=mesh(1),
        in_specs=(SPLIT,) * 3,
        out_specs=SPLIT,
    )
    with pytest.raises(error, match=match):
        jax.eval_shape(function, *arrays(1, queries, keys)[:3])


def test_outside_of_shard_map():
    with pytest.raises(ValueError, match=r"inside a jax\.shard_map over it; got 's'"):
        jax_r2p.ring_attention(*arrays(1)[:3], axis_name="s")


# What is written about it


def test_code_of_the_page():
    """docs/context-parallel.md: what its code prints is what its comments say."""
    text = (ROOT / "docs" / "context-parallel.md").read_text("utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    printed: list[str] = []
    exec(code, {"print": lambda *args: printed.append(" ".join(map(str, args)))})  # noqa: S102
    assert printed
    assert printed == re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


def test_two_processes(tmp_path):
    """examples/two_processes.py: each finds its shards to be those of one device."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "two_processes.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("process"))
    assert said == [f"process {i}: 2 of 4 shards as on one device" for i in range(2)]

"""Plain `jit` over arrays that are sharded: results, where they lie, and what devices send each other.

A plain function takes the kernel's place; see `sharded`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import collectives, kernel_on_cpu

import jax_r2p
from jax_r2p import _ffi, _sharding

ROOT = pathlib.Path(__file__).parent.parent
# Sizes that eight devices divide; T and S differ, and heads of 8 elements are the smallest without a copy.
B, T, S, N, H = 8, 16, 24, 8, 8
NAMES = ("query_seq_lengths", "key_value_seq_lengths")


@pytest.fixture(autouse=True)
def calls():
    """Shapes of the query in the calls of the kernel."""
    with kernel_on_cpu() as seen:
        yield seen


def attend(query, key, value, *lengths, implementation="r2p", **keywords):
    keywords = {"local_window_size": (9, 2), "return_residual": True} | keywords
    keywords |= dict(zip(NAMES, lengths, strict=False))
    # Which kernels there are does not depend on the platform; so "r2p" is allowed on CPU here.
    return jax_r2p.attention(query, key, value, implementation=implementation, **keywords)


direct = functools.partial(attend, implementation="xla")


@functools.cache
def arrays(kv_heads=2, lengths=0, heads=N):
    rng = np.random.default_rng(0)
    q, *kv = (
        np.float16(rng.standard_normal((B, *shape, H)))
        for shape in ((T, heads), (S, kv_heads), (S, kv_heads))
    )
    some = [np.int32(rng.integers(-1, size + 2, B)) for size in (T, S)]
    return (q, *kv, *some[:lengths])


@functools.cache
def expected(kv_heads=2, lengths=0, heads=N):
    return jax.jit(lambda *args: direct(*args))(*arrays(kv_heads, lengths, heads))


def close(got, want, error=2e-3):
    """Results that were rounded to float16 once, and maybe differently."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), error, error)


MESHES = {
    "auto": (AxisType.Auto, False),
    "set_mesh": (AxisType.Auto, True),
    "explicit": (AxisType.Explicit, True),
}


@pytest.fixture(params=MESHES)
def kind(request):
    return request.param


# For what takes long: whether an automatic mesh is set hardly matters.
BOTH_TYPES = pytest.mark.parametrize("kind", ["auto", "explicit"])


@contextlib.contextmanager
def on_mesh(kind, shape=(2, 4)):
    axis_type, is_set = MESHES[kind]
    names = ("x", "y")[: len(shape)]
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape), devices=devices)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        yield mesh


def place(mesh, args, spec, kv_spec=None):
    """Puts query, key, value and lengths onto the mesh."""
    kv_spec = spec if kv_spec is None else kv_spec
    batch = P(spec[0] if len(spec) else None)
    specs = [spec, kv_spec, kv_spec, *[batch] * (len(args) - 3)]
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]


def compile_and_run(function, *args):
    compiled = jax.jit(lambda *args: function(*args)).lower(*args).compile()
    text = compiled.as_text()
    assert not any(target in text for target in (_sharding.TARGET, _sharding.BACKWARD_TARGET))
    return compiled(*args), collectives(text)


def lies(x, mesh, *spec):
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), x.ndim), x.sharding


# Mesh, sharding of the query, that of key and value, K, how many lengths, and the shard that the kernel sees.
BOTH = P("x", None, "y")
HEADS = P(None, None, "y")
KEPT = {
    "batch": ((8,), P("x"), P("x"), 2, 0, (1, T, N, H)),
    "batch, lengths": ((8,), P("x"), P("x"), 2, 2, (1, T, N, H)),
    "heads, K = N": ((8,), P(None, None, "x"), P(None, None, "x"), N, 1, (B, T, 1, H)),
    "heads, K = 1": ((8,), P(None, None, "x"), P(), 1, 0, (B, T, 1, H)),
    "both, K = 4": ((2, 4), BOTH, BOTH, 4, 0, (4, T, 2, H)),
    "both, K = 2": ((2, 4), BOTH, P("x"), 2, 2, (4, T, 2, H)),
    "both, K = 1": ((2, 4), BOTH, P("x"), 1, 1, (4, T, 2, H)),
    "both swapped": ((2, 4), P("y", None, "x"), P("y", None, "x"), 2, 0, (2, T, 4, H)),
    "heads over one of two axes, K = 2": ((2, 4), HEADS, P(), 2, 0, (B, T, 2, H)),
    "batch over both axes": ((2, 4), P(("y", "x")), P(("y", "x")), 2, 1, (1, T, N, H)),
    "heads over both axes, K = 2": (
        (2, 4),
        P(None, None, ("x", "y")),
        P(None, None, "x"),
        2,
        0,
        (B, T, 1, H),
    ),
    "heads over both axes, K = 4": ((2, 4), P(None, None, ("x", "y")), P(), 4, 0, (B, T, 1, H)),
    "whole": ((2, 4), P(), P(), 2, 1, (B, T, N, H)),
}


@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT)
def test_nothing_is_sent(kind, case, calls):
    shape, spec, kv_spec, kv_heads, lengths, shard = case
    with on_mesh(kind, shape) as mesh:
        args = place(mesh, arrays(kv_heads, lengths), spec, kv_spec)
        (out, residual), sent = compile_and_run(attend, *args)
    assert calls == [shard]
    assert sent == {}
    lies(out, mesh, *spec)
    lies(residual, mesh, *spec)
    close((out, residual), expected(kv_heads, lengths))


# The last two: which collectives there may be, and whether results stay as the query was.
GATHERED = {
    "T": (P("x", "y"), P("x"), N, 2, (4, T, N, H), {"all-gather": 1}),
    "S": (P("x"), P("x", "y"), N, 2, (4, T, N, H), {"all-gather": 2}),
    "H": (P("x", None, None, "y"), P("x", None, None, "y"), N, 2, (4, T, N, H), {"all-gather": 3}),
    "6 key heads for 4 devices": (BOTH, P("x"), 12, 6, (4, T, 12, H), {"all-gather": 1}),
}


@BOTH_TYPES
@pytest.mark.parametrize("case", GATHERED.values(), ids=GATHERED)
def test_what_is_gathered(kind, case, calls):
    """One all-gather for each array that the kernel needs whole, and right results."""
    spec, kv_spec, heads, kv_heads, shard, most = case
    with on_mesh(kind) as mesh:
        args = place(mesh, arrays(kv_heads, 2, heads), spec, kv_spec)
        got, sent = compile_and_run(attend, *args)
    assert calls == [shard]
    # XLA may gather the results too, if it was not told where they shall lie.
    assert set(sent) == set(most)
    assert sent["all-gather"] in range(most["all-gather"], most["all-gather"] + 3)
    close(got, expected(kv_heads, 2, heads))


def test_without_it_the_kernel_gets_whole_arrays(monkeypatch, calls):
    """So the table above tests something."""
    monkeypatch.setattr(_sharding, "is_split", lambda ctx: False)
    with on_mesh("auto") as mesh:
        got, _ = compile_and_run(attend, *place(mesh, arrays(), BOTH, P("x")))
    assert calls == [(B, T, N, H)]
    close(got, expected())


@pytest.mark.parametrize("size", [6, 3], ids=["batch", "fewer than devices"])
def test_uneven_batch(size, calls):
    """What lies in the middle of a program need not be divided evenly; devices then compute some padding."""
    args = [x[:size] for x in arrays(2, 2)]
    with on_mesh("auto") as mesh:
        split = NamedSharding(mesh, P("y"))
        got, _ = compile_and_run(
            lambda q, *rest: attend(lax.with_sharding_constraint(q, split), *rest), *args
        )
    assert calls == [(-(-size // 4), T, N, H)]
    close(got, [x[:size] for x in expected(2, 2)])


def test_query_decides(calls):
    """Keys that are split otherwise are moved, and results lie like the query."""
    with on_mesh("auto") as mesh:
        args = place(mesh, arrays(8), P("x"), P(None, None, "y"))
        (out, residual), sent = compile_and_run(attend, *args)
    assert set(sent) <= {"all-gather", "all-to-all", "collective-permute"}
    close((out, residual), expected(8))


@BOTH_TYPES
@pytest.mark.parametrize("shared", [False, True], ids=["all", "shared keys"])
@pytest.mark.parametrize("mapped", [None, "x"], ids=["new dimension whole", "new dimension split"])
def test_vmap(kind, shared, mapped, calls):
    inner = BOTH if mapped is None else HEADS
    axes = (0, None, None, 0) if shared else (0, 0, 0, 0)
    args = arrays(4, 1)
    stack = [x if axis is None else np.stack([x, x[::-1]]) for x, axis in zip(args, axes, strict=True)]
    with on_mesh(kind) as mesh:
        specs = [inner, inner, inner, P(inner[0])]
        specs = [s if axis is None else P(mapped, *s) for s, axis in zip(specs, axes, strict=True)]
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(stack, specs, strict=True)]
        name = {"spmd_axis_name": "x"} if mapped and kind != "explicit" else {}
        got, sent = compile_and_run(jax.vmap(attend, axes, **name), *placed)
    # Folded on each device: two halves of the batch, or one index of the new dimension and all of it.
    assert calls == [(8, T, 2, H)]
    assert sent == {}
    lies(got[0], mesh, mapped, *inner)
    one = jax.vmap(lambda *a: direct(*a), axes)
    close(got, jax.jit(one)(*stack))


@BOTH_TYPES
def test_vmap_over_scale(kind, calls):
    """A loop on each device."""
    scales = np.float32([0.2, -0.7])
    with on_mesh(kind) as mesh:
        args = place(mesh, arrays(4), BOTH)
        function = jax.vmap(lambda s, *args: attend(*args, scale=s), (0, None, None, None))
        got, sent = compile_and_run(function, scales, *args)
    assert set(calls) == {(4, T, 2, H)}
    assert sent == {}
    close(got, jax.vmap(lambda s: direct(*arrays(4), scale=s))(scales))


@BOTH_TYPES
def test_scan(kind, calls):
    def layers(query, *rest):
        return lax.scan(lambda x, _: (attend(x, *rest)[0], None), query, length=3)[0]

    def direct_layers(query, *rest):
        return lax.scan(lambda x, _: (direct(x, *rest)[0], None), query, length=3)[0]

    with on_mesh(kind) as mesh:
        out, sent = compile_and_run(layers, *place(mesh, arrays(2, 2), BOTH, P("x")))
    assert calls == [(4, T, 2, H)]
    assert sent == {}
    lies(out, mesh, *BOTH)
    close(out, jax.jit(direct_layers)(*arrays(2, 2)))


def gradient(implementation):
    def function(query, key, value):
        both = functools.partial(
            attend, implementation=implementation, is_causal=True, local_window_size=None
        )
        (out, residual), back = jax.vjp(both, query, key, value)
        return back((jnp.cos(out), jnp.sin(residual)))  # each element has a weight of its own

    return function


# Mesh, sharding of the query, that of key and value, K, what may be sent, and the shard that the backward
# kernel sees. Devices that have copies of a key head add up what each makes of it.
HEADS_ALL = P(None, None, "x")
GRADIENTS = {
    "batch": ((8,), P("x"), P("x"), 2, {}, (1, T, N, H)),
    "heads, K = N": ((8,), HEADS_ALL, HEADS_ALL, N, {}, (B, T, 1, H)),
    "heads, K = 4": ((4,), HEADS_ALL, HEADS_ALL, 4, {}, (B, T, 2, H)),
    "heads, K = 2": ((2,), HEADS_ALL, HEADS_ALL, 2, {}, (B, T, 4, H)),
    "heads, K = 1": ((8,), HEADS_ALL, P(), 1, {"all-reduce"}, (B, T, 1, H)),
    "both, K = 4": ((2, 4), BOTH, BOTH, 4, {}, (4, T, 2, H)),
    "both, K = 1": ((2, 4), BOTH, P("x"), 1, {"all-reduce"}, (4, T, 2, H)),
    "both swapped, K = 2": ((2, 4), P("y", None, "x"), P("y", None, "x"), 2, {}, (2, T, 4, H)),
    "heads over both axes, K = 2": (
        (2, 4),
        P(None, None, ("x", "y")),
        P(None, None, "x"),
        2,
        {"all-reduce"},
        (B, T, 1, H),
    ),
    "heads over both axes the other way, K = 4": (
        (2, 4),
        P(None, None, ("y", "x")),
        P(None, None, "y"),
        4,
        {"all-reduce"},
        (B, T, 1, H),
    ),
    # XLA's own: gradients that lie on all devices are gathered from halves.
    "both, K = 2": ((2, 4), BOTH, P("x"), 2, {"all-gather", "all-reduce"}, (4, T, 2, H)),
}


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_gradient(kind, case, calls):
    shape, spec, kv_spec, kv_heads, allowed, shard = case
    with on_mesh(kind, shape) as mesh:
        args = place(mesh, arrays(kv_heads), spec, kv_spec)
        got, sent = compile_and_run(gradient("r2p"), *args)
    assert (calls, calls.backward) == ([shard], [shard])
    assert set(sent) <= set(allowed)
    lies(got[0], mesh, *spec)
    close(got, expected_gradient(kv_heads), 4e-3)


@functools.cache
def expected_gradient(kv_heads):
    return jax.jit(gradient("xla"))(*arrays(kv_heads))


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("argument", range(3), ids=["query", "key", "value"])
def test_gradient_of_one_argument(argument, kv_heads, calls):
    def gradients(attention):
        return jax.grad(lambda *args: jnp.cos(attention(*args)[0]).sum(), argument)

    with on_mesh("auto") as mesh:
        args = place(mesh, arrays(kv_heads), BOTH, BOTH if kv_heads == 4 else P("x"))
        got, sent = compile_and_run(gradients(attend), *args)
    assert calls.backward == [(4, T, 2, H)]
    assert set(sent) <= ({"all-reduce"} if kv_heads == 1 and argument else set())
    close(got, jax.jit(gradients(direct))(*arrays(kv_heads)), 4e-3)


def test_what_is_around_the_backward_kernel(calls, monkeypatch):
    """The part of its call that the plain function leaves out: XLA takes it in a shard's program, too."""
    monkeypatch.setattr(_ffi, "attention_backward", calls.real_backward)

    def ffi_call(target, results, **options):
        if target != _ffi.PREPROCESS_TARGET:
            assert target == _ffi.BACKWARD_TARGET
            shapes.append(results[1].shape)
        return lambda *operands, **attributes: [jnp.zeros(x.shape, x.dtype) for x in results]

    shapes = []
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    with on_mesh("auto") as mesh:
        got, sent = compile_and_run(windowed_gradient, *place(mesh, arrays(4, 2), BOTH))
    assert shapes == [(4, S, 1, H)]
    assert sent == {}
    assert not any(np.asarray(x).any() for x in got)


@BOTH_TYPES
def test_gradient_with_lengths(kind, calls):
    def gradients(attention):
        def function(query, key, value, *lengths):
            return jax.grad(lambda *args: jnp.cos(attention(*args, *lengths)[0]).sum(), (0, 1, 2))(
                query, key, value
            )

        return function

    with on_mesh(kind) as mesh:
        got, sent = compile_and_run(gradients(attend), *place(mesh, arrays(4, 2), BOTH))
    assert calls.backward == [(4, T, 2, H)]
    assert set(sent) <= {"all-reduce"}  # XLA's own, of nothing that is used
    close(got, jax.jit(gradients(direct))(*arrays(4, 2)), 4e-3)


def pulled_back(attention):
    def function(query, key, value, dout, dlse):
        return jax.vjp(attention, query, key, value)[1]((dout, dlse))

    return function


def test_cotangents_that_lie_otherwise(calls):
    """They are moved to where the query is; where results lie that are not told XLA decides."""
    out, lse = expected(4)
    with on_mesh("auto") as mesh:
        args = place(mesh, arrays(4), BOTH)
        moved = [jax.device_put(x, NamedSharding(mesh, P("y", "x"))) for x in (out, lse)]
        got, sent = compile_and_run(pulled_back(attend), *args, *moved)
    assert calls.backward == [(4, T, 2, H)]
    assert set(sent) <= {"all-gather", "all-to-all", "collective-permute"}
    close(got, jax.jit(pulled_back(direct))(*arrays(4), out, lse), 4e-3)


@pytest.mark.parametrize("size", [8, 6], ids=["even", "uneven"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared keys", "all"])
def test_gradient_of_a_new_dimension(shared, size, calls):
    """Keys that all queries share: a sum over devices, or over all queries on each where XLA pads them."""
    query, key, value = arrays(4)
    stack = np.stack([query * (1 + i / 4) for i in range(size)])
    kv = (key, value) if shared else (np.stack([x] * size) for x in (key, value))
    axes = (0, None, None) if shared else (0, 0, 0)

    def gradients(attention):
        def loss(*args):
            return jnp.sum(jnp.float32(jnp.cos(jax.vmap(attention, axes)(*args)[0])))

        return jax.grad(loss, (0, 1, 2))

    with on_mesh("auto") as mesh:
        split = NamedSharding(mesh, P("y"))

        def function(query, *rest):
            return gradients(attend)(lax.with_sharding_constraint(query, split), *rest)

        got, sent = compile_and_run(function, stack, *kv)
    per_device = size if shared and size == 6 else -(-size // 4)
    assert calls.backward == [(per_device * B, T, N, H)]
    assert "all-to-all" not in sent
    close(got, jax.jit(gradients(direct))(stack, *arrays(4)[1:] if shared else kv_of(stack)), 3e-2)


def kv_of(stack):
    return (np.stack([x] * len(stack)) for x in arrays(4)[1:])


@BOTH_TYPES
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_gradient_of_scale(kind, kv_heads, calls):
    """It is summed over the devices that share the heads."""

    def gradients(attention):
        def loss(scale, *args):
            return jnp.sum(jnp.float32(jnp.cos(attention(*args, scale=scale)[0])))

        return jax.grad(loss, (0, 1))

    with on_mesh(kind) as mesh:
        args = place(mesh, arrays(kv_heads), BOTH, BOTH if kv_heads == 4 else P("x"))
        got, sent = compile_and_run(gradients(attend), np.float32(0.3), *args)
    assert calls.backward == [(4, T, 2, H)] * 2  # the second is for that of scale
    assert set(sent) == {"all-reduce"}
    close(got, jax.jit(gradients(direct))(np.float32(0.3), *arrays(kv_heads)), 4e-3)


@pytest.mark.parametrize("axes", ["xy", "x", "y"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_gradient_in_shard_map(axes, kv_heads, calls):
    """Axes that are left to XLA split the call; where they would make a sum necessary, heads are whole."""
    spec = P("x" if "x" in axes else None, None, "y" if "y" in axes else None)
    kv_spec = spec if kv_heads > 1 else P(*spec[:2])
    with on_mesh("auto") as mesh:
        function = jax.shard_map(
            gradient("r2p"),
            mesh=mesh,
            in_specs=(spec, kv_spec, kv_spec),
            out_specs=(spec, kv_spec, kv_spec),
            axis_names=set(axes),
        )
        got, _ = compile_and_run(
            function, *place(mesh, arrays(kv_heads), BOTH, BOTH if kv_heads > 1 else P("x"))
        )
    whole = kv_heads == 1 and axes == "x"
    assert calls.backward == [(4, T, N if whole else 2, H)]
    close(got, expected_gradient(kv_heads), 4e-3)


@BOTH_TYPES
def test_jvp(kind):
    def tangents(attention):
        return lambda q, k, v: jax.jvp(attention, (q, k, v), (k.sum() + q, k, v))[1]

    def every(attention):
        return lambda *args: attention(*args, local_window_size=None)

    with on_mesh(kind) as mesh:
        got, sent = compile_and_run(tangents(every(attend)), *place(mesh, arrays(4), BOTH))
    assert set(sent) <= {"all-reduce"}  # of the sum above
    close(got, jax.jit(tangents(every(direct)))(*arrays(4)), 6e-2)


@pytest.mark.parametrize("axes", ["xy", "x", "y"])
def test_shard_map(axes, calls):
    """All axes manual, or one of them, and the other left to XLA."""
    spec = P("x" if "x" in axes else None, None, "y" if "y" in axes else None)
    with on_mesh("auto") as mesh:
        function = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(spec, spec, spec, P(spec[0])),
            out_specs=(spec, spec),
            axis_names=set(axes),
        )
        got, sent = compile_and_run(function, *place(mesh, arrays(4, 1), BOTH))
    assert calls == [(4, T, 2, H)]
    assert sent == {}
    lies(got[0], mesh, *BOTH)
    close(got, expected(4, 1))


# The program's text


def lower_for_cuda(function=attend, lengths=2):
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = [BOTH, BOTH, BOTH, P("x"), P("x")]
    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(arrays(4, lengths), specs, strict=False)
    ]
    return jax.jit(lambda *args: function(*args)).trace(*structs).lower(lowering_platforms=("cuda",))


def windowed_gradient(query, key, value, *lengths):
    return jax.grad(lambda *args: attend(*args, *lengths)[0].sum(), (0, 1, 2))(query, key, value)


def test_program_for_devices_that_are_not_there():
    text = lower_for_cuda().as_text()
    assert text.count(f"custom_call @{_sharding.TARGET}(") == 1
    assert _ffi.TARGET not in text
    text = lower_for_cuda(windowed_gradient).as_text()
    assert text.count(f"custom_call @{_sharding.BACKWARD_TARGET}(") == 1
    assert _ffi.BACKWARD_TARGET not in text


PROCESS = """
import sys
sys.path.insert(0, {tests!r})
import test_sharding
print(test_sharding.lower_for_cuda().as_text())
print(test_sharding.lower_for_cuda(test_sharding.windowed_gradient).as_text())
# The kernels are registered by then: a program from the cache is run without being split.
assert test_sharding._ffi._register_once.cache_info().currsize == 1
"""


def test_text_is_the_same_in_every_process():
    """Or the persistent compilation cache would never find it."""
    code = PROCESS.format(tests=str(ROOT / "tests"))
    text = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    here = [lower_for_cuda(function).as_text().strip() for function in (attend, windowed_gradient)]
    assert [part.strip() for part in re.split(r"^(?=module )", text.strip(), flags=re.MULTILINE)[1:]] == here
    assert not re.search(r"0x[0-9a-f]{6}|\d{12}", text)


def test_export(calls):
    """For eight devices: it is split where it is called."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in (_sharding.TARGET, _ffi.TARGET)]
    with on_mesh("auto") as mesh:
        args = place(mesh, arrays(4, 2), BOTH)
        exported = jax.export.export(jax.jit(lambda *args: attend(*args)), disabled_checks=checks)(*args)
        assert exported.nr_devices == 8
        assert calls == []
        got, sent = compile_and_run(exported.call, *args)
    assert calls == [(4, T, 2, H)]
    assert sent == {}
    close(got, expected(4, 2))


def test_code_of_the_page():
    """docs/sharding.md: what its code prints is what its comments say."""
    text = (ROOT / "docs" / "sharding.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    printed: list[str] = []
    scope = {"print": lambda *args: printed.append(" ".join(map(str, args)))}
    exec("\n".join(blocks), scope)  # noqa: S102
    assert printed == re.findall(r"print\(.*\) *# (.*)$", "\n".join(blocks), re.MULTILINE)

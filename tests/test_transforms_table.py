"""The README's table of transformations: its cells are checked, and it is the one that is generated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transforms
from jax import lax
from numerics import assert_close
from transforms import ROWS, Row, arrays, attend, gradient, loss, plain

import jax_r2p

pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace("`", ""))


@functools.cache
def plain_results(derived: bool):
    return jax.jit(gradient(plain) if derived else plain)(*arrays())


def expected(row: Row, derived: bool):
    if row.transform is transforms._eval_shape:
        return jax.tree.map(jnp.zeros_like, plain_results(derived))
    if row.same:
        return plain_results(derived)
    function = row.gradient(plain) if derived else row.value(plain)
    return jax.jit(function)(*arrays())


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for i, (x, y) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        size = max(1.0, float(jnp.max(jnp.abs(y))))
        assert_close(x, y, 2e-5 * size, name=f"result {i}")


def run(row: Row, function):
    """Inside `jit` where that is possible, which is faster, and what programs do."""
    inside = row.traced and not row.outermost and row.name != "no transformation"
    return (jax.jit(function) if inside else function)(*arrays())


@each_row
def test_values(row):
    assert_same(run(row, row.value(attend)), expected(row, derived=False))


@each_row
def test_gradients(row):
    assert_same(run(row, row.gradient(attend)), expected(row, derived=True))


@pytest.mark.parametrize("derived", [False, True], ids=["forward", "gradient"])
def test_two_programs_hold_nothing_but_kernels(derived):
    """What the table's columns are made of, where it is known without them."""
    function = gradient(attend) if derived else attend
    want = "kernel + backward kernel" if derived else "kernel"
    assert transforms.what_runs(function) == want
    assert transforms.what_runs(plain) == "reference"


def test_readme_has_this_table():
    assert transforms.committed() == transforms.table(), "run: python tests/transforms.py"


# pmap, in more ways than the row of the table.

DEVICES = 4


def parts(count=DEVICES):
    """Query, key and value with a leading dimension, one for each device, all different."""
    return [jnp.stack([jnp.roll(x, i, 1) * (1 + i / 8) for i in range(count)]) for x in arrays()]


def pmap(function, *args, **keywords):
    return jax.pmap(function, devices=jax.devices()[:DEVICES], **keywords)(*args)


PMAPPED = [(0, 0, 0), (0, None, None), (None, 0, 0)]


@pytest.mark.parametrize("axes", PMAPPED, ids=str)
def test_pmap(axes):
    """Every operand mapped, or the same on all devices."""
    args = [x if axis == 0 else x[0] for x, axis in zip(parts(), axes, strict=True)]
    assert_same(pmap(attend, *args, in_axes=axes), jax.jit(jax.vmap(plain, axes))(*args))


@pytest.mark.parametrize("axes", PMAPPED, ids=str)
def test_gradients_inside_pmap(axes):
    """Each device takes its own, and they are summed as a training step sums them."""
    args = [x if axis == 0 else x[0] for x, axis in zip(parts(), axes, strict=True)]

    def step(*a):
        own = gradient(attend)(*a)
        return own, lax.psum(own, "devices")

    own, total = pmap(step, *args, in_axes=axes, axis_name="devices")
    want = jax.jit(jax.vmap(gradient(plain), axes))(*args)
    assert_same(own, want)
    assert_same(total, jax.tree.map(lambda x: jnp.broadcast_to(x.sum(0), x.shape), want))


def test_gradients_of_pmap():
    """Those of what all devices share are summed over them."""
    query, key, value = parts()
    args = (query, key[0], value[0])

    def mapped(*a):
        return jax.pmap(attend, in_axes=(0, None, None), devices=jax.devices()[:DEVICES])(*a)

    got = gradient(mapped)(*args)
    assert_same(got, jax.jit(gradient(jax.vmap(plain, (0, None, None))))(*args))


def test_pmap_of_vmap_with_residual_and_scale():
    query, key, value = parts()

    def function(query, key, value, scale, attention):
        return attention(query, key, value, scale=scale, local_window_size=(3, 1), return_residual=True)

    def mapped(attention):
        inner = jax.vmap(functools.partial(function, attention=attention), (0, 0, 0, None))
        return loss(inner), inner

    scales = np.linspace(0.1, 0.7, DEVICES, dtype=np.float32)
    ours, direct = (
        mapped(functools.partial(jax_r2p.attention, implementation=implementation))
        for implementation in (None, "xla")
    )
    assert_same(
        pmap(ours[1], query, key, value, scales), jax.jit(jax.vmap(direct[1]))(query, key, value, scales)
    )
    got = pmap(jax.grad(ours[0], (0, 1, 2, 3)), query, key, value, scales)
    assert_same(got, jax.jit(jax.vmap(jax.grad(direct[0], (0, 1, 2, 3))))(query, key, value, scales))

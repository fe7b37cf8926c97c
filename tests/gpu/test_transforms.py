"""jit, vmap over every combination of mapped operands, nested vmap, scan and control flow, against plain
loops.

A transform changes how the kernel is called (folded batches, shared keys, other leading dims), not what one
row computes, so results are compared bit by bit with those of a Python loop over single calls; the loop
itself is compared with the definition.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call, kernel
from numerics import check as compare
from numerics import expected

CALL = Call(t=70, s=90, b=2, n=6, k=2, h=64, window=(40, 3))
V = 3


def _inputs(sizes: tuple[int, int, int] = (V, V, V)) -> list[jax.Array]:
    """Query, key and value of CALL with a leading axis of the given sizes, different in each entry."""
    problems = [Call(**{**CALL.__dict__, "seed": i}).problem() for i in range(max(sizes))]
    columns = ([getattr(p, name) for p in problems] for name in ("query", "key", "value"))
    return [jnp.stack([jnp.asarray(x) for x in c[:size]]) for c, size in zip(columns, sizes, strict=True)]


def _f(*a, **keywords):
    return kernel(*a, local_window_size=CALL.window, **keywords)


def _equal(got, want) -> None:
    for name, x, y in zip(("out", "residual"), got, want, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert x.shape == y.shape
        differ = np.argwhere(~((x == y) | (np.isnan(x) & np.isnan(y))))
        assert not len(differ), (
            f"{name}: {len(differ)} of {x.size} differ, first at {tuple(map(int, differ[0]))}"
        )


def _loop(axes, arrays, **keywords):
    def entry(i):
        return [x if a is None else jnp.take(x, i, axis=a) for x, a in zip(arrays, axes, strict=True)]

    results = [_f(*entry(i), **keywords) for i in range(V)]
    return [jnp.stack(x) for x in zip(*results, strict=True)]


MAPPED = [m for m in itertools.product((0, None), repeat=3) if any(a is not None for a in m)]


@pytest.mark.parametrize("axes", MAPPED, ids=str)
def test_vmap(axes):
    arrays = [x if a is not None else x[0] for x, a in zip(_inputs(), axes, strict=True)]
    got = jax.jit(jax.vmap(_f, in_axes=axes))(*arrays)
    want = _loop(axes, arrays)
    _equal(got, want)
    p = CALL.problem()  # entry 0 of the loop is CALL itself: seed 0
    compare(want[0][0], np.swapaxes(np.asarray(want[1][0]), 1, 2), expected([p])[0], name=str(CALL))


@pytest.mark.parametrize("axes", [(1, 2, 0), (4, 0, 1), (2, None, 3)], ids=str)
def test_vmap_of_other_axes(axes):
    arrays = [x[0] if a is None else jnp.moveaxis(x, 0, a) for x, a in zip(_inputs(), axes, strict=True)]
    _equal(jax.jit(jax.vmap(_f, in_axes=axes))(*arrays), _loop(axes, arrays))


def test_vmap_out_axes():
    arrays = _inputs()
    out, residual = jax.vmap(_f, out_axes=(2, 1))(*arrays)
    want = _loop((0, 0, 0), arrays)
    _equal((jnp.moveaxis(out, 2, 0), jnp.moveaxis(residual, 1, 0)), want)


@pytest.mark.parametrize("axes", MAPPED[:4], ids=str)
def test_vmap_with_mapped_scale(axes):
    arrays = [x if a is not None else x[0] for x, a in zip(_inputs(), axes, strict=True)]
    scales = jnp.asarray([0.05, -0.2, 1.0], jnp.float32)
    got = jax.jit(jax.vmap(lambda *a: _f(*a[:3], scale=a[3]), in_axes=(*axes, 0)))(*arrays, scales)
    singles = [
        _f(*[x if a is None else x[i] for x, a in zip(arrays, axes, strict=True)], scale=scales[i])
        for i in range(V)
    ]
    _equal(got, [jnp.stack(x) for x in zip(*singles, strict=True)])


def test_vmap_of_scale_alone():
    arrays = [x[0] for x in _inputs()]
    scales = jnp.asarray([0.05, -0.2, 1.0], jnp.float32)
    got = jax.jit(jax.vmap(lambda s: _f(*arrays, scale=s)))(scales)
    _equal(got, [jnp.stack(x) for x in zip(*[_f(*arrays, scale=s) for s in scales], strict=True)])


@pytest.mark.parametrize("outer", MAPPED, ids=str)
@pytest.mark.parametrize("inner", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, None, 0)], ids=str)
def test_vmap_twice(outer, inner):
    """Any operand mapped in one level, the other, both or none: keys shared along the outer, inner or both
    axes.
    """
    arrays = []
    for x, o, i in zip(_inputs(), outer, inner, strict=True):
        if o is not None and i is not None:
            arrays.append(jnp.stack([x, x[::-1]]))
        else:
            arrays.append(x[0] if o is None and i is None else x if i is not None else x[:2])
    got = jax.jit(jax.vmap(jax.vmap(_f, in_axes=inner), in_axes=outer))(*arrays)
    rows = [
        _loop(inner, [x if o is None else x[n] for x, o in zip(arrays, outer, strict=True)]) for n in range(2)
    ]
    _equal(got, [jnp.stack(x) for x in zip(*rows, strict=True)])


def test_vmap_without_batch_dim():
    """vmap over [T, N, H] arrays, grouped heads, as in https://github.com/jax-ml/jax/pull/34920."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 64, heads, 64)), jnp.bfloat16) for heads in (28, 4, 4))
    whole = kernel(q, k, v, is_causal=True)
    _equal(jax.jit(jax.vmap(lambda *a: kernel(*a, is_causal=True)))(q, k, v), whole)


def test_scan_and_carry():
    """The kernel inside scan, its output feeding the next step, as layers do; against the unrolled loop."""
    q, k, v = _inputs()

    def step(x, kv):
        out, residual = _f(x, *kv)
        return (x + out).astype(x.dtype), residual

    got, residuals = jax.jit(lambda x, kv: jax.lax.scan(step, x, kv))(q[0], (k, v))
    x, rows = q[0], []
    for i in range(V):
        x, row = jax.jit(step)(x, (k[i], v[i]))
        rows.append(row)
    _equal((got, residuals), (x, jnp.stack(rows)))


def test_control_flow():
    """Both branches of cond, and a while loop whose trip count is only known on the device."""
    q, k, v = (x[0] for x in _inputs())

    @jax.jit
    def choose(flag, q):
        return jax.lax.cond(flag, lambda q: _f(q, k, v), lambda q: kernel(q, k, v, is_causal=True), q)

    _equal(choose(True, q), _f(q, k, v))
    _equal(choose(False, q), kernel(q, k, v, is_causal=True))

    @jax.jit
    def repeat(n, q):
        return jax.lax.fori_loop(0, n, lambda _, x: _f(x, k, v)[0], q)

    x = q
    for n in range(3):
        np.testing.assert_array_equal(np.asarray(repeat(n, q), np.float32), np.asarray(x, np.float32))
        x = _f(x, k, v)[0]


def test_operands_that_share_memory_and_are_donated():
    """query, key and value may be the same array; a donated query may be overwritten by the output."""
    x = _inputs()[0][0][:, :, :2]
    want = _f(x, x, x)
    _equal(jax.jit(lambda x: _f(x, x, x))(x), want)
    # out has query's shape, so XLA may place it in query's memory only if the kernel is done reading: it may
    # not
    donated = jax.jit(lambda q, k: _f(q, k, k)[0], donate_argnums=0)(x + 0, x)
    np.testing.assert_array_equal(np.asarray(donated, np.float32), np.asarray(want[0], np.float32))


def test_views_and_layouts():
    """Slices, transposes and reshapes before the call: XLA must hand over dense row-major arrays."""
    call = Call(t=70, s=90, n=6, k=2, h=64)
    p = call.problem()
    q, k, v = (jnp.asarray(x) for x in (p.query, p.key, p.value))
    wide = jnp.concatenate([k, v], axis=-1)
    heads_first = jnp.swapaxes(q, 1, 2)

    @jax.jit
    def f(heads_first, wide):
        return kernel(jnp.swapaxes(heads_first, 1, 2), wide[..., :64], wide[..., 64:])

    _equal(f(heads_first, wide), kernel(q, k, v))

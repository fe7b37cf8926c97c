"""Leading dimensions: the folding arithmetic, and the kernel call as the GPU rule makes it.

The kernel is replaced by `emulate`, which finds keys by the index rule that the kernel implements, so that
all of the rule but the launch runs here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numerics import assert_close

from jax_r2p import _batching, _blockwise, _dispatch, _ffi, _kernel_call, _primitives, reference
from jax_r2p._manifest import load_manifest
from jax_r2p._spec import AttentionSpec


def key_batch(batch: int, repeat: int, inner: int) -> np.ndarray:
    """The key batch of each query batch, by the kernel's rule."""
    b = np.arange(batch)
    return b // (repeat * inner) * inner + b % inner


@st.composite
def batch_dims(draw):
    query = draw(st.lists(st.integers(1, 3), max_size=5))
    shared = st.lists(st.booleans(), min_size=len(query), max_size=len(query))
    key, value = ([1 if one else q for one, q in zip(draw(shared), query, strict=True)] for _ in range(2))
    return query, key, value


@given(batch_dims())
def test_fold_finds_the_keys_that_broadcasting_would(dims):
    query, key, value = dims
    folding = _batching.fold(query, key, value)
    ids = np.arange(math.prod(folding.kv_dims)).reshape(folding.kv_dims)
    want = np.broadcast_to(ids, query).reshape(-1)
    np.testing.assert_array_equal(key_batch(math.prod(query), folding.repeat, folding.inner), want)


@given(batch_dims())
def test_fold_copies_as_little_as_one_run_allows(dims):
    query, key, value = dims
    folding = _batching.fold(query, key, value)
    for own in (key, value):  # each can be broadcast to the dimensions asked for
        assert np.broadcast_shapes(own, folding.kv_dims) == folding.kv_dims
    both = [k == v == 1 for k, v in zip(key, value, strict=True)]
    runs = [query[a:b] for a in range(len(query)) for b in range(a, len(query) + 1) if all(both[a:b])]
    assert folding.repeat == max(map(math.prod, runs), default=1)


@pytest.mark.parametrize(
    ("query", "key", "value", "kv_dims", "repeat", "inner"),
    [
        ((), (), (), (), 1, 1),
        ((4, 2), (4, 2), (4, 2), (4, 2), 1, 1),
        ((3, 4, 2), (1, 4, 2), (1, 4, 2), (1, 4, 2), 3, 8),
        ((4, 3, 2), (4, 1, 2), (4, 1, 2), (4, 1, 2), 3, 2),
        ((4, 2, 3), (4, 2, 1), (4, 2, 1), (4, 2, 1), 3, 1),
        ((3, 1, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1), 6, 1),  # one run, across the dimension of size 1
        ((3, 4, 2), (1, 4, 1), (1, 4, 1), (1, 4, 2), 3, 8),  # two runs: the shorter one is written out
        ((3, 2), (1, 2), (3, 2), (3, 2), 1, 1),  # only the key is shared
    ],
)
def test_fold_examples(query, key, value, kv_dims, repeat, inner):
    folding = _batching.fold(query, key, value)
    assert (folding.kv_dims, folding.repeat, folding.inner) == (kv_dims, repeat, inner)


def emulate(query, key, value, scale, *lengths, variant, spec, kv_repeat, kv_inner):
    del variant
    assert query.ndim == key.ndim == value.ndim == 4
    assert scale.shape == ()
    index = key_batch(query.shape[0], kv_repeat, kv_inner)
    assert key.shape[0] == value.shape[0] == index.max() + 1
    assert all(x is None or x.shape == query.shape[:1] for x in lengths)
    return reference.attention(query, key[index], value[index], scale, *lengths, spec=spec)


VARIANT = load_manifest().variants[0]
DIMS = {
    "no-batch": ((), (), (), ()),
    "batch": ((2,), (2,), (2,), ()),
    "keys-shared-outside": ((3, 2), (1, 2), (1, 2), ()),
    "keys-shared-inside": ((3, 2), (3, 1), (3, 1), ()),
    "only-value-shared": ((3, 2), (3, 2), (1, 2), ()),
    "two-runs": ((2, 3, 2), (1, 3, 1), (1, 3, 1), ()),
    "scale-outside": ((3, 2), (1, 2), (1, 2), (3, 1)),
    "scale-inside": ((3, 2), (3, 1), (3, 2), (1, 2)),
    "scale-everywhere": ((3, 2), (3, 1), (1, 2), (3, 2)),
    "scale-of-one": ((1, 2), (1, 2), (1, 2), (1, 1)),
}
LENGTHS = {
    "no-lengths": (False, False),
    "query-lengths": (True, False),
    "key-lengths": (False, True),
    "lengths": (True, True),
}


KERNEL_CALLS = {
    f"{dims}-{lengths}{'-shared' * shared}": (DIMS[dims], LENGTHS[lengths], shared)
    for dims, lengths, shared in itertools.product(DIMS, LENGTHS, (False, True))
    # Lengths that are not there are shared by none, and those without a batch have nothing to be shared over.
    if not shared or (any(LENGTHS[lengths]) and DIMS[dims][0])
}


@pytest.mark.parametrize(("dims", "there", "shared"), KERNEL_CALLS.values(), ids=KERNEL_CALLS.keys())
def test_kernel_call(dims, there, shared, monkeypatch):
    monkeypatch.setattr(_ffi, "attention_forward", emulate)
    query_dims, key_dims, value_dims, scale_dims = dims
    rng = np.random.default_rng(0)
    query, key, value, scale = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in (
            (*query_dims, 5, 4, 8),
            (*key_dims, 6, 2, 8),
            (*value_dims, 6, 2, 8),
            scale_dims,
        )
    )
    spec = AttentionSpec(left=3, right=1)
    variant = _dispatch.choose(spec, (5, 1, 8), (6, 1, 8), (6, 1, 8), "bfloat16", _dispatch.HOPPER)
    call = functools.partial(_kernel_call.forward, variant=variant, spec=spec)
    # Of the lengths' dimensions the last may be shared, or all.
    length_dims = (*query_dims[:-1], 1) if shared and query_dims else query_dims
    lengths = [
        jnp.asarray(rng.integers(0, size + 1, length_dims), jnp.int32) if exists else None
        for size, exists in zip((5, 6), there, strict=True)
    ]
    out, lse = jax.jit(call)(query, key, value, scale, *lengths)

    key, value = (jnp.broadcast_to(x, (*query_dims, 6, 2, 8)) for x in (key, value))
    lengths = [x if x is None else jnp.broadcast_to(x, query_dims) for x in lengths]
    want_out, want_lse = reference.attention(query, key, value, scale, *lengths, spec=spec)
    assert_close(out, want_out, 1e-6, name="out")
    assert_close(lse, want_lse, 1e-6, name="lse")


def emulate_backward(
    query, key, value, out, dout, lse, dlse, scale, dquery_factor, query_lengths, key_lengths, **params
):
    """The contract of `_ffi.attention_backward`, with all scores in memory."""
    assert params["variant"].role == "backward"
    assert params["deterministic"] is True
    batch, t, heads, _ = query.shape
    s, group = key.shape[1], heads // key.shape[2]
    assert all(x.shape[-1] % 8 == 0 for x in (query, key, value, dout))
    assert out.shape == dout.shape == (*query.shape[:3], value.shape[-1])
    assert out.dtype == dout.dtype == query.dtype
    assert lse.shape == dlse.shape == (batch, heads, t)
    assert lse.dtype == dlse.dtype == jnp.float32
    assert scale.shape == dquery_factor.shape == ()
    lengths = (query_lengths, key_lengths)
    assert all(x is None or (x.shape, x.dtype) == ((batch,), jnp.int32) for x in lengths)
    index = key_batch(batch, params["kv_repeat"], params["kv_inner"])
    assert key.shape[0] == value.shape[0] == index.max() + 1

    own_t, own_s = (
        jnp.full(batch, extent) if x is None else x for x, extent in zip(lengths, (t, s), strict=True)
    )
    own_t, own_s = own_t[:, None, None, None], own_s[:, None, None, None]
    i, j = jnp.arange(t)[:, None], jnp.arange(s)
    distance, spec = j - i - (own_s - own_t), params["spec"]
    seen = (i < own_t) & (j < own_s)
    seen &= (spec.left is None) | (distance >= -(spec.left or 0))
    seen &= (spec.right is None) | (distance <= (spec.right or 0))

    delta = jnp.where(lse == -jnp.inf, 0, _blockwise.row_delta(out, lse, dout, dlse))
    q, do = (x.astype(jnp.float32) for x in (query, dout))
    k, v = (jnp.repeat(x[index].astype(jnp.float32), group, axis=2) for x in (key, value))
    product = functools.partial(jnp.einsum, precision="highest")
    p = jnp.where(seen, jnp.exp(scale * product("btnh,bsnh->bnts", q, k) - lse[..., None]), 0)
    ds = p * (product("btnh,bsnh->bnts", do, v) - delta[..., None])
    dk, dv = scale * product("bnts,btnh->bsnh", ds, q), product("bnts,btnh->bsnh", p, do)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
    dk, dv = (jnp.zeros(x.shape).at[index].add(y).astype(x.dtype) for x, y in ((key, dk), (value, dv)))
    return (dquery_factor * product("bnts,bsnh->btnh", ds, k)).astype(query.dtype), dk, dv


@pytest.mark.parametrize(
    ("there", "widths"),
    [((False, False), (5, 11)), ((False, False), (8, 8)), ((True, True), (8, 16))],
    ids=["padded", "no-lengths", "lengths"],
)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS.keys())
def test_backward_kernel_call(dims, there, widths, monkeypatch):
    """Against the derivatives that JAX takes of the reference."""
    monkeypatch.setattr(_ffi, "attention_backward", emulate_backward)
    query_dims, key_dims, value_dims, scale_dims = dims
    rng = np.random.default_rng(0)
    h, hv = widths
    shapes = ((*query_dims, 7, 4, h), (*key_dims, 4, 2, h), (*value_dims, 4, 2, hv), scale_dims)
    operands = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    spec = AttentionSpec(left=3, right=1)  # the first two queries see nothing
    lengths = [
        jnp.asarray(rng.integers(0, size + 1, query_dims), jnp.int32) if exists else None
        for size, exists in zip((7, 4), there, strict=True)
    ]

    @jax.jit
    def both(*operands):
        def function(*a):
            return reference.attention(*a, *lengths, spec=spec)

        (out, lse), transpose = jax.vjp(function, *operands)
        dout, dlse = jnp.cos(out), jnp.where(lse == -jnp.inf, jnp.nan, jnp.sin(lse))
        of = (True,) * 4
        got = _primitives._backward_kernel(
            *operands,
            *(x for x in lengths if x is not None),
            out,
            lse,
            dout,
            dlse,
            spec=spec,
            lengths=there,
            of=of,
            deterministic=True,
            variant=dataclasses.replace(VARIANT, role="backward"),
        )
        return got, transpose((dout, jnp.nan_to_num(dlse)))

    got, want = both(*operands)
    for name, x, y in zip(("query", "key", "value", "scale"), got, want, strict=True):
        if name == "scale":
            assert x.shape == tuple(query_dims)
            x = _blockwise.sum_to(x, y.shape)
        assert_close(x, y, 2e-5 * max(1.0, float(jnp.abs(y).max())), name=name)
    if not any(there):
        np.testing.assert_array_equal(got[0][..., :2, :, :], 0)


@pytest.mark.parametrize("scale", [0.125, 0.0])
def test_gradient_of_scale_from_sums_that_are_large(scale, monkeypatch):
    """fp16 holds dquery, but not the sums that it is made of."""
    monkeypatch.setattr(_ffi, "attention_backward", emulate_backward)
    key = jnp.asarray([60, -60], jnp.float16)[None, :, None, None] * jnp.ones((1, 2, 1, 64), jnp.float16)
    query, value, dout = jnp.full_like(key, 2**-10), key / 60, jnp.full_like(key, 32)
    scale = jnp.full((1,), scale, jnp.float32)
    call = functools.partial(reference.attention, spec=AttentionSpec())
    exact = [x.astype(jnp.float32) for x in (query, key, value)]
    (out, lse), transpose = jax.vjp(call, *exact, scale)
    *_, want = transpose((dout.astype(jnp.float32), jnp.zeros_like(lse)))
    sums, *_ = jax.vjp(lambda q: call(q, *exact[1:], jnp.ones(1))[0], exact[0] * scale)[1](
        dout.astype(jnp.float32)
    )
    largest = float(jnp.finfo(jnp.float16).max)
    assert float(jnp.abs(sums).max()) > largest > 64**-0.5 * float(jnp.abs(sums).max())
    got = _primitives._backward_kernel(
        *(query, key, value, scale, out.astype(jnp.float16), lse, dout, jnp.zeros_like(lse)),
        spec=AttentionSpec(),
        lengths=(False, False),
        of=(False, False, False, True),
        deterministic=True,
        variant=dataclasses.replace(VARIANT, role="backward"),
    )
    assert_close(got[-1].reshape(()), want.reshape(()), 2e-3 * float(jnp.abs(want).max()), name="scale")


@pytest.mark.parametrize("outer", [3, 4], ids="outer={}".format)
def test_operands_that_an_outer_vmap_does_not_map(outer, monkeypatch):
    """Scale and lengths differ along the inner dimension, and know nothing of the outer one.

    They must stay aligned with the inner dimension, also if both are equally long.
    """
    monkeypatch.setattr(_ffi, "attention_forward", emulate)
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((outer, 2, 5, 4, 8)), jnp.float32)
    key, value = jnp.asarray(rng.standard_normal((2, 2, 6, 2, 8)), jnp.float32)
    scale, lengths = jnp.array([0.3, -0.2, 0.7]), jnp.array([[1, 6], [5, 3], [2, 4]], jnp.int32)
    spec = AttentionSpec(right=0)
    variant = _dispatch.choose(spec, (5, 1, 8), (6, 1, 8), (6, 1, 8), "bfloat16", _dispatch.HOPPER)

    lead = functools.partial(_batching.add_leading_dimension, roles=_batching.roles_of_call(1))
    inner = lead((query[0], key, value, scale, lengths), (None, None, None, 0, 0))
    query_inner = jnp.broadcast_to(query[:, None], (outer, 3, *query.shape[1:]))
    mapped = lead((query_inner, *inner[1:]), (0, None, None, None, None))
    call = functools.partial(_kernel_call.forward, variant=variant, spec=spec, query_lengths=None)
    out, _ = jax.jit(lambda q, k, v, x, s: call(q, k, v, x, key_lengths=s))(*mapped)
    for i, j in np.ndindex(outer, 3):
        want, _ = reference.attention(query[i], key, value, scale[j], None, lengths[j], spec=spec)
        assert_close(out[i, j], want, 1e-6, name=f"{i}, {j}")

"""Inputs under which other attention packages failed, by public report, where no other test has them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from test_lowering import calls, lower

import jax_r2p
from jax_r2p import _ffi

pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")

V = 3
GROUPED = Case(id="", B=1, T=64, S=64, N=28, K=4, H=64)


@functools.cache
def grouped(*leading):
    """Query, key and value of seven query heads to a key head, each with more dimensions in front."""
    count = int(np.prod(leading))
    each = [GROUPED.arrays(seed) for seed in range(count)]
    return [jnp.stack(x).reshape(*leading, *x[0].shape) for x in zip(*each, strict=True)]


def close(got, want, error=2e-5):
    np.testing.assert_allclose(got, want, error, error)


MASKED = {
    "mapped": ((V, 1, 1, 64, 64), 0),
    "unmapped": ((1, 1, 64, 64), None),
    "mapped over axis 2": ((1, 1, V, 64, 64), 2),
}


@pytest.mark.parametrize("case", MASKED.values(), ids=MASKED)
def test_vmap_of_grouped_heads_with_a_mask_of_one_head(case):
    """github.com/jax-ml/jax/pull/34920 and 36702, github.com/jax-ml/jax/issues/23701"""
    shape, axis = case
    mask = jnp.asarray(np.random.default_rng(1).random(shape) < 0.6)

    def one(query, key, value, mask):
        return jax_r2p.dot_product_attention(query, key, value, mask=mask)

    args = grouped(V)
    got = jax.jit(jax.vmap(one, (0, 0, 0, axis)))(*args, mask)
    masks = jnp.broadcast_to(mask, (V, *shape)) if axis is None else jnp.moveaxis(mask, axis, 0)

    want = jnp.stack([jax.nn.dot_product_attention(*(x[i] for x in args), mask=masks[i]) for i in range(V)])
    close(got, want)


@pytest.mark.parametrize("outer", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
@pytest.mark.parametrize("inner", [(0, 0, 0), (0, None, None)], ids=str)
def test_vmap_twice_of_grouped_heads(outer, inner):
    """The same report, without a mask: keys shared in neither, one or both."""
    args = []
    for x, o, i in zip(grouped(2, V), outer, inner, strict=True):
        args.append(x[(slice(None) if o == 0 else 0, slice(None) if i == 0 else 0)])

    def one(query, key, value, implementation=None):
        return jax_r2p.attention(query, key, value, is_causal=True, implementation=implementation)

    got = jax.jit(jax.vmap(jax.vmap(one, inner), outer))(*args)
    direct = jax.jit(functools.partial(one, implementation="xla"))
    want = []
    for a in range(2):
        row = [x if o is None else x[a] for x, o in zip(args, outer, strict=True)]
        one_each = ([x if i is None else x[b] for x, i in zip(row, inner, strict=True)] for b in range(V))
        want += [direct(*x) for x in one_each]
    close(got, jnp.stack(want).reshape(got.shape))
    close_gradient(one, args, outer, inner)


def close_gradient(one, args, outer, inner):
    """The gradient of the twice mapped function, of a shared operand summed."""

    def total(*a, implementation=None):
        function = functools.partial(one, implementation=implementation)
        return jnp.sum(jnp.sin(jax.vmap(jax.vmap(function, inner), outer)(*a)))

    got, want = (
        jax.jit(jax.grad(functools.partial(total, implementation=name), (0, 1, 2)))(*args)
        for name in (None, "xla")
    )
    for x, y in zip(got, want, strict=True):
        close(x, y, 1e-4)


SAVE_BOTH = jax.checkpoint_policies.save_only_these_names(jax_r2p.OUT_NAME, jax_r2p.RESIDUAL_NAME)
POLICIES = {
    "no checkpoint": (None, 1),
    "saves nothing": (jax.checkpoint_policies.nothing_saveable, 2),
    "saves the names": (SAVE_BOTH, 1),
    "saves one name": (jax.checkpoint_policies.save_only_these_names(jax_r2p.OUT_NAME), 2),
}


@pytest.mark.parametrize("case", POLICIES.values(), ids=POLICIES)
def test_remat_of_odd_sizes(case):
    """Values, and how often the program for CUDA calls the kernel of the forward pass.

    github.com/lucidrains/flash-attention-jax/issues/7, github.com/apple/axlearn/pull/942 and
    github.com/jax-ml/jax/pull/26374
    """
    policy, forward_calls = case
    odd = Case(id="", B=3, T=16, S=17, N=5, K=5, H=24, causal=True)

    def gradient(*args, implementation=None, policy=policy):
        def function(*a):
            return jax_r2p.attention(*a, is_causal=True, implementation=implementation)

        layer = function if policy is None else jax.checkpoint(function, policy=policy)
        return jax.grad(lambda *a: jnp.sum(jnp.sin(layer(*a).astype(jnp.float32))), (0, 1, 2))(*args)

    got = jax.jit(gradient)(*odd.arrays())
    want = jax.jit(functools.partial(gradient, implementation="xla", policy=None))(*odd.arrays())
    for x, y in zip(got, want, strict=True):
        close(x, y)
    text = lower(gradient, *odd.replace(dtype="bfloat16").structs)
    assert len(calls(text, _ffi.TARGET)) == forward_calls
    assert len(calls(text, _ffi.BACKWARD_TARGET)) == 1

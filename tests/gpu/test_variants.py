"""Every kernel that the package ships is chosen by some call, loads, and computes the right thing."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from harness import Call, check

import jax_r2p
from jax_r2p import _dispatch
from jax_r2p._manifest import Role, Variant, load_manifest
from jax_r2p._spec import AttentionSpec

CALLS = [
    Call(t=300, s=260, n=4, k=2, h=h, hv=hv, dtype=dtype, **mask)
    for h, hv in ((64, None), (96, None), (128, None), (192, None), (192, 128), (256, None))
    for dtype in ("bfloat16", "float16")
    for mask in ({}, {"is_causal": True}, {"window": (64, 7)})
]
# Wide windows, over more than one tile and with every kind of block.
CALLS += [
    Call(t=t, s=s, n=4, k=2, h=128, dtype=dtype, window=window)
    for dtype in ("bfloat16", "float16")
    for t, s, window in ((300, 900, (520, 7)), (1400, 1300, (511, 0)), (700, 1024, (600, 600)))
]
# Causal calls that are so short or long that they have other tiles.
CALLS += [
    Call(t=300, s=s, n=4, k=2, h=h, dtype=dtype, is_causal=True)
    for dtype in ("bfloat16", "float16")
    for h, s in ((64, 3100), (128, 250), (128, 800))
]


def _explain(call: Call, **keywords):
    s = call.t if call.s is None else call.s
    hv = call.h if call.hv is None else call.hv
    shapes = ((call.b, call.t, call.n, call.h), (call.b, s, call.k, call.h), (call.b, s, call.k, hv))
    arrays = [jax.ShapeDtypeStruct(x, jnp.dtype(call.dtype)) for x in shapes]
    return jax_r2p.explain(*arrays, **call.keywords(), **keywords)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_explain_says_the_kernel_runs(call):
    answer = _explain(call)
    assert answer.implementation == "r2p"
    assert answer.reason is None
    assert answer.variant is not None
    assert answer.variant in str(answer)


def test_every_shipped_variant_is_used():
    """Those of the backward pass by the gradients of these calls, whose values test_backward.py compares."""
    shipped = {role: {v.name for v in load_manifest().variants if v.role == role} for role in get_args(Role)}
    assert {_explain(call).variant for call in CALLS} == shipped["forward"]
    for role in ("backward", "preprocess"):
        chosen = [_kernel(call, role) for call in CALLS]
        assert {variant.name for variant in chosen if isinstance(variant, Variant)} == shipped[role]


def _kernel(call: Call, role: Role) -> Variant | str:
    p = call.problem()
    shapes = (p.query.shape, p.key.shape, p.value.shape)
    spec = AttentionSpec(left=p.left, right=p.right)
    return _dispatch.choose(spec, *shapes, p.query.dtype, _dispatch.HOPPER, role=role)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_variant(call):
    check([call])


def test_no_warning_where_the_kernel_runs():
    """implementation=None takes the kernel here; a fallback would warn, and a warning is an error."""
    import warnings

    p = CALLS[0].problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = jax.jit(jax_r2p.attention).lower(p.query, p.key, p.value).as_text()
    assert "jax_r2p.attention_forward" in text


def test_demanding_the_kernel_for_what_it_cannot_do():
    x = jnp.ones((1, 8, 2, 64), jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        jax_r2p.attention(x, x, x, implementation="r2p")
    x = jnp.ones((1, 8, 2, 264), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="264"):
        jax_r2p.attention(x, x, x, implementation="r2p")

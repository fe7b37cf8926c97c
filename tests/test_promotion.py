"""Every entry point with the flags set by which JAX refuses to broadcast and to mix dtypes by itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_r2p
from jax_r2p import reference
from jax_r2p._spec import AttentionSpec

LENGTHS = {
    "query_seq_lengths": jnp.array([5, 8], jnp.int32),
    "key_value_seq_lengths": jnp.array([6, 3], jnp.int32),
}
CALLS = [
    {},
    {"is_causal": True},
    {"local_window_size": (3, 1)},
    {"is_causal": True, **LENGTHS},
]
pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = ((2, 8, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)


def loss(function, *operands, **keywords):
    out, residual = function(*operands, return_residual=True, **keywords)
    residual = residual.astype(jnp.float32)
    seen = residual > -1e30  # of queries that see no key jax.nn makes the least float32, this package -inf
    return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(jnp.where(seen, residual, 0))


@pytest.mark.parametrize(
    ("name", "keywords", "dtype"),
    [
        (name, keywords, dtype)
        for name in ("attention", "dot_product_attention")
        for keywords in CALLS
        for dtype in ("float32", "bfloat16")
        # Left to jax.nn, whose own derivatives mix dtypes.
        if (name, dtype) != ("dot_product_attention", "bfloat16") or "query_seq_lengths" not in keywords
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "none",
)
def test_values_and_derivatives(name, keywords, dtype):
    operands = arrays(dtype)
    f = functools.partial(loss, getattr(jax_r2p, name), **keywords)
    value, gradients = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*operands)
    _, tangent = jax.jvp(f, operands, operands)
    _, second = jax.jvp(jax.grad(f), operands, operands)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (value, *gradients, tangent, second))


def test_scale_and_vmap():
    operands = arrays()

    def of_scale(scale):
        return jax.vmap(lambda q: jax_r2p.attention(q, *operands[1:], scale=scale).sum())(
            jnp.stack([operands[0]] * 2)
        ).sum()

    assert np.isfinite(jax.grad(of_scale)(0.3))


def test_reference():
    out, _ = reference.attention(*arrays(), 0.25, spec=AttentionSpec(left=3, right=0))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("keywords", CALLS[:3], ids=lambda keywords: "-".join(keywords) or "none")
def test_ring(method, keywords):
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    ring = functools.partial(jax_r2p.ring_attention, axis_name="x", method=method, **keywords)
    sharded = jax.shard_map(
        functools.partial(ring, return_residual=True),
        mesh=mesh,
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
    )
    gradient = jax.jit(jax.grad(functools.partial(loss, lambda *x, return_residual: sharded(*x))))
    assert np.isfinite(gradient(*arrays())).all()

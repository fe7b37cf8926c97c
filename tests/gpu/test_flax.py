"""`jax_r2p.flax.attention_fn` in layers of `flax.linen` and `flax.nnx`, by the kernel or by Flax's function.

What a result may be off by is the rule of numerics.py, against a layer in float32 with Flax's own function.
"""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_drop_in import close, launching

import jax_r2p.flax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Flax itself
    pytest.importorskip("flax", reason="flax is not installed")
    import flax.linen as nn
    from flax import nnx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BATCH, T, WIDTH, HEADS = 2, 150, 256, 4
demanded = functools.partial(jax_r2p.flax.attention_fn, implementation="r2p")


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, T, WIDTH), np.float32))


def linen_function(attention, dtype, **keywords):
    """Out and gradients by the parameters, which are the same whatever the attention and the dtype."""
    options = {"num_heads": HEADS, "qkv_features": WIDTH}
    plain = nn.MultiHeadDotProductAttention(**options)
    layer = nn.MultiHeadDotProductAttention(**options, dtype=dtype, attention_fn=attention)

    def apply(params, x):
        return layer.apply(params, x, **keywords)

    return with_gradients(apply), plain.init(jax.random.key(0), inputs())


def nnx_function(attention, dtype, **keywords):
    """The same with a layer of `flax.nnx`."""
    layer = nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=WIDTH,
        dtype=dtype,
        attention_fn=attention,
        decode=False,
        rngs=nnx.Rngs(0),
    )
    graph, params = nnx.split(layer)
    return with_gradients(lambda params, x: nnx.merge(graph, params)(x, **keywords)), params


def with_gradients(apply):
    def function(params, x):
        out, pull = jax.vjp(lambda params: apply(params, x), params)
        return out, pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    return function


def plain_results(make, attention, **keywords) -> list:
    """Of Flax's own function, in bfloat16 and in float32."""
    results = []
    for dtype in (jnp.bfloat16, jnp.float32):
        function, params = make(attention, dtype, **keywords)
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            results.append(jax.jit(function)(params, inputs()))
    return results


@pytest.mark.parametrize("is_causal", [False, True])
def test_linen(is_causal):
    """A causal layer by partial, since a mask is an array; Flax's own function wants that array."""
    function, params = linen_function(functools.partial(demanded, is_causal=is_causal), jnp.bfloat16)
    got, launches = launching(function, params, inputs())
    assert launches >= 2
    mask = nn.make_causal_mask(jnp.ones((BATCH, T))) if is_causal else None
    close(got, *plain_results(linen_function, nn.dot_product_attention, mask=mask))


@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx(is_causal):
    function, params = nnx_function(demanded, jnp.bfloat16, is_causal=is_causal)
    got, launches = launching(function, params, inputs())
    assert launches >= 2
    close(got, *plain_results(nnx_function, nnx.dot_product_attention, is_causal=is_causal))


@pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")
@pytest.mark.parametrize("make", [linen_function, nnx_function], ids=["linen", "nnx"])
def test_a_mask_is_handed_over(make):
    """To Flax's own function: no kernel is launched, and the result is the same."""
    own = {linen_function: nn.dot_product_attention, nnx_function: nnx.dot_product_attention}[make]
    mask = jnp.tril(jnp.ones((1, 1, T, T), bool))
    function, params = make(jax_r2p.flax.attention_fn, jnp.bfloat16, mask=mask)
    got, launches = launching(function, params, inputs())
    assert launches == 0
    plain, params = make(own, jnp.bfloat16, mask=mask)
    want = jax.jit(plain)(params, inputs())
    jax.tree.map(np.testing.assert_array_equal, got, want)

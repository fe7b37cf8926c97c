"""`jax_r2p.flax.attention_fn` in the layers of Flax: what they pass, what they get, which code runs."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close
from pages import check_page

import jax_r2p
import jax_r2p.flax
from jax_r2p import _ffi

ROOT = Path(__file__).resolve().parent.parent
fn = jax_r2p.flax.attention_fn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Flax itself
    flax = pytest.importorskip("flax", reason="flax is not installed")
    import flax.linen as nn
    from flax import nnx

pytestmark = [
    pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

T, WIDTH, HEADS = 7, 32, 4
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, WIDTH), np.float32))
CAUSAL = jnp.tril(jnp.ones((1, 1, T, T), bool))


def linen_layer(attention=fn, dtype=jnp.bfloat16, **options):
    return nn.MultiHeadDotProductAttention(
        num_heads=HEADS, qkv_features=WIDTH, dtype=dtype, attention_fn=attention, **options
    )


def nnx_layer(attention=fn, dtype=jnp.bfloat16, **options):
    return nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=WIDTH,
        dtype=dtype,
        attention_fn=attention,
        decode=False,
        rngs=nnx.Rngs(0),
        **options,
    )


PARAMS = linen_layer(nn.dot_product_attention).init(jax.random.key(0), X)


def linen_call(layer, x=X, **keywords):
    return layer.apply(PARAMS, x, **keywords)


def lower(function, *operands) -> str:
    traced = jax.jit(lambda *x: function(*x)).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_every_argument_of_flax_is_understood():
    known = inspect.signature(fn).parameters
    for function in (nn.dot_product_attention, nnx.dot_product_attention):
        parameters = inspect.signature(function).parameters
        assert set(parameters) <= set(known)
        for name, parameter in parameters.items():
            if name not in ("promote_dtype", "force_fp32_for_softmax"):  # None: as in Flax
                assert parameter.default == known[name].default, name
        # Those that both have stand in the same place.
        both = list(parameters)[: list(parameters).index("module") + 1]
        assert both == list(known)[: len(both)]


def test_linen_runs_the_kernel():
    layer, plain = linen_layer(), linen_layer(nn.dot_product_attention, dtype=jnp.float32)
    assert_close(linen_call(layer), linen_call(plain), 0.03, name="out")
    assert _ffi.TARGET in lower(functools.partial(linen_call, layer), X)


def test_linen_causal():
    """By partial, since a mask is an array."""
    causal = linen_layer(functools.partial(fn, is_causal=True))
    plain = linen_layer(nn.dot_product_attention, dtype=jnp.float32)
    assert_close(linen_call(causal), linen_call(plain, mask=CAUSAL), 0.03, name="out")
    assert _ffi.TARGET in lower(functools.partial(linen_call, causal), X)
    assert _ffi.TARGET not in lower(functools.partial(linen_call, linen_layer(), mask=CAUSAL), X)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx_runs_the_kernel(is_causal):
    layer, plain = nnx_layer(), nnx_layer(nnx.dot_product_attention, dtype=jnp.float32)
    got, want = (f(X, is_causal=is_causal) for f in (layer, plain))
    assert_close(got, want, 0.03, name="out")
    assert _ffi.TARGET in lower(functools.partial(layer, is_causal=is_causal), X)


@pytest.mark.parametrize("dims", [(), (2,), (2, 3)], ids=str)
def test_dimensions_in_front(dims):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((*dims, T, 2, 8), np.float32))
    got = fn(x, x, x, dtype=jnp.bfloat16, is_causal=True)
    assert (got.shape, got.dtype) == (x.shape, jnp.bfloat16)
    want = nnx.dot_product_attention(x, x, x, is_causal=True)
    assert_close(got, want, 0.03, name="out")


def test_dtypes_are_promoted():
    x = jnp.ones((1, T, 2, 8), jnp.bfloat16)
    assert fn(x, x.astype(jnp.float32), x).dtype == jnp.float32
    assert (
        fn(x, x, x, promote_dtype=lambda xs, dtype: [x.astype(jnp.float16) for x in xs]).dtype == jnp.float16
    )


def test_gradients():
    def loss(layer, params):
        return jnp.sum(layer.apply(params, X).astype(jnp.float32) ** 2)

    layers = linen_layer(), linen_layer(nn.dot_product_attention, dtype=jnp.float32)
    got, want = (jax.jit(jax.grad(functools.partial(loss, layer)))(PARAMS) for layer in layers)
    for mine, that in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(mine, that, 0.05 * float(jnp.abs(that).max()) + 0.05, name="gradient")


# What is handed over: the same bits as with Flax's own function, and a reason.

DROPOUT = {"dropout_rate": 0.5, "deterministic": False}
HANDED = {
    "mask": ({}, {"mask": CAUSAL}, "no kernel takes mask"),
    "float mask": ({}, {"mask": CAUSAL.astype(jnp.float32)}, "no kernel takes mask"),
    "float32": ({"dtype": jnp.float32}, {}, "no kernel takes dtype float32"),
    "dropout": (DROPOUT, {"dropout": True}, "no kernel drops weights"),
    "dropout of all": ({**DROPOUT, "broadcast_dropout": False}, {"dropout": True}, "no kernel drops weights"),
    "weights": ({}, {"sow_weights": True}, "no kernel records weights"),
}


@pytest.mark.filterwarnings("default::jax_r2p.FallbackWarning")
@pytest.mark.parametrize("case", HANDED)
def test_linen_hands_over(case):
    options, keywords, reason = HANDED[case]
    if "dropout" in keywords:
        keywords = {"dropout_rng": jax.random.key(3)}
    if "sow_weights" in keywords:
        keywords = {"sow_weights": True, "mutable": ["intermediates"]}
    expected = rf"^jax_r2p\.flax\.attention_fn calls Flax's own function: {reason}"
    with pytest.warns(jax_r2p.FallbackWarning, match=expected):
        got = linen_call(linen_layer(**options), **keywords)
    want = linen_call(linen_layer(nn.dot_product_attention, **options), **keywords)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(NotImplementedError, match=reason):
        linen_call(linen_layer(functools.partial(fn, implementation="r2p"), **options), **keywords)
    silent = linen_layer(functools.partial(fn, implementation="xla"), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.tree.map(np.testing.assert_array_equal, linen_call(silent, **keywords), want)


@pytest.mark.filterwarnings("default::jax_r2p.FallbackWarning")
@pytest.mark.parametrize("case", HANDED)
def test_nnx_hands_over(case):
    options, keywords, reason = HANDED[case]
    sown = "sow_weights" in keywords

    def run(attention):
        layer = nnx_layer(attention, **options)
        rngs = {"rngs": nnx.Rngs(3)} if "dropout" in keywords else keywords
        out = layer(X, **rngs)
        return (out, nnx.pop(layer, nnx.Intermediate)) if sown else out

    with pytest.warns(jax_r2p.FallbackWarning, match=f"calls Flax's own function: {reason}"):
        got = run(fn)
    jax.tree.map(np.testing.assert_array_equal, got, run(nnx.dot_product_attention))
    with pytest.raises(NotImplementedError, match=reason):
        run(functools.partial(fn, implementation="r2p"))


def test_inactive_dropout_keeps_the_kernel():
    layer = linen_layer(dropout_rate=0.5, deterministic=True)
    assert _ffi.TARGET in lower(functools.partial(linen_call, layer), X)
    layer = nnx_layer(dropout_rate=0.5)
    assert _ffi.TARGET in lower(functools.partial(layer, deterministic=True), X)


def test_causal_dropout_of_linen():
    """Its own function has no is_causal, so the mask gets it."""
    options = {"dropout_rate": 0.5, "deterministic": False}
    keywords = {"dropout_rng": jax.random.key(3)}
    for mask in (None, jnp.arange(T) < 5):
        got = linen_call(linen_layer(functools.partial(fn, is_causal=True), **options), mask=mask, **keywords)
        both = CAUSAL if mask is None else CAUSAL & mask
        want = linen_call(linen_layer(nn.dot_product_attention, **options), mask=both, **keywords)
        np.testing.assert_array_equal(got, want)


def test_own_einsum():
    x = X.reshape(2, T, HEADS, -1).astype(jnp.bfloat16)
    einsums = {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}
    with pytest.raises(NotImplementedError, match="no kernel takes another einsum"):
        fn(x, x, x, implementation="r2p", **einsums)
    np.testing.assert_array_equal(fn(x, x, x, **einsums), nn.dot_product_attention(x, x, x, **einsums))


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"implementation must be one of .*, got 'cudnn'"):
        fn(X, X, X, implementation="cudnn")


def test_flax_is_imported_only_for_its_own_function():
    code = """
import sys, warnings, jax.numpy as jnp, jax_r2p.flax
warnings.simplefilter("ignore")
x = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
jax_r2p.flax.attention_fn(x, x, x)
print("flax" in sys.modules)
sys.modules["flax"] = None
try:
    jax_r2p.flax.attention_fn(x, x, x, mask=jnp.ones((1, 1, 8, 8), bool))
except ImportError as error:
    print("flax" in str(error))
"""
    # -P: the installed package, not the checkout that a test run starts in.
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_example():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "flax_block.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"\d+\.\d+", done.stdout))
    assert after < 0.5 * before


def test_code_of_the_documentation(tmp_path):
    check_page("flax.md", tmp_path)

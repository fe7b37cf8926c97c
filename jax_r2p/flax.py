"""Attention for Flax: `attention_fn` goes where a layer takes one.

    flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_r2p.flax.attention_fn)
    flax.nnx.MultiHeadAttention(..., attention_fn=jax_r2p.flax.attention_fn)

Flax is imported when a call is handed to it, and only then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from jax_r2p import _dispatch, _dot_product_attention
from jax_r2p._promotion import promoting

__all__ = ["attention_fn"]

_IMPLEMENTATIONS = (None, "r2p", "xla")


@promoting
def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    force_fp32_for_softmax: bool | None = None,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    implementation: Literal["r2p", "xla"] | None = None,
) -> Array:
    """Computes the attention of a Flax layer.

    The arguments are those of `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`
    together. A call that the kernel can compute runs as by `jax_r2p.dot_product_attention`: bfloat16 or
    float16, no `bias`, no `mask`, no active dropout, no weights to record, no einsum of the layer's own. Any
    other is handed to Flax's function, with a `FallbackWarning` once for each reason.

    What a mask holds is not known when a call is traced, so a causal mask given as an array is a mask like
    any other. Give none, and `functools.partial(attention_fn, is_causal=True)` to a layer of `flax.linen`, or
    `is_causal=True` to the call of one of `flax.nnx`, which passes it on.

    Args:
      query: (..., T, N, H).
      key: (..., S, K, H), with the same dimensions in front.
      value: Of the shape of `key`.
      bias: Added to the scores; broadcasts to (..., N, T, S). For Flax's function.
      mask: True or not 0 where a query sees a key; broadcasts to (..., N, T, S). For Flax's function.
      broadcast_dropout: Whether all of a batch drop the same weights. For Flax's function.
      dropout_rng: Key for dropout. For Flax's function.
      dropout_rate: Share of the weights that are dropped.
      deterministic: Whether none are, whatever the rate.
      dtype: What query, key and value are converted to. None for what they promote to.
      precision: For Flax's function; products of bfloat16 and float16 are exact in the kernel.
      module: The layer that records the weights; None to record none.
      force_fp32_for_softmax: For Flax's function; the kernel computes softmax in float32 always.
      einsum_dot_general: How Flax's function multiplies. So for the two that follow.
      qk_attn_weights_einsum: Likewise.
      attn_weights_value_einsum: Likewise.
      promote_dtype: Converts (query, key, value), given `dtype` too. None for the rule of `dtype`.
      is_causal: Whether query i sees no key after i.
      implementation: None for the kernel where it can, else Flax's function; "r2p" for the kernel or an
        error; "xla" for Flax's function.

    Returns:
      (..., T, N, H), of the dtype of the converted arrays.

    Raises:
      ValueError: `implementation` is none of these, or Flax or `jax.nn` refuses the arguments.
      NotImplementedError: `implementation="r2p"`, and the kernel does not take this call.
      ImportError: The call is for Flax's function, and Flax is not installed.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {_IMPLEMENTATIONS}, got {implementation!r}")
    einsums = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    reason = None
    if dropout_rate != 0 and not deterministic:
        reason = "no kernel drops weights; dropout_rate=0 or deterministic=True has one"
    elif module is not None:
        reason = "no kernel records weights; module=None (sow_weights=False) has one"
    elif any(x is not None for x in einsums):
        reason = "no kernel takes another einsum or dot_general; the default has one"

    if implementation != "xla" and reason is None:
        arrays = _promoted(query, key, value, dtype, promote_dtype)
        if all(x.ndim >= 3 for x in arrays):
            arrays = [x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x for x in arrays]
        plan = _dot_product_attention.make_plan(
            arrays,
            bias=bias,
            mask=mask,
            scale=None,
            is_causal=is_causal,
            query_seq_lengths=None,
            key_value_seq_lengths=None,
            local_window_size=None,
        )
        if isinstance(plan, _dot_product_attention.Plan):
            out = _dot_product_attention.dot_product_attention(
                *arrays, is_causal=is_causal, implementation=implementation
            )
            return out.reshape(jnp.shape(query))
        reason = plan
    if implementation == "r2p" and reason:
        raise _dispatch.refuse(reason)

    options: dict[str, Any] = {
        "broadcast_dropout": broadcast_dropout,
        "dropout_rng": dropout_rng,
        "dropout_rate": dropout_rate,
        "deterministic": deterministic,
        "dtype": dtype,
        "precision": precision,
        "module": module,
    }
    if promote_dtype is not None:
        options["promote_dtype"] = promote_dtype
    linen_only = {
        "force_fp32_for_softmax": force_fp32_for_softmax,
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    given = {name: x for name, x in linen_only.items() if x is not None}
    linen = importlib.import_module("flax.linen")
    if given or isinstance(module, linen.Module):  # a layer of flax.linen gives the first one always
        if is_causal:
            mask = _with_causal(mask, query.shape[-3], key.shape[-3])
        out = linen.dot_product_attention(query, key, value, bias, mask, **options, **given)
    else:
        nnx = importlib.import_module("flax.nnx")
        out = nnx.dot_product_attention(query, key, value, bias, mask, **options, is_causal=is_causal)
    if implementation is None and reason:
        _dispatch.warn_fallback(reason, "jax_r2p.flax.attention_fn calls Flax's own function")
    return out


def _promoted(query: Array, key: Array, value: Array, dtype: Any, promote: Any) -> list[Array]:
    """Returns the arrays, converted as Flax does it."""
    if promote is not None:
        return list(promote((query, key, value), dtype=dtype))
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
    return [jnp.asarray(x, dtype) for x in (query, key, value)]


def _with_causal(mask: Array | None, queries: int, keys: int) -> Array:
    """Returns the mask without what a query before the key would see."""
    causal = jnp.tril(jnp.ones((queries, keys), bool))
    return causal if mask is None else jnp.logical_and(mask, causal)

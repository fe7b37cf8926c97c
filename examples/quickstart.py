"""From arrays to a checked result: causal attention with shared key heads, under jit.

    python examples/quickstart.py

Runs anywhere. On a Hopper GPU the compiled kernel does the work; elsewhere plain XLA does, and this says so.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp

import jax_r2p

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 512, 8, 2, 64


def main() -> None:
    """Compute, compare with `jax.nn.dot_product_attention`, and say what ran."""
    shapes = ((BATCH, LENGTH, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))

    explanation = jax_r2p.explain(query, key, value, is_causal=True)
    print(f"On {jax.devices()[0].device_kind}: {explanation}")

    @jax.jit
    def attend(query, key, value):
        return jax_r2p.attention(query, key, value, is_causal=True, return_residual=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_r2p.FallbackWarning)  # said above
        out, residual = attend(query, key, value)
    print(f"out: {out.dtype}{list(out.shape)}, residual: {residual.dtype}{list(residual.shape)}")

    # Query and key have one length here, so aligning to the first or to the last key is the same. In float32,
    # so that the difference is this result's rounding alone.
    exact = (x.astype(jnp.float32) for x in (query, key, value))
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(*exact, is_causal=True, implementation="xla")
    error = float(jnp.abs(out.astype(jnp.float32) - expected).max())
    print(f"largest difference from jax.nn.dot_product_attention in float32: {error:.1e}")
    allowed = 2 * float(jnp.finfo(out.dtype).eps) * float(jnp.abs(expected).max())
    if not error < allowed:
        raise SystemExit(f"that is more than rounding explains ({allowed:.1e})")

    # Two queries against all keys: masks are aligned to the last key, so these are the last two rows of
    # before.
    last, _ = attend(query[:, -2:], key, value)
    same = bool(jnp.allclose(last.astype(jnp.float32), out[:, -2:].astype(jnp.float32), atol=allowed))
    print(f"the last two queries alone give the same rows: {same}")
    if not same:
        raise SystemExit("they do not")
    ran = f"kernel {explanation.variant}" if explanation.implementation == "r2p" else "plain XLA"
    print(f"What ran: {ran}.")


if __name__ == "__main__":
    main()

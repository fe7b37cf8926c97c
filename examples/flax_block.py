"""Trains a small transformer block of Flax whose attention is `jax_r2p.flax.attention_fn`.

    pip install 'jax_r2p[flax]' && python examples/flax_block.py

The task: say again which token came eight places before. Takes seconds on a CPU, where plain XLA computes the
attention; on a Hopper GPU the kernel does.
"""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_r2p
import jax_r2p.flax

TOKENS, LENGTH, BATCH, WIDTH, BACK = 16, 32, 16, 64, 8
STEPS, STEP_SIZE = 60, 0.3


class Block(nn.Module):
    """Embedding, one attention layer and one readout."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens (B, T) to scores of the tokens (B, T, TOKENS)."""
        place = self.param("place", nn.initializers.normal(1.0), (LENGTH, WIDTH))
        x = nn.Embed(TOKENS, WIDTH)(tokens) + place
        attend = functools.partial(jax_r2p.flax.attention_fn, is_causal=True)
        layer = nn.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16, attention_fn=attend)
        return nn.Dense(TOKENS)((x + layer(x)).astype(jnp.float32))


def main() -> None:
    """Train for some steps, and say how far the loss came down."""
    warnings.simplefilter("ignore", jax_r2p.FallbackWarning)  # without a GPU
    block = Block()
    tokens = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, TOKENS)
    params = block.init(jax.random.key(1), tokens)

    def loss(params, tokens):
        scores = jax.nn.log_softmax(block.apply(params, tokens)[:, BACK:])
        return -jnp.take_along_axis(scores, tokens[:, :-BACK, None], axis=-1).mean()

    @jax.jit
    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return value, jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, grads)

    first, params = step(params, tokens)
    for _ in range(STEPS):
        last, params = step(params, tokens)
    print(f"loss before: {first:.2f}, after {STEPS} steps: {last:.2f}")
    if not last < 0.8 * first:
        raise SystemExit("that is hardly less")


if __name__ == "__main__":
    main()

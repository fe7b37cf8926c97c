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
import optax

import jax_r2p
import jax_r2p.flax

TOKENS, LENGTH, BATCH, WIDTH, BACK = 16, 32, 16, 64, 8
STEPS, STEP_SIZE = 200, 0.01


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
    block, optimizer = Block(), optax.adam(STEP_SIZE)

    def sample(seed):
        return jax.random.randint(jax.random.key(seed), (BATCH, LENGTH), 0, TOKENS)

    def loss(params, tokens):
        scores = block.apply(params, tokens)[:, BACK:]
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, :-BACK]).mean()

    @jax.jit
    def step(params, state, seed):
        value, grads = jax.value_and_grad(loss)(params, sample(seed))
        updates, state = optimizer.update(grads, state)
        return value, optax.apply_updates(params, updates), state

    params = block.init(jax.random.key(1), sample(0))
    state = optimizer.init(params)
    first, params, state = step(params, state, 0)
    for seed in range(1, STEPS + 1):  # new tokens each time, so that nothing can be learned by heart
        last, params, state = step(params, state, seed)
    print(f"loss before: {first:.2f}, after {STEPS} steps: {last:.2f}")
    if not last < 0.5 * first:
        raise SystemExit("that is hardly less")


if __name__ == "__main__":
    main()

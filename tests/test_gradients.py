"""What the GPU tests compare gradients with: checked where no GPU is, by gradients in plain XLA."""

from __future__ import annotations

import gradients
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest

import jax_r2p

PROBLEMS = {
    "none": {},
    "causal-few-keys": {"s": 30, "is_causal": True},
    "window-lengths": {
        "s": 90,
        "b": 3,
        "window": (9, 4),
        "q_lengths": (70, 0, 33),
        "kv_lengths": (50, 90, 7),
    },
    "wide-values": {"hv": 40, "h": 12, "scale": -0.4},
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_expected_gradients(name: str, dtype: str) -> None:
    """The reference, differentiated by JAX, is within the tolerance; with a mask off by one it is not."""
    p = numerics.random_problem(0, **{"t": 70, "n": 4, "k": 2, "h": 24, "dtype": dtype, **PROBLEMS[name]})
    d = gradients.random_cotangents(p)
    (want,) = gradients.expected([p], [d])

    def computed(left: int | None) -> list[np.ndarray]:
        lengths = {"query_seq_lengths": p.q_lengths, "key_value_seq_lengths": p.kv_lengths}
        window = (numerics.UNBOUNDED if x is None else x for x in (left, p.right))

        def attend(query, key, value):
            return jax_r2p.attention(
                query,
                key,
                value,
                local_window_size=tuple(window),
                scale=p.scale,
                return_residual=True,
                implementation="xla",
                **{name: jnp.asarray(x) for name, x in lengths.items() if x is not None},
            )

        _, vjp = jax.vjp(attend, *map(jnp.asarray, (p.query, p.key, p.value)))
        return [np.asarray(x, np.float32) for x in vjp((jnp.asarray(d.out), jnp.asarray(d.residual)))]

    gradients.check(computed(p.left), want, name=name)
    for full, low in zip(want.full, want.low, strict=True):
        assert full.any()
        assert np.abs(low - full).max() < 0.1 * np.abs(full).max(), "the tolerance means something"
    if p.left is not None:
        with pytest.raises(AssertionError, match="elements are off"):
            gradients.check(computed(p.left + 1), want, name=name)

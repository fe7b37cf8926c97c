"""Sizes of zero and one, in jit and out of it. The kernel is demanded: a zero size must not need the
reference.

https://github.com/Dao-AILab/flash-attention/pull/2470, https://github.com/NVIDIA/TransformerEngine/pull/1179
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call, check, kernel

SIZES = [(2, 0, 64), (2, 64, 0), (0, 64, 64), (0, 0, 0), (1, 0, 0)]
KEYWORDS = [{}, {"is_causal": True}, {"local_window_size": (3, 2)}]


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize(("b", "t", "s"), SIZES)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_zero_sizes(b, t, s, keywords, wrap):
    q, k = jnp.ones((b, t, 4, 64), jnp.bfloat16), jnp.ones((b, s, 2, 64), jnp.bfloat16)
    out, residual = wrap(lambda q, k: kernel(q, k, k, **keywords))(q, k)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros((b, t, 4, 64)))
    np.testing.assert_array_equal(residual, np.full((b, 4, t), -np.inf))


def test_no_heads():
    q, k = jnp.ones((2, 5, 0, 64), jnp.bfloat16), jnp.ones((2, 7, 1, 64), jnp.bfloat16)
    out, residual = jax.jit(lambda q, k: kernel(q, k, k))(q, k)
    assert out.shape == q.shape
    assert residual.shape == (2, 0, 5)


def test_zero_size_beside_a_real_one():
    """In one program, so that skipping the launch of one does not skip the other's."""
    call = Call(t=40)
    p = call.problem()
    empty = jnp.ones((1, 0, 2, 64), jnp.bfloat16)

    @jax.jit
    def f(q, k, v):
        return kernel(empty, k, v)[0], kernel(q, k, v)[0], kernel(q, empty, empty)[0]

    none, out, zeros = f(p.query, p.key, p.value)
    assert none.shape == (1, 0, 2, 64)
    assert not np.asarray(zeros, np.float32).any()
    np.testing.assert_array_equal(
        np.asarray(out, np.float32), np.asarray(kernel(p.query, p.key, p.value)[0], np.float32)
    )


def test_single_rows_keys_and_heads():
    check(
        [
            Call(t=1, s=1, n=1, k=1, h=h, **m)
            for h in (8, 64, 96, 128, 192, 256)
            for m in ({}, {"is_causal": True})
        ]
    )

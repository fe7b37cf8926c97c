"""`jax_r2p.dot_product_attention` in place of that of `jax.nn`: its results, by the kernel or by `jax.nn`.

What a result may be off by is the rule of numerics.py: twice what `jax.nn` itself is off by in the dtype of
the arrays, compared with `jax.nn` in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import FACTOR, FLOOR, assert_close
from processes import count_launches

import jax_r2p

ours = jax_r2p.dot_product_attention
theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def make(b=2, t=200, s=200, n=4, k=2, h=64, dtype="bfloat16"):
    """Query, key and value; without batch dimension for b = 0."""
    rng = np.random.default_rng(0)
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    return [jnp.asarray(rng.standard_normal(x if b else x[1:], np.float32), dtype) for x in shapes]


def close(got, low, exact) -> None:
    """Compares trees: `low` and `exact` are by the same operations in the dtype of `got` and in float32."""
    for i, (x, y, z) in enumerate(zip(*map(jax.tree.leaves, (got, low, exact)), strict=True)):
        x, y, z = (np.asarray(a, np.float32) for a in (x, y, z))
        assert_close(x, z, FACTOR * float(np.abs(y - z).max()) + FLOOR, name=f"result {i}")


def in_both(function, arrays) -> tuple:
    """What a function gives in the dtype of its arrays and in float32."""
    low = jax.jit(function)(*arrays)
    with jax.default_matmul_precision("highest"):
        return low, jax.jit(function)(*(x.astype(jnp.float32) for x in arrays))


def launching(function, *arrays) -> tuple:
    """What a function gives under jit, and how many kernels it launched."""
    program, results = jax.jit(function).lower(*arrays).compile(), []
    launches = count_launches(lambda: results.append(jax.block_until_ready(program(*arrays))), runs=1)
    return results[-1], launches


def with_gradients(attend, **keywords):
    """Out, and the gradients by query, key and value for a cotangent that differs from element to element."""

    def function(*arrays):
        out, pull = jax.vjp(lambda *x: attend(*x, **keywords), *arrays)
        return out, pull(
            jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
        )

    return function


LENGTHS = np.int32([77, 130])
KERNEL = {
    "plain": ({}, {}),
    "fp16": ({"dtype": "float16"}, {"is_causal": True}),
    "no batch": ({"b": 0}, {"is_causal": True}),
    "mqa": ({"n": 6, "k": 1, "h": 128}, {"is_causal": True}),
    "scale": ({}, {"scale": -0.3}),
    "causal, T < S": ({"t": 70}, {"is_causal": True}),
    "causal, T > S": ({"s": 70}, {"is_causal": True}),
    "one query": ({"t": 1}, {"key_value_seq_lengths": LENGTHS}),
    "window": ({}, {"local_window_size": (30, 7)}),
    "window, T < S": ({"t": 70}, {"local_window_size": (30, 7)}),
    "window, rows see nothing": ({"s": 70}, {"local_window_size": (30, 7)}),
    "window, causal": ({}, {"local_window_size": (30, 7), "is_causal": True}),
    "query lengths": ({}, {"query_seq_lengths": LENGTHS, "is_causal": True}),
    "key lengths": ({}, {"key_value_seq_lengths": LENGTHS}),
    "same lengths, causal": (
        {},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS, "is_causal": True},
    ),
    "narrow heads": ({"h": 20}, {"is_causal": True}),
}


@pytest.mark.parametrize("case", KERNEL)
def test_the_kernel_runs(case):
    """Values and gradients, with the kernel demanded: one launch for each at least."""
    shape, keywords = KERNEL[case]
    arrays = make(**shape)
    got, launches = launching(with_gradients(ours, implementation="r2p", **keywords), *arrays)
    assert launches >= 2
    close(got, *in_both(with_gradients(theirs, **keywords), arrays))


@pytest.mark.parametrize("case", ["causal", "window, rows see nothing", "key lengths"])
def test_residual(case):
    """Rounded to the dtype of the key, as that of `jax.nn` is."""
    shape, keywords = KERNEL.get(case, ({}, {"is_causal": True}))
    arrays = make(**shape)
    function = functools.partial(ours, **keywords, return_residual=True, implementation="r2p")
    (out, residual), launches = launching(function, *arrays)
    assert launches >= 1
    low, exact = in_both(functools.partial(theirs, **keywords, return_residual=True), arrays)
    assert residual.dtype == low[1].dtype
    hidden = np.asarray(exact[1]) < -1e38  # rows that see no key
    np.testing.assert_array_equal(np.asarray(residual, np.float32) < -1e38, hidden)
    seen = [np.where(hidden, 0, np.asarray(x, np.float32)) for x in (residual, low[1], exact[1])]
    close((out, seen[0]), (low[0], seen[1]), (exact[0], seen[2]))


@pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")
@pytest.mark.parametrize(
    ("dtype", "keywords"),
    [
        ("bfloat16", {"mask": np.tril(np.ones((1, 1, 200, 200), bool))}),
        ("bfloat16", {"bias": np.float32(np.arange(200))[None, None, None]}),
        ("bfloat16", {"key_value_seq_lengths": LENGTHS, "is_causal": True}),
        ("float32", {"is_causal": True}),
    ],
    ids=["mask", "bias", "key lengths, causal", "float32"],
)
def test_no_kernel_runs(dtype, keywords):
    """Then the call is that of `jax.nn`, bit for bit."""
    arrays = make(dtype=dtype)
    got, launches = launching(functools.partial(ours, **keywords), *arrays)
    assert launches == 0
    np.testing.assert_array_equal(got, jax.jit(functools.partial(theirs, **keywords))(*arrays))


@pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")
def test_from_a_file():
    """Exported with its gradient, and read back: the same results by the same kernels."""
    pytest.importorskip("flatbuffers", reason="jax.export writes and reads files with flatbuffers")
    arrays = make()
    function = with_gradients(ours, is_causal=True)
    export = jax.export.export(
        jax.jit(function), platforms=("cpu", "cuda"), disabled_checks=jax_r2p.DISABLED_CHECKS
    )
    program = jax.export.deserialize(export(*arrays).serialize())
    got, launches = launching(program.call, *arrays)
    assert launches >= 2
    close(got, *in_both(with_gradients(theirs, is_causal=True), arrays))

"""The preprocess kernels: rows and zeros that they leave for a backward kernel, in memory that was NaN."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import poisoned

from jax_r2p import _ffi
from jax_r2p._manifest import Variant, load_manifest

WIDTHS = (8, 56, 64, 72, 96, 128, 136, 192, 256)
QUERIES = (1, 63, 64, 65, 127, 128, 129, 300)
BATCH, HEADS, SLOTS = 3, 5, 2


@pytest.fixture(autouse=True)
def _registered():
    """The calls here do not come by the function that registers the kernels."""
    _ffi.register()


def backward_variant(dtype: str, tile_m: int) -> Variant:
    """Some backward kernel, which decides how rows and sums are laid out."""
    return next(
        v
        for v in load_manifest().variants
        if (v.role, v.dtype, v.tile_m) == ("backward", {"bfloat16": "bf16", "float16": "fp16"}[dtype], tile_m)
    )


def inputs(width: int, queries: int, dtype: str, *, lengths: bool) -> tuple[np.ndarray, ...]:
    """Out, dout, lse, dlse and lengths: NaN in rows that see no key, and in those beyond a length."""
    rng = np.random.default_rng(width + queries)
    out, dout = (
        rng.standard_normal((BATCH, queries, HEADS, width), np.float32).astype(dtype) for _ in range(2)
    )
    lse, dlse = (rng.standard_normal((BATCH, HEADS, queries), np.float32) for _ in range(2))
    sees_none = rng.random(lse.shape) < 0.1
    lse[sees_none] = -np.inf
    dlse[sees_none] = np.nan
    out[np.swapaxes(sees_none, 1, 2)] = np.nan
    if not lengths:
        return out, dout, lse, dlse, np.zeros(0, np.int32)
    counts = np.asarray([queries // 2, -1, queries + 7], np.int32)
    for i, count in enumerate(counts.clip(0, queries)):
        out[i, count:] = dout[i, count:] = np.nan
        lse[i, :, count:] = dlse[i, :, count:] = np.nan
    return out, dout, lse, dlse, counts


def expected(out, dout, lse, dlse, lengths, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """lse in base 2, delta, and what delta may be off by."""
    queries = lse.shape[-1]
    products = np.swapaxes(out.astype(np.float64) * dout.astype(np.float64), 1, 2)
    there = lse != -np.inf
    if lengths.size:
        there &= np.arange(queries) < lengths[:, None, None]
    base2, delta, error = (np.full((*lse.shape[:2], rows), fill) for fill in (np.inf, 0.0, 0.0))
    base2[..., :queries] = np.where(there, lse / math.log(2), np.inf)
    delta[..., :queries] = np.where(there, products.sum(-1) - dlse, 0)
    # A thread adds up eight products, and sums of threads meet in a tree of at most five levels.
    sizes = np.abs(products).sum(-1) + np.abs(dlse)
    error[..., :queries] = np.where(there, (8 + 5 + 1) * 2.0**-24 * sizes, 0)
    return base2, delta, error


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_and_zeros(dtype: str, tile_m: int, lengths: bool):
    """Every width and length in one program; nothing stands between the kernel and its results."""
    variant = backward_variant(dtype, tile_m)
    given = [inputs(w, t, dtype, lengths=lengths) for w in WIDTHS for t in QUERIES]
    prepare = functools.partial(_ffi._attention_preprocess, slots=SLOTS, backward=variant)

    def program(*arrays):
        return [prepare(*x) for x in arrays]

    results = poisoned(program, *jax.device_put(given), direct=True)
    for arrays, result in zip(given, results, strict=True):
        name = f"{arrays[0].shape}"
        lse, delta, sums, marks = (np.asarray(x) for x in result)
        tiles = -(-arrays[2].shape[-1] // tile_m)
        want_lse, want_delta, error = expected(*arrays, rows=tiles * tile_m)
        np.testing.assert_allclose(lse, want_lse, rtol=3e-7, err_msg=name)
        off = np.abs(delta - want_delta)
        assert (off <= error).all(), f"{name}: delta is off by {np.nanmax(off - error)} more than allowed"
        assert sums.shape == (SLOTS, tiles, tile_m * variant.head_dim)
        assert marks.shape == (SLOTS, 2 + tiles)
        assert not sums.view(np.int32).any(), name
        assert not marks.any(), name


def test_repeats_are_bit_equal():
    arrays = jax.device_put(inputs(128, 300, "bfloat16", lengths=False))
    prepare = functools.partial(
        _ffi._attention_preprocess, slots=SLOTS, backward=backward_variant("bfloat16", 64)
    )
    program = jax.jit(prepare)
    first = [np.asarray(x).tobytes() for x in program(*arrays)]
    assert all([np.asarray(x).tobytes() for x in program(*arrays)] == first for _ in range(20))


def test_more_zeros_than_one_round_of_threads():
    """Few rows, and sums of many slots."""
    variant = backward_variant("bfloat16", 128)
    out, dout, lse, dlse, lengths = jax.device_put(inputs(64, 129, "bfloat16", lengths=False))

    def program(*arrays):
        return _ffi._attention_preprocess(*arrays, slots=333, backward=variant)

    *_, sums, marks = poisoned(program, out, dout, lse, dlse, lengths, direct=True)
    assert sums.size > 1000 * 128 * BATCH * HEADS * 2
    assert not jnp.any(jax.lax.bitcast_convert_type(sums, jnp.int32))
    assert not jnp.any(marks)


def test_more_than_two_billion_elements():
    """Of out and dout. XLA computes the same, so that nothing has to leave the device."""
    shape = (2, 70_000, 128, 128)
    assert math.prod(shape) > 2**31
    out, dout = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    lse, dlse = (jax.random.normal(jax.random.key(i), (2, 128, 70_000)) for i in range(2))
    variant = backward_variant("bfloat16", 64)

    @jax.jit
    def program(out, dout, lse, dlse):
        base2, delta, _, _ = _ffi._attention_preprocess(
            out, dout, lse, dlse, np.zeros(0, np.int32), slots=1, backward=variant
        )
        want = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
        want = jnp.swapaxes(want, 1, 2) - dlse
        errors = delta[..., : lse.shape[-1]] - want, base2[..., : lse.shape[-1]] - lse * math.log2(math.e)
        return [jnp.max(jnp.abs(error)) for error in errors]

    delta_error, lse_error = program(out, dout, lse, dlse)
    # Sums of 128 products of about 1, and log-sum-exps of about 1.
    assert delta_error < 1e-4
    assert lse_error < 1e-5

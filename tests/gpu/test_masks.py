"""Causal, windows of every kind, and query and key lengths that differ, in all combinations.

Each is read out exactly (`check_visible_keys`) and compared on random inputs. Windows: empty on one side,
symmetric, either side larger, at and around a tile (63, 64, 127, 128), and longer than every length used.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import Call, check, check_visible_keys, run
from numerics import assert_close, bounds, visible

WINDOWS = {
    "causal": {"is_causal": True},
    **{
        f"window{w}": {"window": w}
        for w in ((0, 0), (0, 5), (7, 0), (7, 5), (5, 7), (63, 0), (64, 0), (0, 64))
    },
    **{
        f"window{w}": {"window": w} for w in ((64, 64), (127, 1), (1, 130), (200, 200), (128, 128), (0, 1000))
    },
    **{
        f"window{w}": {"window": w} for w in ((1000, 0), (1000, 1000), (10**6, 10**6), (2**31 - 1, 2**31 - 1))
    },
    "window3": {"window": 3},
    "causal_window(16, 16)": {"window": (16, 16), "is_causal": True},
    "causal_window(100, 0)": {"window": (100, 0), "is_causal": True},
    "causal_window70": {"window": 70, "is_causal": True},
}
# (T, S): equal, longer queries (rows with nothing to see), longer keys, single rows, single keys, tile edges
# +-1
LENGTHS = [
    (96, 96),
    (200, 72),
    (5, 2),
    (3, 128),
    (1, 257),
    (257, 1),
    (130, 300),
    (300, 130),
    (192, 191),
    (64, 65),
]
LENGTHS += [(385, 640), (640, 385)]

windows = pytest.mark.parametrize("window", WINDOWS)


@windows
@pytest.mark.parametrize("h", [64, 128])
def test_exact_mask(window, h):
    check_visible_keys([Call(t=t, s=s, n=1, h=h, **WINDOWS[window]) for t, s in LENGTHS])


@pytest.mark.parametrize(("h", "hv"), [(96, 96), (192, 192), (192, 128), (256, 256)])
def test_exact_mask_of_other_widths(h, hv):
    """Some masks of each kind: ends at blocks of 48, 64, 80 and 112 keys, in and between them."""
    masks = [WINDOWS["causal"], *({"window": w} for w in ((0, 0), (47, 48), (63, 0), (127, 1), (80, 112)))]
    check_visible_keys(
        [Call(t=t, s=s, n=1, h=h, hv=hv, **mask) for mask in masks for t, s in (*LENGTHS[4:], (500, 500))]
    )


@windows
def test_values(window):
    """GQA of 3 with two batch entries, so that a mask applied to the wrong head or batch shows; both dtypes
    and dims.
    """
    some = {"b": 2, "n": 6, "k": 2}
    calls = [Call(t=t, s=s, h=64, **some, **WINDOWS[window]) for t, s in LENGTHS]
    check(calls)
    check([Call(t=t, s=s, h=128, dtype="float16", **some, **WINDOWS[window]) for t, s in LENGTHS])


@pytest.mark.parametrize("window", [(7, 0), (0, 0), (0, 5), (7, 5), (200, 200)])
def test_one_sided_window_without_causal(window):
    """value[j] = j: row i is the mean of the keys it sees. A left window alone once let a kernel see the
    whole future.

    https://github.com/jax-ml/jax/pull/39576
    """
    t = 96
    call = Call(t=t, n=2, k=2, window=window)
    p = call.problem()
    p.query[...] = 0
    p.value[...] = np.arange(t)[None, :, None, None]
    [(out, _)] = run([call], [p])
    seen = visible(t, t, *bounds(False, window))
    mean = (seen @ np.arange(t)) / seen.sum(axis=1)
    want = np.broadcast_to(mean[None, :, None, None], out.shape)
    assert_close(out, want, 2.0**-8 * want, name=str(call))  # values up to 95 are exact in bf16; one rounding


@pytest.mark.parametrize(("t", "s"), [(200, 72), (5, 2), (3, 128), (1, 257)])
def test_causal_with_different_lengths(t, s):
    """https://github.com/Dao-AILab/flash-attention/issues/1778, https://github.com/NVIDIA/cutlass/issues/2336"""
    call = Call(t=t, s=s, n=4, k=1, is_causal=True)
    [(out, residual)] = run([call], [call.problem()])
    empty = max(t - s, 0)
    assert np.all(out[:, :empty] == 0)
    assert np.all(np.isneginf(residual[:, :empty]))
    assert np.all(np.isfinite(out.astype(np.float32)))
    assert np.all(np.isfinite(residual[:, empty:]))
    check([call])
    check_visible_keys([call])


def test_rows_before_the_first_key():
    """Windows whose band misses the keys: whole tiles of rows see nothing, before and after the keys."""
    calls = [
        Call(t=700, s=100, h=h, **mask)
        for h in (64, 128)
        for mask in ({"is_causal": True}, {"window": (0, 0)}, {"window": (500, 3)}, {"window": (3, 450)})
    ]
    check(calls)
    check_visible_keys(calls)

"""Every length up to past the largest tile, and one below and above multiples of every tile in use.

A length decides how many query and key tiles there are, which of them are partial, and which blocks need a
mask, so this is where a wrong loop bound or a missed tail shows. 52 lengths share a compiled program.
"""

from __future__ import annotations

import pytest
from harness import Call, check, check_visible_keys, fill_shared_memory_with_nan

from jax_r2p._manifest import load_manifest

CHUNK = 52
FIRST = range(1, 261)  # past 192 + 64: two tiles of every size, full and partial
CHUNKS = [FIRST[i : i + CHUNK] for i in range(0, len(FIRST), CHUNK)]
TILES = sorted(
    {tile for v in load_manifest().variants if v.role != "preprocess" for tile in (v.tile_m, v.tile_n)}
)
AROUND = sorted({m * tile + d for tile in TILES for m in range(1, 5) for d in (-1, 0, 1)} - set(FIRST))
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (37, 11)},  # crosses the diagonal, no multiple of anything
}
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
# Of the other variants, which differ in tiles only: fewer lengths.
OTHER_WIDTHS = ((96, 96), (192, 192), (192, 128), (256, 256))

variants = pytest.mark.parametrize(
    ("dtype", "h", "mask"), [(d, h, m) for d in DTYPES for h in HEAD_DIMS for m in MASKS]
)


@variants
@pytest.mark.parametrize("lengths", CHUNKS, ids=lambda x: f"{x[0]}-{x[-1]}")
def test_every_length(dtype, h, mask, lengths):
    fill_shared_memory_with_nan(h, dtype)
    check([Call(t=t, h=h, dtype=dtype, seed=t, **MASKS[mask]) for t in lengths])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("h", "hv"), OTHER_WIDTHS)
def test_every_fifth_length_of_other_widths(h, hv, mask):
    fill_shared_memory_with_nan(h, "bfloat16")
    check([Call(t=t, h=h, hv=hv, seed=t, **MASKS[mask]) for t in FIRST[::5]])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("h", "hv"), OTHER_WIDTHS)
def test_around_tiles_of_other_widths(h, hv, mask):
    fill_shared_memory_with_nan(h, "float16")
    check([Call(t=t, h=h, hv=hv, dtype="float16", seed=t, **MASKS[mask]) for t in AROUND])
    check_visible_keys([Call(t=t, n=1, h=h, hv=hv, **MASKS[mask]) for t in AROUND])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("h", "hv"), OTHER_WIDTHS)
def test_differences_of_lengths_of_other_widths(h, hv, mask):
    check_visible_keys([Call(t=130, s=s, n=1, h=h, hv=hv, **MASKS[mask]) for s in range(1, 400, 13)])


@variants
def test_around_tiles(dtype, h, mask):
    fill_shared_memory_with_nan(h, dtype)
    check([Call(t=t, h=h, dtype=dtype, seed=t, **MASKS[mask]) for t in AROUND])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "least"), [(64, 3072), (128, 256)])
def test_around_tiles_of_long_causal_calls(dtype, h, least):
    """They have kernels of their own."""
    queries = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 385)
    check([Call(t=t, s=least + t % 5 * 31, h=h, dtype=dtype, is_causal=True) for t in queries])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("h", HEAD_DIMS)
@pytest.mark.parametrize("lengths", CHUNKS, ids=lambda x: f"{x[0]}-{x[-1]}")
def test_every_length_sees_exactly_its_keys(h, mask, lengths):
    check_visible_keys([Call(t=t, n=1, h=h, **MASKS[mask]) for t in lengths])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("h", HEAD_DIMS)
def test_around_tiles_sees_exactly_its_keys(h, mask):
    check_visible_keys([Call(t=t, n=1, h=h, **MASKS[mask]) for t in AROUND])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("h", HEAD_DIMS)
def test_every_difference_of_lengths(h, mask):
    """T fixed, S over 1..260 and the other way round; steps prime to the tiles put the diagonal at many
    phases.
    """
    calls = [Call(t=130, s=s, n=1, h=h, **MASKS[mask]) for s in range(1, 261, 7)]
    calls += [Call(t=t, s=195, n=1, h=h, **MASKS[mask]) for t in range(1, 261, 9)]
    check_visible_keys(calls)

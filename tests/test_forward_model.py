"""The forward kernel's producer and consumers come to an end, and compute the blocks that they have to.

Their source runs with the names of tiles in place of elements: see forward_model.py. What is left out there
and shows on a GPU alone is the memory order of instructions.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import warnings

import numpy as np
import pytest

from jax_r2p.aot.variants import FORWARD
from jax_r2p.kernels.config import WARPGROUP_ROWS, ForwardConfig

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs the kernel compiler: pip install jax_r2p[aot]", allow_module_level=True)

with warnings.catch_warnings():
    # Of names that the compiler itself is about to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    import forward_model
    from backward_model import some_lengths
    from forward_model import Problem

CONFIGS = {name: row.config for name, row in FORWARD.items() if row.config.dtype == "bf16"}


def problem(config: ForwardConfig, rng: np.random.Generator) -> Problem:
    """Lengths about the edges of tiles, windows of some blocks, and some sequences that are shorter."""

    def near(tile: int, most: int) -> int:
        return max(1, int(tile * rng.integers(0, most) + rng.choice([-1, 0, 1, rng.integers(tile)])))

    queries, keys, batch = near(config.tile_m, 4), near(config.tile_n, 9), int(rng.integers(1, 4))
    tiles = -(-queries // config.tile_m) * batch
    query_lengths, key_lengths = (some_lengths(rng, batch, extent) for extent in (queries, keys))
    return Problem(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=1,
        left=int(rng.integers(0, 4 * config.tile_n)),
        right=int(rng.integers(0, 2 * config.tile_n)),
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        **schedule(config, tiles, batch, rng),
    )


def schedule(config: ForwardConfig, tiles: int, batch: int, rng: np.random.Generator) -> dict[str, int]:
    """Thread blocks: for causal masks with or without pairs of tiles in whole sections, here sequences."""
    if config.mask != "causal":
        return {"ctas": int(rng.integers(1, tiles + 1))}
    if tiles // batch % 2 or not (sections := int(rng.integers(batch + 1))):
        return {"ctas": tiles}
    paired = sections * (tiles // batch)
    return {"ctas": int(rng.integers(1, paired // 2 + 1)) + tiles - paired, "paired_tiles": paired}


def within(config: ForwardConfig, p: Problem, batch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Which keys of whole blocks lie within the right and the left bound of 64 rows, as many as are there."""
    t, s = (
        lengths[batch] if lengths else extent
        for lengths, extent in ((p.query_lengths, p.queries), (p.key_lengths, p.keys))
    )
    rows = np.arange(row, min(row + WARPGROUP_ROWS, t))[:, None]
    columns = np.arange(-(-p.keys // config.tile_n) * config.tile_n)
    right = np.broadcast_to(columns < s, (len(rows), len(columns)))
    if config.mask != "none":
        right = right & (columns <= rows + s - t + (p.right if config.mask == "window" else 0))
    left = np.ones_like(right)
    if config.mask == "window":
        left = columns >= rows + s - t - p.left
    return right, left


def check(config: ForwardConfig, p: Problem, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    computed = forward_model.run(config, p, seed=seed, monkeypatch=monkeypatch)
    tiles = -(-p.queries // config.tile_m)
    groups = range(0, tiles * config.tile_m, WARPGROUP_ROWS)
    assert set(computed) == set(itertools.product(range(p.batch), range(p.heads), groups))
    for (batch, _, row), blocks in computed.items():
        right, left = within(config, p, batch, row)
        by_block = (right & left).any(axis=0).reshape(-1, config.tile_n).any(axis=1)
        order = [block for block, _, _ in blocks]
        assert order == sorted(order, reverse=True)
        assert len(set(order)) == len(order)
        assert set(np.flatnonzero(by_block)) <= set(order)
        if config.own_blocks and by_block.any():
            assert len(order) == by_block.sum(), "a block of which no row of the warpgroup sees a key"
        for block, right_masked, left_masked in blocks:
            keys = slice(block * config.tile_n, (block + 1) * config.tile_n)
            assert right_masked or right[:, keys].all()
            assert left_masked or left[:, keys].all()


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_of_every_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    for seed in range(8 if CONFIGS[name].mask != "causal" else 20):
        check(CONFIGS[name], problem(CONFIGS[name], rng), monkeypatch, seed)


@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if not config.own_blocks and not config.out_in_query]
)
def test_early_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    stages = 1 if CONFIGS[name].query_in_registers else 2
    config = dataclasses.replace(CONFIGS[name], early_scores=True, query_stages=stages)
    for seed in range(15):
        check(config, problem(config, rng), monkeypatch, seed)


@pytest.mark.parametrize("window", [(1, 0), (64, 0), (300, 0), (128, 128)])
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.own_blocks])
def test_few_stages_hold_up_no_warpgroup(name: str, window, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some warpgroups have more blocks to pass on than there are stages, at the ends of the queries too."""
    config = dataclasses.replace(CONFIGS[name], stages=2, tile_n=32)
    for seed, queries in enumerate((config.tile_m * 3, config.tile_m + 1, config.tile_m * 2 - 65)):
        left, right = window
        p = Problem(batch=1, queries=queries, keys=queries, heads=2, left=left, right=right, ctas=1)
        check(config, p, monkeypatch, seed)

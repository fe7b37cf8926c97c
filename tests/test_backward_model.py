"""Sums of dquery in a model of the kernel: which thread block adds, finishes and waits for what.

The source of `add_dquery`, `finish` and what they call runs on plain numbers: see backward_model.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings

import numpy as np
import pytest

from jax_r2p.aot.variants import VARIANTS
from jax_r2p.kernels.config import BackwardConfig

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs the kernel compiler: pip install jax_r2p[aot]", allow_module_level=True)

with warnings.catch_warnings():
    # Of names that the compiler itself is about to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    import backward_model
    from backward_model import Problem, some_lengths

FACTOR = 0.5


def config_of(name: str) -> BackwardConfig:
    config = VARIANTS[name].config
    assert isinstance(config, BackwardConfig)
    return config


CONFIGS = {name: config_of(name) for name in VARIANTS if name.startswith("bwd_bf16")}
# Which no variant does: a warpgroup computes dQ of its rows in two passes.
CONFIGS["two passes"] = dataclasses.replace(CONFIGS["bwd_bf16_d128_causal"], tile_n=64)


def addend(config: BackwardConfig, *place: int) -> np.ndarray:
    """Small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(place)
    return rng.integers(-8, 9, (config.tile_m, config.head_dim)).astype(float)


def random_problem(config: BackwardConfig, rng: np.random.Generator) -> Problem:
    """A small one, with any ring that the launcher takes: see `CheckRing` in ffi/backward.cc."""
    repeat, inner, outer, kv_heads, group = (int(x) for x in rng.choice([1, 1, 2, 3], 5))
    kv_batch = inner * outer
    places, sharers = kv_batch * kv_heads, repeat * group
    together = int(rng.integers(1, places + 1))
    lag = int(rng.integers(1, math.ceil(places / together) + 1))
    most = places * sharers
    least = min((lag + 1) * together * sharers, most)
    queries, keys = int(rng.integers(1, 3 * config.tile_m)), int(rng.integers(1, 4 * config.tile_n))
    batch = repeat * kv_batch
    lengths = [some_lengths(rng, batch, extent) for extent in (queries, keys)]
    return Problem(
        batch=batch,
        queries=queries,
        heads=kv_heads * group,
        width=int(rng.choice([config.head_dim, config.head_dim - 24])),
        kv_batch=kv_batch,
        keys=keys,
        kv_heads=kv_heads,
        kv_inner=inner,
        left=int(rng.integers(0, 2 * config.tile_n)),
        right=int(rng.integers(0, config.tile_n)),
        query_lengths=lengths[0],
        key_lengths=lengths[1],
        # Often as few as there may be.
        slots=int(rng.choice([least, rng.integers(least, most + 1)])),
        together=together,
        lag=lag,
        deterministic=bool(rng.integers(2)),
    )


def check(config: BackwardConfig, p: Problem, monkeypatch, *, seed: int, resident: int) -> None:
    dquery, sums, marks, order = backward_model.run(
        config,
        p,
        lambda *place: addend(config, *place),
        factor=FACTOR,
        resident=resident,
        seed=seed,
        monkeypatch=monkeypatch,
    )
    key_blocks = math.ceil(p.keys / config.tile_n)
    tiles = marks.shape[1] - 2
    want = np.zeros((p.batch, tiles * config.tile_m, p.heads, config.head_dim))
    wanted_order: dict[tuple[int, int, int], list[int]] = {}
    for batch, head in np.ndindex(p.batch, p.heads):
        for block in reversed(range(key_blocks)):
            visited = p.visited(config, batch, block)
            for tile in range(visited.start, visited.stop):
                rows = slice(tile * config.tile_m, (tile + 1) * config.tile_m)
                want[batch, rows, head] += FACTOR * addend(config, batch, head, block, tile)
                wanted_order.setdefault((batch, head, tile), []).append(block)
    # Every element is written, and once: the model asserts that it was NaN before.
    np.testing.assert_array_equal(dquery, want[:, : p.queries, :, : p.width])
    if p.deterministic:
        assert order == wanted_order
    else:
        assert {tile: sorted(blocks) for tile, blocks in order.items()} == {
            tile: sorted(blocks) for tile, blocks in wanted_order.items()
        }
    # For the next head that has the slot.
    assert not sums.any()
    assert not marks[:, 2:].any()
    heads = p.batch * p.heads
    uses = [len(range(slot, heads, p.slots)) * key_blocks for slot in range(p.slots)]
    np.testing.assert_array_equal(marks[:, :2], np.stack([uses, uses], 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_each_row_is_finished_once_and_whole(name: str, seed: int, monkeypatch):
    config = CONFIGS[name]
    rng = np.random.default_rng((seed, list(CONFIGS).index(name)))
    p = random_problem(config, rng)
    check(config, p, monkeypatch, seed=seed, resident=int(rng.integers(1, 9)))

"""The sums of the preprocess kernel, without a GPU: its own source, on numpy for all lanes of a warp."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from jax_r2p.kernels.config import ROWS_AT_ONCE, VECTOR, PreprocessConfig

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs the kernel compiler: pip install jax_r2p[aot]", allow_module_level=True)

with warnings.catch_warnings():
    # Of names that the compiler itself is about to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax_r2p.kernels import preprocess

LANES = np.arange(32)


@pytest.fixture
def exchanges(monkeypatch) -> list[int]:
    """The offsets of the kernel's exchanges between lanes, which numpy does in their place."""
    offsets = []

    def exchange(values, offset):
        offsets.append(offset)
        return values[LANES ^ offset]

    monkeypatch.setattr(preprocess, "cute", SimpleNamespace(arch=SimpleNamespace(shuffle_sync_bfly=exchange)))
    monkeypatch.setattr(preprocess, "cutlass", SimpleNamespace(select_=np.where))
    return offsets


@pytest.mark.parametrize("width", [64, 128, 256])
def test_lanes_get_the_sums_of_their_rows(width: int, exchanges: list[int]):
    """Of each row over its group of lanes: exact, since all are small integers, and in as few exchanges."""
    config = PreprocessConfig(dtype="bf16", value_head_dim=width)
    products = np.random.default_rng(0).integers(-99, 100, (ROWS_AT_ONCE, len(LANES))).astype(np.float32)
    kernel = SimpleNamespace(config=config)
    got = preprocess.AttentionPreprocess.sum_of_row(kernel, list(products), LANES)
    group = LANES // config.lanes
    for lane in LANES:
        assert got[lane] == products[lane % ROWS_AT_ONCE, group == group[lane]].sum(), lane
    assert len(exchanges) == ROWS_AT_ONCE - 1 + int(np.log2(config.lanes // ROWS_AT_ONCE))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_threads_have_all_rows_and_columns(width: int):
    """Of a tile: groups of lanes by eight rows, lanes by eight columns; and no group is in two warps."""
    config = PreprocessConfig(dtype="fp16", value_head_dim=width)
    assert config.lanes * VECTOR == width
    assert config.threads // config.lanes * ROWS_AT_ONCE == config.tile_m
    assert len(LANES) % config.lanes == 0
    assert config.lanes >= ROWS_AT_ONCE
    assert config.threads * config.min_blocks == 512


@pytest.mark.parametrize("width", [0, 32, 96, 192, 512])
def test_other_widths_are_refused(width: int):
    with pytest.raises(ValueError, match=rf"value_head_dim={width} must be one of \(64, 128, 256\)"):
        PreprocessConfig(dtype="bf16", value_head_dim=width)

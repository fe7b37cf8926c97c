"""What the forward and the backward kernel share: layouts, copies by TMA, lengths, bounds, rounding."""

from __future__ import annotations

import math
from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.utils import LayoutEnum

from jax_r2p.kernels import blocks
from jax_r2p.kernels.config import BackwardConfig, ForwardConfig, PreprocessConfig

LOG2_E = math.log2(math.e)


class Kernel:
    """A kernel of one config."""

    def __init__(self, config: ForwardConfig | BackwardConfig | PreprocessConfig):
        """Fix everything that is static."""
        self.dtype = {"bf16": BFloat16, "fp16": Float16}[config.dtype]

    @cute.jit
    def sequence_length(self, lengths: Int64, batch: Int32, extent: Int32) -> Int32:
        """How many of the `extent` rows of an array the sequence of a batch fills.

        All warps have to come to the same blocks, and do: nothing writes the lengths meanwhile.
        """
        length = extent
        if lengths != 0:
            stored = cute.make_ptr(Int32, lengths, cute.AddressSpace.gmem, assumed_align=4)
            length = cute.arch.load(stored + batch, Int32)
            length = blocks.minimum(blocks.maximum(length, 0), extent)
        return length

    def round_pairs(self, values: Any, pairs: Any) -> None:
        """Round fp32 registers to the input type, two to a register."""
        for i in range(cute.size(pairs)):
            pairs[i] = self.pack(values[2 * i], values[2 * i + 1])

    def pack(self, low: Float32, high: Float32) -> Uint32:
        """Two fp32 numbers rounded to the input type in one register, by one instruction."""
        suffix = {BFloat16: "bf16x2", Float16: "f16x2"}[self.dtype]
        return cute.arch.inline_ptx(
            f"cvt.rn.{suffix}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Uint32],
            read_only_args=[high, low],
        )


class AttentionKernel(Kernel):
    """A kernel that computes with tiles of query, key and value."""

    def __init__(self, config: ForwardConfig | BackwardConfig):
        """Fix everything that is static."""
        super().__init__(config)
        self.tile_m = config.tile_m
        self.tile_n = config.tile_n
        self.head_dim = config.head_dim
        self.value_head_dim = config.value_head_dim
        self.stages = config.stages
        self.warpgroups = config.consumer_warpgroups
        self.mask = config.mask
        self.has_left = config.mask == "window"
        self.has_right = config.mask in ("causal", "window")

    def _shared_layout(self, tile: tuple[int, int], stages: int) -> Any:
        """Layout of `stages` row-major tiles in shared memory."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, tile[1])
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2))

    def _tma_operand(self, op: Any, array: Any, tile: tuple[int, int], stages: int) -> tuple[Any, Any, Any]:
        """The shared layout of `stages` tiles, and TMA atom and coordinates of `array`."""
        layout = self._shared_layout(tile, stages)
        one = cute.select(layout, mode=[0, 1])
        return (layout, *cpasync.make_tiled_tma_atom(op, array, one, tile))

    def _tma_tiles(
        self, operand: tuple, place: tuple, tile: tuple[int, int], which: tuple = (None, 0)
    ) -> tuple[Any, Any, Any]:
        """The copy atom of an operand, its shared stages and a row or column of a head's tiles, in mode 1."""
        atom, coords, shared = operand
        tiles = cute.local_tile(coords[place], tile, which)
        views = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return (atom, *views)

    def _right_bound(self, work: Any) -> Any:
        """The right bound: a constant 0 for causal masks, a parameter for windows, None without a mask."""
        return {"none": None, "causal": 0, "window": work.window_right}[self.mask]


def fake_array(dtype: Any, shape: tuple, align: int) -> Any:
    """A row-major array for `cute.compile`; sizes may be symbolic. `align`: bytes."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def transposed(tiles: Any) -> Any:
    """Staged row-major tiles seen as column-major ones."""
    return cute.make_tensor(tiles.iterator, cute.select(tiles.layout, mode=[1, 0, 2]))

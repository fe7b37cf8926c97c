"""What the backward kernel reads beside its operands: a row's log-sum-exp, its delta, and zeros to add to.

    delta = sum(dO * out) of a row, less the cotangent of its log-sum-exp

Both are written in whole tiles of the backward kernel. A row that is not there, or sees no key, gets an lse
of +inf and a delta of 0, so that its weights are 0.

Memory bounds it: out and dO are read once, 16 bytes a thread and load. A group of threads has the columns of
eight rows, and loads all eight before it adds anything up. The eight sums over the group are then formed
together, each exchange halving how many a thread still has: that takes 7 of them and one for each further
doubling of the group, where eight sums one after the other would take eight times its logarithm.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from jax_r2p.kernels import blocks
from jax_r2p.kernels.common import LOG2_E, Kernel, fake_array
from jax_r2p.kernels.config import ROWS_AT_ONCE, VECTOR, PreprocessConfig

ZEROS = 4
"""Elements of the sums that a thread sets at once."""


class AttentionPreprocess(Kernel):
    """Builds the preprocess kernel of one `PreprocessConfig`."""

    def __init__(self, config: PreprocessConfig):
        """Fix everything that is static."""
        super().__init__(config)
        self.config = config

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        query_lengths: Int64,
        lse_base2: cute.Tensor,
        delta: cute.Tensor,
        sums: cute.Tensor,
        marks: Int64,
        sums_size: Int64,
        marks_size: Int64,
        queries: Int32,
        rows: Int32,
        heads: Int32,
        value_head_dim: Int32,
        ctas: Int32,
        stream: CUstream,
    ):
        """Launch; the shipped launcher (ffi/) does the same in C++.

        parameters_preprocess.def says what each argument is. ctas: one for each batch entry, tile of `tile_m`
        rows and head.
        """
        self.kernel(
            out.iterator,
            dout.iterator,
            lse.iterator,
            dlse.iterator,
            query_lengths,
            lse_base2.iterator,
            delta.iterator,
            sums.iterator,
            marks,
            sums_size,
            marks_size,
            queries,
            rows,
            heads,
            value_head_dim,
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=0,
        )

    def compile_arguments(self) -> tuple:
        """Arguments for `cute.compile`: all sizes symbolic, so one cubin serves all shapes."""
        batch, queries, heads = (cute.sym_int() for _ in range(3))
        shape = (batch, queries, heads, cute.sym_int(divisibility=VECTOR))
        out, dout = (fake_array(self.dtype, shape, 16) for _ in range(2))
        lse, dlse, lse_base2, delta = (fake_array(Float32, (cute.sym_int(),), 4) for _ in range(4))
        sums = fake_array(Float32, (cute.sym_int(),), 16)
        sizes = (*[Int64(4)] * 2, *[Int32(8)] * 4, Int32(1))
        return (out, dout, lse, dlse, Int64(0), lse_base2, delta, sums, Int64(0), *sizes, make_fake_stream())

    @cute.kernel
    def kernel(
        self,
        out: cute.Pointer,
        dout: cute.Pointer,
        lse: cute.Pointer,
        dlse: cute.Pointer,
        query_lengths: Int64,
        lse_base2: cute.Pointer,
        delta: cute.Pointer,
        sums: cute.Pointer,
        marks: Int64,
        sums_size: Int64,
        marks_size: Int64,
        queries: Int32,
        rows: Int32,
        heads: Int32,
        value_head_dim: Int32,
    ):
        """Prepare a tile of rows of one head, and this CTA's share of the zeros."""
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        # Neighbouring CTAs have neighbouring heads, whose rows are neighbours in memory.
        tiles = (rows + self.config.tile_m - 1) // self.config.tile_m
        head, tile, batch = block % heads, block // heads % tiles, block // heads // tiles
        lane, group = thread % self.config.lanes, thread // self.config.lanes
        first_row = tile * self.config.tile_m + group * ROWS_AT_ONCE
        column = lane * VECTOR
        length = self.sequence_length(query_lengths, batch, queries)
        # The row whose results this thread writes, if it is one of the first of its group.
        own_row = first_row + lane % ROWS_AT_ONCE
        line = Int64(batch) * heads + head
        own_place = line * queries + blocks.minimum(own_row, queries - 1)
        natural, dlse_of_row = (
            cute.arch.load(lse + own_place, Float32),
            cute.arch.load(dlse + own_place, Float32),
        )

        values = cute.make_rmem_tensor((VECTOR, ROWS_AT_ONCE), self.dtype)
        cotangents = cute.make_rmem_tensor((VECTOR, ROWS_AT_ONCE), self.dtype)
        values.fill(0.0)
        cotangents.fill(0.0)
        if column < value_head_dim:
            for i in cutlass.range_constexpr(ROWS_AT_ONCE):
                # A row that is not there is looked up in another's place; its sum is not used.
                row = Int64(batch) * queries + blocks.minimum(first_row + i, queries - 1)
                place = (row * heads + head) * value_head_dim + column
                self.load(out + place, values[None, i])
                self.load(dout + place, cotangents[None, i])
        self.clear(sums, marks, sums_size, marks_size)

        products = []
        for i in cutlass.range_constexpr(ROWS_AT_ONCE):
            product = Float32(0.0)
            for k in cutlass.range_constexpr(VECTOR):
                product += values[k, i].to(Float32) * cotangents[k, i].to(Float32)
            products.append(product)
        row_delta = self.sum_of_row(products, lane) - dlse_of_row
        row_lse = natural * LOG2_E
        if own_row >= length or natural == -Float32.inf:
            row_lse, row_delta = Float32.inf, Float32(0.0)
        if lane < ROWS_AT_ONCE and own_row < rows:
            cute.arch.store(lse_base2 + (line * rows + own_row), row_lse)
            cute.arch.store(delta + (line * rows + own_row), row_delta)

    def load(self, source: cute.Pointer, target: Any) -> None:
        """Load 16 bytes."""
        cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(VECTOR)), target)

    @cute.jit
    def clear(self, sums: cute.Pointer, marks: Int64, sums_size: Int64, marks_size: Int64):
        """Write this thread's share of the zeros."""
        threads = Int64(cute.arch.grid_dim()[0]) * self.config.threads
        number = Int64(cute.arch.block_idx()[0]) * self.config.threads + cute.arch.thread_idx()[0]
        place = number * ZEROS
        while place < sums_size:
            cute.arch.inline_ptx(
                "st.global.v4.f32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                read_only_args=[(sums + place).toint(), Float32(0.0)],
            )
            place += threads * ZEROS
        while number < marks_size:
            cute.arch.inline_ptx(
                "st.global.b32 [{$r0}], {$r1};", read_only_args=[marks + 4 * number, Int32(0)]
            )
            number += threads

    def sum_of_row(self, products: list, lane: Int32) -> Float32:
        """Sums over the lanes of a group: lane i gets that of row i % 8, given what it has of each row."""
        offset = ROWS_AT_ONCE // 2
        while len(products) > 1:
            half = len(products) // 2
            is_upper = lane % (2 * offset) >= offset
            kept, given = [], []
            for i in range(half):
                low, high = products[i], products[half + i]
                kept.append(cutlass.select_(is_upper, high, low))
                given.append(cutlass.select_(is_upper, low, high))
            products = [
                mine + cute.arch.shuffle_sync_bfly(other, offset)
                for mine, other in zip(kept, given, strict=True)
            ]
            offset //= 2
        (total,) = products
        offset = ROWS_AT_ONCE
        while offset < self.config.lanes:
            total += cute.arch.shuffle_sync_bfly(total, offset)
            offset *= 2
        return total

"""Flash-attention forward for SM90: TMA producer, WGMMA consumers, online softmax in fp32, R2P masks.

A CTA computes one tile after another, `tile_m` query rows of one head. Warpgroup 0 is the producer: one of
its warps keeps the key and value pipelines full by TMA. Each other warpgroup owns 64 query rows, with its own
query tile, accumulators and store; only key and value blocks are shared. Blocks are visited from the last to
the first, so that the masked ones near the diagonal come first, and each kind of block has its own loop: what
no mask crosses pays for none. With `own_blocks` a warpgroup passes on those blocks of its tile of which its
own rows see nothing: windows then need no small CTAs, each of which would load the keys of its neighbours
again.

Inside a warpgroup the matmul S = Q K^T of a block is in flight together with O += P V of the block before,
and softmax runs under the latter; between warpgroups, `ping_pong` lets one issue matmuls while another does
softmax.

The method is FlashAttention-3's (Shah et al., 2024); the masks are described in `mask.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream

from jax_r2p.kernels import blocks, mask
from jax_r2p.kernels.common import LOG2_E, AttentionKernel, fake_array, transposed
from jax_r2p.kernels.config import MAX_CONSUMER_WARPGROUPS, WARPGROUP, WARPGROUP_ROWS, ForwardConfig

LN_2 = math.log(2.0)

LARGE_EXPONENT = float(2**22)
"""From this |max * scale * log2(e)| on the rounding of that product is no longer small against 1, so a row's
exponentials would share a factor that can overflow. Such rows are computed again by `repair`."""

TINY_SCALE = 2.0**-100
"""Stands for a scale of 0, which would turn a masked -inf into NaN; any finite score times it is 0 to
fp32."""


class Barrier:
    """Named barriers, each once per consumer warpgroup; number 0 belongs to `sync_threads`."""

    WARPGROUP = 1
    TURN = WARPGROUP + MAX_CONSUMER_WARPGROUPS


class Arrays(NamedTuple):
    """Device addresses of the arrays, for accesses that do not go through TMA."""

    query: Any
    key: Any
    value: Any
    lse: Any
    scale: Any


class Lengths(NamedTuple):
    """Device addresses of the lengths of the sequences, int32; 0 where all are as long as the arrays."""

    query: Any
    key: Any


class Pipelines(NamedTuple):
    """Shared-memory stages that the producer fills and the consumers empty."""

    query: Any
    key: Any
    value: Any


class Schedule(NamedTuple):
    """From which the tiles of a CTA follow. Shapes are (length, head_dim, heads, batch)."""

    query_shape: Any
    key_shape: Any
    lengths: Lengths
    value_shape: Any
    window_left: Any
    window_right: Any
    paired_tiles: Any
    section_tiles: Any
    section_heads: Any
    heads: Any
    group: Any
    kv_outer: Any
    kv_inner: Any


class Tile(NamedTuple):
    """The query rows that a CTA works on, and the sizes of the arrays around them.

    `query_rows` and `key_rows` are the extents of the arrays, `query_length` and `key_length` how much of
    them the sequence fills: addresses follow from those, masks from these.
    """

    first_row: Any
    batch: Any
    head: Any
    kv_batch: Any
    kv_head: Any
    query_rows: Any
    key_rows: Any
    query_length: Any
    key_length: Any
    heads: Any
    kv_heads: Any
    head_dim: Any
    value_head_dim: Any
    window_left: Any
    window_right: Any


class AttentionForward(AttentionKernel):
    """Builds the forward kernel of one `ForwardConfig`."""

    def __init__(self, config: ForwardConfig):
        """Fix everything that is static."""
        super().__init__(config)
        self.config = config
        self.query_slots = self.warpgroups * config.query_stages

    # Host side -------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale: cute.Tensor,
        query_lengths: Int64,
        key_lengths: Int64,
        window_left: Int32,
        window_right: Int32,
        section_heads: Int32,
        kv_outer: Int32,
        kv_inner: Int32,
        ctas: Int32,
        paired_tiles: Int32,
        stream: CUstream,
    ):
        """Encode the tensor maps and launch; the shipped launcher (ffi/) does the same in C++.

        query: (batch, query_length, heads, head_dim); key: (kv_batch, key_length, kv_heads, head_dim); value
        and out: like key and query, but value_head_dim wide; lse: float32, one entry for each (batch, head,
        row); scale: one float32. query_lengths, key_lengths: addresses of an int32 for each batch of the
        query, or 0: see `Lengths`. Batch b of the query uses batch b // kv_outer * kv_inner + b % kv_inner of
        key and value. section_heads: heads whose tiles run next to each other, so that their keys and values
        stay in L2; a divisor of their number. ctas, paired_tiles: see `tile_count`.
        """
        # (batch, length, heads, head_dim) -> (length, head_dim, heads, batch)
        by_length = [1, 3, 2, 0]
        q, k, v, o = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=by_length))
            for t in (query, key, value, out)
        )
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        out_slots = self.query_slots if self.config.out_in_query else self.warpgroups
        q_layout, q_atom, q_coords = self._tma_operand(load, q, self._query_tile, self.query_slots)
        k_layout, k_atom, k_coords = self._tma_operand(load, k, self._key_tile, self.stages)
        v_layout, v_atom, v_coords = self._tma_operand(load, v, self._value_tile, self.stages)
        o_layout, o_atom, o_coords = self._tma_operand(save, o, self._out_tile, out_slots)

        heads = q.shape[2]
        tiles = cute.ceil_div(q.shape[0], self.tile_m)
        divide = cute.fast_divmod_create_divisor_v2
        self.kernel(
            q_atom,
            q_coords,
            k_atom,
            k_coords,
            v_atom,
            v_coords,
            o_atom,
            o_coords,
            lse.iterator,
            query.iterator,
            key.iterator,
            value.iterator,
            scale.iterator,
            query_lengths,
            key_lengths,
            window_left,
            window_right,
            paired_tiles,
            divide(section_heads * tiles),
            divide(section_heads),
            divide(heads),
            divide(heads // k.shape[2]),
            divide(kv_outer),
            divide(kv_inner),
            q_layout,
            k_layout,
            v_layout,
            o_layout,
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=100,
        )

    def compile_arguments(self) -> tuple:
        """Arguments for `cute.compile`: lengths and head counts symbolic, so one cubin serves all shapes."""
        batch, query_length, heads, kv_batch, key_length, kv_heads = (cute.sym_int() for _ in range(6))
        head_dim, value_head_dim = (cute.sym_int(divisibility=8) for _ in range(2))

        query, out = (
            fake_array(self.dtype, (batch, query_length, heads, width), 16)
            for width in (head_dim, value_head_dim)
        )
        key, value = (
            fake_array(self.dtype, (kv_batch, key_length, kv_heads, width), 16)
            for width in (head_dim, value_head_dim)
        )
        lse, scale = fake_array(Float32, (cute.sym_int(),), 4), fake_array(Float32, (1,), 4)
        return (query, key, value, out, lse, scale, *[Int64(0)] * 2, *[Int32(1)] * 7, make_fake_stream())

    @property
    def _query_tile(self) -> tuple[int, int]:
        return (WARPGROUP_ROWS, self.head_dim)

    @property
    def _key_tile(self) -> tuple[int, int]:
        return (self.tile_n, self.head_dim)

    @property
    def _value_tile(self) -> tuple[int, int]:
        return (self.tile_n, self.value_head_dim)

    @property
    def _out_tile(self) -> tuple[int, int]:
        return (WARPGROUP_ROWS, self.value_head_dim)

    def _scores_matmul(self, accumulate: bool) -> Any:
        """One warpgroup's S = Q K^T or S += Q K^T, with K in shared memory."""
        k_major, source = warpgroup.OperandMajorMode.K, warpgroup.OperandSource
        q_source = source.RMEM if self.config.query_in_registers else source.SMEM
        return self._matmul(k_major, self.tile_n, q_source, accumulate)

    def _output_matmul(self) -> Any:
        """One warpgroup's O += P V, with P in registers and V read transposed."""
        return self._matmul(
            warpgroup.OperandMajorMode.MN, self.value_head_dim, warpgroup.OperandSource.RMEM, True
        )

    def _matmul(self, b_major: Any, columns: int, a_source: Any, accumulate: bool) -> Any:
        matmul = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            b_major,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, columns),
            a_source=a_source,
        )
        matmul.set(warpgroup.Field.ACCUMULATE, accumulate)
        return matmul

    # Device side -----------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_coords: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_coords: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_coords: cute.Tensor,
        o_atom: cute.CopyAtom,
        o_coords: cute.Tensor,
        lse: cute.Pointer,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        scale: cute.Pointer,
        query_lengths: Int64,
        key_lengths: Int64,
        window_left: Int32,
        window_right: Int32,
        paired_tiles: Int32,
        section_tiles: cute.FastDivmodDivisorV2,
        section_heads: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
        group: cute.FastDivmodDivisorV2,
        kv_outer: cute.FastDivmodDivisorV2,
        kv_inner: cute.FastDivmodDivisorV2,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
    ):
        """Roles, shared memory and barriers; the work is in `produce` and `consume`."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        own_outs = 0 if self.config.out_in_query else cute.cosize(o_layout)

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[Int64, 2 * self.query_slots]
            k_barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            outs: cute.struct.Align[cute.struct.MemRange[self.dtype, own_outs], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            values: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        outs = storage.queries if self.config.out_in_query else storage.outs
        s_queries = storage.queries.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_outs = outs.get_tensor(o_layout.outer, swizzle=o_layout.inner)
        s_keys = storage.keys.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_values = storage.values.get_tensor(v_layout.outer, swizzle=v_layout.inner)

        if warp_index == 0:
            for atom in (q_atom, k_atom, v_atom, o_atom):
                cpasync.prefetch_descriptor(atom)

        # One warp produces; one lane of every consuming warp says that a stage is free. The stages of the
        # query pipeline are the warpgroups of one or two tiles, each of which consumes its own.
        def make_pipeline(barriers: Any, stages: int, warps: int, tile: tuple[int, int]) -> Any:
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warps),
                tx_count=math.prod(tile) * 2,
                defer_sync=True,
            )

        pipelines = Pipelines(
            query=make_pipeline(storage.q_barriers, self.query_slots, 4, self._query_tile),
            key=make_pipeline(storage.k_barriers, self.stages, 4 * self.warpgroups, self._key_tile),
            value=make_pipeline(storage.v_barriers, self.stages, 4 * self.warpgroups, self._value_tile),
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        schedule = Schedule(
            query_shape=q_coords.shape,
            key_shape=k_coords.shape,
            lengths=Lengths(query_lengths, key_lengths),
            value_shape=v_coords.shape,
            window_left=window_left,
            window_right=window_right,
            paired_tiles=paired_tiles,
            section_tiles=section_tiles,
            section_heads=section_heads,
            heads=heads,
            group=group,
            kv_outer=kv_outer,
            kv_inner=kv_inner,
        )
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == 0:
                self.produce(
                    (q_atom, q_coords, s_queries),
                    (k_atom, k_coords, s_keys),
                    (v_atom, v_coords, s_values),
                    pipelines,
                    schedule,
                )
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consume(
                (s_queries, s_keys, s_values),
                (o_atom, o_coords, s_outs),
                pipelines,
                Arrays(query, key, value, lse, scale),
                schedule,
            )

    # Schedule --------------------------------------------------------------------------------------------

    def tile_count(self, schedule: Schedule) -> Int32:
        """How many tiles this CTA has; `tile_place` says which.

        Tiles of equal length are dealt out in turn to as many CTAs as fit on the GPU, or, where there is much
        work, to some times as many. Causal ones are not equal, but a section's first and its last are
        together as long as its second and its last but one: the first `paired_tiles` are dealt out in such
        pairs, as above. Each of the others has a CTA of its own, which the GPU starts where one has ended.
        """
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        query_rows, _, heads, batch = schedule.query_shape
        total = cute.ceil_div(query_rows, self.tile_m) * heads * batch
        if self.config.mask == "causal":
            pairing = self._pairing_ctas(schedule, total)
            rounds = (schedule.paired_tiles // 2 - cta + pairing - 1) // blocks.maximum(pairing, 1)
            return cutlass.select_(cta < pairing, 2 * rounds, Int32(1))
        return (total - cta + ctas - 1) // ctas

    def tile_place(self, schedule: Schedule, index: Int32) -> Int32:
        """The place of this CTA's tile number `index` in the order of `locate`."""
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if self.config.mask != "causal":
            return cta + index * ctas
        query_rows, _, heads, batch = schedule.query_shape
        total = cute.ceil_div(query_rows, self.tile_m) * heads * batch
        pairing = self._pairing_ctas(schedule, total)
        # A section has an even number of tiles wherever there are pairs.
        section, twice = divmod(2 * (cta + index // 2 * pairing), schedule.section_tiles)
        size = schedule.section_tiles.divisor
        place = section * size + cutlass.select_(index % 2 == 0, twice // 2, size - 1 - twice // 2)
        return cutlass.select_(cta < pairing, place, schedule.paired_tiles + cta - pairing)

    def _pairing_ctas(self, schedule: Schedule, total: Int32) -> Int32:
        """How many CTAs have pairs: all but one for each tile that is in none."""
        return cute.arch.grid_dim()[0] - (total - schedule.paired_tiles)

    def locate(self, schedule: Schedule, place: Int32) -> tuple[Tile, blocks.BlockRange]:
        """The tile at a place of the order of work, and the key blocks it visits.

        Tiles are ordered by section: some heads whose keys and values fit in L2 together, first the first
        tile of each of them, then the second, and so on. Causal sections begin with the longest tiles, the
        last.
        """
        section, place_in_section = divmod(place, schedule.section_tiles)
        tile, head_in_section = divmod(place_in_section, schedule.section_heads)
        batch, head = divmod(section * schedule.section_heads.divisor + head_in_section, schedule.heads)
        query_rows, head_dim, heads, _ = schedule.query_shape
        key_rows, _, kv_heads, _ = schedule.key_shape
        if self.config.mask == "causal":
            tile = cute.ceil_div(query_rows, self.tile_m) - 1 - tile
        work = Tile(
            first_row=tile * self.tile_m,
            batch=batch,
            head=head,
            kv_batch=batch // schedule.kv_outer * schedule.kv_inner.divisor + batch % schedule.kv_inner,
            kv_head=head // schedule.group,
            query_rows=query_rows,
            key_rows=key_rows,
            query_length=self.sequence_length(schedule.lengths.query, batch, query_rows),
            key_length=self.sequence_length(schedule.lengths.key, batch, key_rows),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=schedule.value_shape[1],
            window_left=schedule.window_left,
            window_right=schedule.window_right,
        )
        return work, self.blocks_of(work, work.first_row, self.tile_m)

    def blocks_of(self, work: Tile, first_row: Int32, rows: int) -> blocks.BlockRange:
        """The key blocks that some query rows see."""
        return blocks.block_range(
            first_row,
            tile_m=rows,
            tile_n=self.tile_n,
            query_length=work.query_length,
            key_length=work.key_length,
            left=work.window_left if self.has_left else None,
            right=self._right_bound(work),
        )

    def own_blocks(self, visited: blocks.BlockRange, work: Tile, wg: Int32) -> blocks.BlockRange:
        """The key blocks that a warpgroup computes of those its tile visits."""
        if not self.config.own_blocks:
            return visited
        own = self.blocks_of(work, work.first_row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        return own.within(visited)

    def right_limit(self, work: Tile, row: Int32) -> Int32:
        """First key that `row` does not see on the right."""
        return blocks.right_limit(
            row, query_length=work.query_length, key_length=work.key_length, right=self._right_bound(work)
        )

    def left_limit(self, work: Tile, row: Int32) -> Int32:
        """First key that `row` sees on the left."""
        return blocks.left_limit(
            row, query_length=work.query_length, key_length=work.key_length, left=work.window_left
        )

    # Producer --------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, query: tuple, key: tuple, value: tuple, pipelines: Pipelines, schedule: Schedule):
        """Load every tile's last keys, its query rows, then each key block ahead of the values before it.

        Run by one whole warp: a TMA copy elects its issuing lane itself. The loads of a tile begin as soon as
        stages are free, under the end of the tile before.
        """
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, self.query_slots)
        k_state = pipeline.make_pipeline_state(producer, self.stages)
        v_state = pipeline.make_pipeline_state(producer, self.stages)

        for index in cutlass.range(self.tile_count(schedule), unroll=1):
            work, visited = self.locate(schedule, self.tile_place(schedule, index))
            kv = (None, None, work.kv_head, work.kv_batch)
            queries = self._tma_tiles(query, (None, None, work.head, work.batch), self._query_tile)
            keys = self._tma_tiles(key, kv, self._key_tile)
            values = self._tma_tiles(value, kv, self._value_tile)

            self.load(keys, visited.stop - 1, pipelines.key, k_state)
            k_state.advance()
            for wg in cutlass.range_constexpr(self.warpgroups):
                self.load(queries, work.first_row // WARPGROUP_ROWS + wg, pipelines.query, q_state)
                q_state.advance()
            for step in cutlass.range(visited.stop - 1 - visited.start, unroll=1):
                block = visited.stop - 1 - step
                self.load(keys, block - 1, pipelines.key, k_state)
                k_state.advance()
                self.load(values, block, pipelines.value, v_state)
                v_state.advance()
            self.load(values, visited.start, pipelines.value, v_state)
            v_state.advance()

    def load(self, tiles: tuple, index: Int32, stages: Any, state: Any) -> None:
        """Wait for the stage to be free, then start the copy of tile `index` into it."""
        atom, shared, in_global = tiles
        stages.producer_acquire(state)
        cute.copy(
            atom,
            in_global[None, index],
            shared[None, state.index],
            tma_bar_ptr=stages.producer_get_barrier(state),
        )

    # Consumers -------------------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        shared: tuple,
        store: tuple,
        pipelines: Pipelines,
        arrays: Arrays,
        schedule: Schedule,
    ):
        """Compute 64 rows of each tile: softmax(Q K^T) V and its log-sum-exp."""
        s_rows, s_keys, s_values = shared
        k_pipeline, v_pipeline = pipelines.key, pipelines.value
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        lane = thread % 32

        # The first step of a score matmul overwrites the accumulator, the others add to it.
        qk, pv = (self._scores_matmul(False), self._scores_matmul(True)), self._output_matmul()
        thread_qk, thread_pv = qk[0].get_slice(0), pv.get_slice(0)
        if cutlass.const_expr(self.config.query_in_registers):
            frag_q = cute.make_rmem_tensor(a_operand_layout(self.head_dim), self.dtype)
            load = cute.make_tiled_copy_A(
                cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype),
                qk[0],
            ).get_slice(thread)
        else:
            frag_q, load = qk[0].make_fragment_A(thread_qk.partition_A(s_rows)), None
        frag_k = qk[0].make_fragment_B(thread_qk.partition_B(s_keys))
        frag_v = pv.make_fragment_B(thread_pv.partition_B(transposed(s_values)))
        scores = cute.make_rmem_tensor(qk[0].partition_shape_C((WARPGROUP_ROWS, self.tile_n)), Float32)
        acc = cute.make_rmem_tensor(pv.partition_shape_C(self._out_tile), Float32)
        # The accumulator of 64 x tile_n scores, read in register order, is the A operand of tile_n / 16
        # matmuls. It is kept as 32-bit pairs: as 16-bit elements the loop would carry a register for each.
        pairs = cute.make_rmem_tensor(self.tile_n // 4, Uint32)
        weights = cute.make_tensor(
            cute.recast_ptr(pairs.iterator, dtype=self.dtype), a_operand_layout(self.tile_n)
        )
        row_base = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        correction = cute.make_rmem_tensor(2, Float32)
        # Of the thread's two rows the first, in the warpgroup's 64, and of its columns the first, in a block.
        row_in_group = thread // 32 * 16 + lane // 4
        column = lane % 4 * 2

        scale = cute.arch.load(arrays.scale, Float32)
        magnitude = cute.arch.fmax(scale, -scale, nan=True)
        factor = cutlass.select_(magnitude == Float32(0.0), Float32(TINY_SCALE), magnitude * LOG2_E)

        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        if wg == self.warpgroups - 1:
            # The first warpgroup needs a turn to begin with; it comes from the last.
            self.pass_turn(wg)

        count = self.tile_count(schedule)
        if cutlass.const_expr(self.config.early_scores):
            first_q_state = self.begin_scores(
                (qk, scores, load, frag_q, frag_k), s_rows, pipelines, k_state, Int32(0), count, scale
            )
            self.end_scores(pipelines, first_q_state, k_state)
            k_state.advance()
        for index in cutlass.range(count, unroll=1):
            work, visited = self.locate(schedule, self.tile_place(schedule, index))
            own = self.own_blocks(visited, work, wg)
            row = work.first_row + wg * WARPGROUP_ROWS + row_in_group
            row_base.fill(-Float32.inf)
            row_sum.fill(0.0)
            acc.fill(0.0)
            k_state, v_state = self.skip(pipelines, k_state, v_state, visited.stop - own.stop)
            q_slot, q_state = self.query_stage(index, wg)
            if cutlass.const_expr(not self.config.early_scores):
                pipelines.query.consumer_wait(q_state)
                if scale < Float32(0.0):
                    self.negate(s_rows[None, None, q_slot].iterator, thread)
                    self.sync_warpgroup(wg)
                if cutlass.const_expr(self.config.query_in_registers):
                    cute.copy(load, load.partition_S(s_rows[None, None, q_slot]), load.retile(frag_q))

                # The block visited first: it takes every mask, and nothing is in flight beside it.
                k_pipeline.consumer_wait(k_state)
                self.issue_scores(qk, scores, self.query_rows(frag_q, q_slot), frag_k, k_state.index)
                self.end_scores(pipelines, q_state, k_state)
                k_state.advance()
            self.apply_mask(
                scores, work, row, (own.stop - 1) * self.tile_n + column, right=True, left=self.has_left
            )
            self.softmax(scores, row_base, row_sum, correction, factor, rows_may_be_empty=True)
            self.round_pairs(scores, pairs)

            for high, low, *bounds in own.loops(has_right=self.has_right, has_left=self.has_left):
                right, left = self.masks(*bounds)
                for step in cutlass.range(high - low, unroll=1):
                    k_pipeline.consumer_wait(k_state)
                    self.take_turn(wg)
                    self.issue_scores(qk, scores, self.query_rows(frag_q, q_slot), frag_k, k_state.index)
                    if cutlass.const_expr(self.config.rescale_late):
                        self.shrink(acc, correction)
                    v_pipeline.consumer_wait(v_state)
                    self.issue_output(pv, acc, weights, frag_v, v_state.index)
                    self.pass_turn(wg)
                    warpgroup.wait_group(1)
                    k_pipeline.consumer_release(k_state)
                    k_state.advance()
                    origin = (high - 1 - step) * self.tile_n + column
                    self.apply_mask(scores, work, row, origin, right=right, left=left)
                    self.softmax(
                        scores, row_base, row_sum, correction, factor, rows_may_be_empty=right or left
                    )
                    # P and O may be touched only when the matmul that uses them has ended.
                    warpgroup.wait_group(0)
                    v_pipeline.consumer_release(v_state)
                    v_state.advance()
                    self.round_pairs(scores, pairs)
                    if cutlass.const_expr(not self.config.rescale_late):
                        self.shrink(acc, correction)

            # No score of this tile is left to compute.
            if cutlass.const_expr(not self.config.query_in_registers and not self.config.out_in_query):
                pipelines.query.consumer_release(q_state)
            if cutlass.const_expr(self.config.rescale_late):
                self.shrink(acc, correction)
            v_pipeline.consumer_wait(v_state)
            self.issue_output(pv, acc, weights, frag_v, v_state.index)
            if cutlass.const_expr(self.config.early_scores):
                next_q_state = self.begin_scores(
                    (qk, scores, load, frag_q, frag_k), s_rows, pipelines, k_state, index + 1, count, scale
                )
                warpgroup.wait_group(1)
            else:
                warpgroup.wait_group(0)
            v_pipeline.consumer_release(v_state)
            v_state.advance()
            out_slot = q_slot if self.config.out_in_query else wg
            self.finish(store, out_slot, acc, (row_base, row_sum), scale, arrays, work, row)
            if cutlass.const_expr(self.config.early_scores):
                # After the last tile this frees what nobody waits for.
                self.end_scores(pipelines, next_q_state, k_state)
                k_state.advance()
            k_state, v_state = self.skip(pipelines, k_state, v_state, own.start - visited.start)
            if cutlass.const_expr(self.config.out_in_query):
                # The next query rows come to where the out tile is. The store is of one lane of the
                # warpgroup's first warp; the others have nothing to wait for, and have written their part
                # before the store began.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                pipelines.query.consumer_release(q_state)

        # Shared memory must outlive the stores that read it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def skip(self, pipelines: Pipelines, k_state: Any, v_state: Any, count: Int32) -> tuple[Any, Any]:
        """Free the stages of `count` blocks that only other warpgroups of the tile compute.

        Keys and values in turn, as they are loaded: the next key block may have to wait for the stage of
        these values.
        """
        if cutlass.const_expr(self.config.own_blocks):
            for _ in cutlass.range(count, unroll=1):
                # Not before it is full: until then the stage is that of an earlier block.
                pipelines.key.consumer_wait(k_state)
                pipelines.key.consumer_release(k_state)
                k_state.advance()
                pipelines.value.consumer_wait(v_state)
                pipelines.value.consumer_release(v_state)
                v_state.advance()
        return k_state, v_state

    @cute.jit
    def begin_scores(
        self,
        matmul: tuple,
        s_rows: cute.Tensor,
        pipelines: Pipelines,
        k_state: Any,
        index: Int32,
        count: Int32,
        scale: Float32,
    ) -> Any:
        """Start the first scores of this CTA's tile number `index`, whose query rows may go into registers.

        There may be none left: then the matmul has whatever shared memory holds, and nobody takes its
        result. A branch around it would cost registers.
        """
        qk, scores, load, frag_q, frag_k = matmul
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        slot, q_state = self.query_stage(index, wg)
        if index < count:
            pipelines.query.consumer_wait(q_state)
            pipelines.key.consumer_wait(k_state)
        if scale < Float32(0.0):
            self.negate(s_rows[None, None, slot].iterator, thread)
            self.sync_warpgroup(wg)
        if cutlass.const_expr(self.config.query_in_registers):
            cute.copy(load, load.partition_S(s_rows[None, None, slot]), load.retile(frag_q))
        self.issue_scores(qk, scores, self.query_rows(frag_q, slot), frag_k, k_state.index)
        return q_state

    def end_scores(self, pipelines: Pipelines, q_state: Any, k_state: Any) -> None:
        """Wait for a tile's first scores, and free their keys and, if those are in registers, query rows."""
        warpgroup.wait_group(0)
        if self.config.query_in_registers:
            # Not before: the release does not wait for the copy into registers to end, only matmuls on them
            # do. Rows that lie beyond the array are zeros that TMA need not fetch; they came fast enough to
            # be read in place of the last columns.
            pipelines.query.consumer_release(q_state)
        pipelines.key.consumer_release(k_state)

    def query_stage(self, index: Int32, wg: Int32) -> tuple[Int32, Any]:
        """Where a warpgroup's query rows of this CTA's tile number `index` are: the slot, and its state."""
        round_, stage = index // self.config.query_stages, index % self.config.query_stages
        slot = stage * self.warpgroups + wg
        return slot, pipeline.PipelineState(self.query_slots, Int32(0), slot, round_ % 2)

    def query_rows(self, frag_q: Any, slot: Int32) -> Any:
        """The query rows as operand A: registers, or those in a slot of shared memory."""
        return frag_q if self.config.query_in_registers else frag_q[None, None, None, slot]

    def issue_scores(self, qk: Any, scores: Any, frag_q: Any, frag_k: Any, stage: Int32) -> None:
        """Start S = Q K^T on the key block in `stage`."""
        warpgroup.fence()
        for k in range(cute.size(frag_q.shape[2])):
            cute.gemm(qk[k > 0], scores, frag_q[None, None, k], frag_k[None, None, k, stage], scores)
        warpgroup.commit_group()

    def issue_output(self, pv: Any, acc: Any, weights: Any, frag_v: Any, stage: Int32) -> None:
        """Start O += P V on the value block in `stage`."""
        warpgroup.fence()
        for k in range(cute.size(frag_v.shape[2])):
            cute.gemm(pv, acc, weights[None, None, k], frag_v[None, None, k, stage], acc)
        warpgroup.commit_group()

    def take_turn(self, wg: Int32) -> None:
        """Wait until the warpgroup before this one has issued its matmuls."""
        if self.config.ping_pong:
            cute.arch.barrier(barrier_id=Barrier.TURN + wg, number_of_threads=2 * WARPGROUP)

    def pass_turn(self, wg: Int32) -> None:
        """Let the next warpgroup issue its matmuls. Barriers link pairs, hence two warpgroups of threads."""
        if self.config.ping_pong:
            following = cutlass.select_(wg == self.warpgroups - 1, Int32(0), wg + 1)
            cute.arch.barrier_arrive(barrier_id=Barrier.TURN + following, number_of_threads=2 * WARPGROUP)

    def sync_warpgroup(self, wg: Int32) -> None:
        """Barrier among the 128 threads of one consumer warpgroup."""
        cute.arch.barrier(barrier_id=Barrier.WARPGROUP + wg, number_of_threads=WARPGROUP)

    @cute.jit
    def negate(self, raw_rows: cute.Pointer, thread: Int32):
        """Flip the sign of this warpgroup's query rows in shared memory, whatever their swizzle.

        A negative scale would turn the running maximum into a minimum; negating the query is exact and lets
        the rest assume a positive one.
        """
        words = cute.make_tensor(
            cute.recast_ptr(raw_rows, dtype=Uint32), cute.make_layout(WARPGROUP_ROWS * self.head_dim // 2)
        )
        for step in cutlass.range(WARPGROUP_ROWS * self.head_dim // 2 // WARPGROUP, unroll=1):
            words[step * WARPGROUP + thread] = words[step * WARPGROUP + thread] ^ Uint32(0x80008000)
        cute.arch.fence_view_async_shared()

    def masks(self, right: bool, left: bool) -> tuple[bool, bool]:
        """The masks that a block takes: of the bounds that cross it, or all in the baseline of ablations."""
        return (True, self.has_left) if self.config.mask_every_block else (right, left)

    def apply_mask(
        self, scores: Any, work: Tile, row: Int32, origin: Int32, *, right: bool, left: bool
    ) -> None:
        """Set scores outside the bounds that their block crosses to -inf.

        `origin`: the key at the thread's first column of the block.
        """
        if not right and not left:
            return
        # Without a right bound the end of the keys limits both rows alike.
        rows = 2 if self.has_right else 1
        below = tuple(self.right_limit(work, row + 8 * r) - origin for r in range(rows)) if right else ()
        above = tuple(self.left_limit(work, row + 8 * r) - origin for r in range(2)) if left else ()
        if self.config.mask_lowering == "r2p":
            mask.apply_r2p(scores, below=below, above=above)
        else:
            # Row 0 or 1 and columns from the thread's own first: one coordinate an accumulator register.
            count = cute.size(scores)
            coordinates = [(i // 2 % 2, mask.element_column(i // 4 * 2 + i % 2)) for i in range(count)]
            mask.apply_compare(
                scores,
                coordinates,
                below=(lambda r: below[r % rows]) if right else None,
                above=(lambda r: above[r]) if left else None,
            )

    def softmax(
        self,
        scores: Any,
        row_base: Any,
        row_sum: Any,
        correction: Any,
        factor: Float32,
        *,
        rows_may_be_empty: bool,
    ) -> None:
        """Turn scores into exp2(score * factor - base), in place.

        `row_base` is the largest score * factor so far, rounded, and carried so: exponentials of all blocks
        must have the very same base. Were the product formed anew here, it would be fused with the difference
        below and not be rounded, and every block would weigh a little less or more than the one before it, by
        2^-24 of the product. `correction` becomes the factor by which what was summed before shrinks.
        `row_sum` is this thread's share; four lanes hold a row.
        """
        count = cute.size(scores) // 2
        for r in range(2):
            index = [mask.score_index(r, e) for e in range(count)]
            largest = reduce_by_four([scores[i] for i in index], cute.arch.fmax)
            largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
            before = row_base[r]
            row_base[r] = base = cute.arch.fmax(before, largest * factor)
            if rows_may_be_empty:
                # -inf - -inf is NaN: a row without a visible key so far is based on 0.
                base = cutlass.select_(base == -Float32.inf, Float32(0.0), base)
            correction[r] = cute.arch.exp2(before - base)
            for i in index:
                scores[i] = cute.arch.exp2(scores[i] * factor - base)
            total = reduce_by_four([scores[i] for i in index], lambda a, b: a + b)
            row_sum[r] = row_sum[r] * correction[r] + total

    @cute.jit
    def shrink(self, acc: cute.Tensor, correction: cute.Tensor):
        """Multiply what is summed of O by `correction`, which mostly is 1 for all rows of a warp."""
        if cutlass.const_expr(self.config.skip_rescale):
            grown = (correction[0] != Float32(1.0)) | (correction[1] != Float32(1.0))
            if cute.arch.vote_ballot_sync(grown) != 0:
                self.rescale(acc, correction)
        else:
            self.rescale(acc, correction)

    def rescale(self, acc: Any, row_factor: Any) -> None:
        """Multiply each of the thread's two rows of `acc` by its factor."""
        for r in range(2):
            for e in range(cute.size(acc) // 2):
                i = mask.score_index(r, e)
                acc[i] = acc[i] * row_factor[r]

    def clear_rows_beyond(self, acc: Any, work: Tile, row: Int32) -> None:
        """Set to 0 what of the thread's two rows of `acc` lies beyond the sequence; it may be NaN."""
        for r in range(2):
            beyond = row + 8 * r >= work.query_length
            for e in range(cute.size(acc) // 2):
                i = mask.score_index(r, e)
                acc[i] = cutlass.select_(beyond, Float32(0.0), acc[i])

    @cute.jit
    def finish(
        self,
        store: tuple,
        slot: Int32,
        acc: cute.Tensor,
        statistics: tuple,
        scale: Float32,
        arrays: Arrays,
        work: Tile,
        row: Int32,
    ):
        """Normalise, write the log-sum-exp, repair the rows that need it, and store 64 rows by TMA."""
        row_base, row_sum = statistics
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % 32
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg, warp_in_group = warp_index // 4 - 1, warp_index % 4

        inverse = cute.make_rmem_tensor(2, Float32)
        suspect = [Boolean(False), Boolean(False)]
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            base = row_base[r]
            empty = base == -Float32.inf or row + 8 * r >= work.query_length
            inverse[r] = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            log_sum = cutlass.select_(
                empty, -Float32.inf, (base + cute.math.log2(total, fastmath=True)) * LN_2
            )
            if lane % 4 == 0 and row + 8 * r < work.query_rows:
                cute.arch.store(self.lse_of(arrays, work, row + 8 * r), log_sum)
            # A NaN is not below the limit either.
            suspect[r] = not (cute.arch.fmax(base, -base, nan=True) < LARGE_EXPONENT) and not empty
        self.rescale(acc, inverse)
        if row - lane // 4 + 16 > work.query_length:  # the same for all lanes of a warp
            self.clear_rows_beyond(acc, work, row)
        for r in cutlass.range_constexpr(2):
            # 0 * x summed over the row is 0 unless some x is infinite or NaN.
            probe = reduce_by_four(
                [acc[mask.score_index(r, e)] * Float32(0.0) for e in range(cute.size(acc) // 2)],
                lambda a, b: a + b,
            )
            suspect[r] = suspect[r] or probe != Float32(0.0)

        # What used the stage is done with it: the store of the tile before, or matmuls on the query there.
        o_atom, o_coords, s_outs = store
        s_out = s_outs[None, None, slot]
        if warp_in_group == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync_warpgroup(wg)
        pairs = cute.make_rmem_tensor(cute.size(acc) // 2, Uint32)
        self.round_pairs(acc, pairs)
        rounded = cute.make_tensor(cute.recast_ptr(pairs.iterator, dtype=self.dtype), acc.layout)
        save = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype),
            self._output_matmul(),
        ).get_slice(thread)
        cute.copy(save, save.retile(rounded), save.partition_D(s_out))

        for r in cutlass.range_constexpr(2):
            flagged = cute.arch.vote_ballot_sync(suspect[r])
            if flagged != 0:
                for i in cutlass.range(8, unroll=1):
                    if ((flagged >> (4 * i)) & 15) != 0:
                        local = warp_in_group * 16 + 8 * r + i
                        self.repair(s_out, local, scale, arrays, work, wg)

        cute.arch.fence_view_async_shared()
        self.sync_warpgroup(wg)
        if warp_in_group == 0:
            _, s_view, g_view = self._tma_tiles(
                (o_atom, o_coords, s_outs),
                (None, None, work.head, work.batch),
                self._out_tile,
            )
            cute.copy(o_atom, s_view[None, slot], g_view[None, work.first_row // WARPGROUP_ROWS + wg])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def repair(
        self,
        s_out: cute.Tensor,
        local_row: Int32,
        scale: Float32,
        arrays: Arrays,
        work: Tile,
        wg: Int32,
    ):
        """Compute one row again by a warp, from global memory, over its visible keys alone.

        The main loop multiplies a masked weight of 0 with whatever the value block holds, and 0 * NaN is
        NaN; and huge scores leave its exponentials a common factor that can overflow. Both show in the
        result and are rare, so they are paid for only here. A row whose visible keys or values are NaN
        stays NaN, after as few keys as it takes to know.
        """
        row = work.first_row + wg * WARPGROUP_ROWS + local_row
        lane = cute.arch.lane_idx()
        q_chunk, v_chunk = lane_chunk(self.head_dim), lane_chunk(self.value_head_dim)
        q_active, v_active = lane * q_chunk < work.head_dim, lane * v_chunk < work.value_head_dim
        q_first = cutlass.select_(q_active, lane * q_chunk, 0)
        v_first = cutlass.select_(v_active, lane * v_chunk, 0)

        if row < work.query_length:
            stop = self.right_limit(work, row)
            key_index = Int32(0)
            if cutlass.const_expr(self.has_left):
                key_index = blocks.maximum(self.left_limit(work, row), 0)
            query_row = (Int64(work.batch) * work.query_rows + row) * work.heads + work.head
            q = self.load_chunk(arrays.query, query_row * work.head_dim + q_first, q_active, q_chunk)
            largest, total = Float32(-Float32.inf), Float32(0.0)
            acc = cute.make_rmem_tensor(v_chunk, Float32)
            acc.fill(0.0)
            factor = scale * LOG2_E
            while key_index < stop and total == total:
                key_row = (Int64(work.kv_batch) * work.key_rows + key_index) * work.kv_heads + work.kv_head
                k = self.load_chunk(arrays.key, key_row * work.head_dim + q_first, q_active, q_chunk)
                v = self.load_chunk(arrays.value, key_row * work.value_head_dim + v_first, v_active, v_chunk)
                dot = q[0] * k[0]
                for e in cutlass.range_constexpr(1, q_chunk):
                    dot = dot + q[e] * k[e]
                score = cute.arch.warp_reduction_sum(dot) * factor
                before = largest
                largest = cute.arch.fmax(largest, score)
                base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
                shrink = cute.arch.exp2(before - base)
                weight = cute.arch.exp2(score - base)
                total = total * shrink + weight
                for e in cutlass.range_constexpr(v_chunk):
                    acc[e] = acc[e] * shrink + weight * v[e]
                key_index += 1

            empty = largest == -Float32.inf and total == Float32(0.0)
            inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            if lane * v_chunk < self.value_head_dim:
                for e in cutlass.range_constexpr(v_chunk):
                    s_out[local_row, lane * v_chunk + e] = (acc[e] * inverse).to(self.dtype)
            if lane == 0:
                log_sum = cutlass.select_(
                    empty, -Float32.inf, (largest + cute.math.log2(total, fastmath=True)) * LN_2
                )
                cute.arch.store(self.lse_of(arrays, work, row), log_sum)

    def lse_of(self, arrays: Arrays, work: Tile, row: Int32) -> Any:
        """Address of a row's log-sum-exp in the (batch, heads, query_rows) array."""
        return arrays.lse + ((Int64(work.batch) * work.heads + work.head) * work.query_rows + row)

    def load_chunk(self, base: Any, offset: Int64, active: Boolean, chunk: int) -> list:
        """This lane's `chunk` elements of a global row as fp32; 0 beyond the head's width."""
        row = cute.make_tensor(base + offset, cute.make_layout(chunk))
        return [cutlass.select_(active, row[e].to(Float32), Float32(0.0)) for e in range(chunk)]


def lane_chunk(width: int) -> int:
    """Neighbouring columns that a lane has of a row of `width`.

    A divisor of 8, as which a head's width is a multiple of it: no chunk lies half beyond the head.
    """
    return next(chunk for chunk in (1, 2, 4, 8) if 32 * chunk >= width)


def a_operand_layout(depth: int) -> Any:
    """Layout of a thread's registers that hold 64 x depth 16-bit elements as operand A of WGMMAs."""
    return cute.make_layout(((2, 2, 2), 1, depth // 16))


def reduce_by_four(values: list, combine: Any) -> Any:
    """Combine values in four chains, then the four results: short dependences for the scheduler."""
    chains = values[:4]
    for i, value in enumerate(values[4:]):
        chains[i % 4] = combine(chains[i % 4], value)
    while len(chains) > 1:
        chains = [combine(a, b) for a, b in zip(chains[::2], chains[1::2], strict=True)]
    return chains[0]

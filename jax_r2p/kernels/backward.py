"""Flash-attention backward for SM90: the cotangents of query, key and value from those of out and residual.

One CTA owns `tile_n` keys of one head of key and value, and goes through the query tiles that see them, for
every query head that shares the keys. Scores are computed transposed, S^T = K Q^T: a thread then holds its
weights P^T and their cotangents dS^T in the registers in which the matmuls dV += P^T dO and dK += dS^T Q take
them, and a row of its tile is one key, whose bounds in queries `mask.py` turns into predicates as it does in
the forward pass. Only dS goes through shared memory, for dQ = dS K; those tiles are added in fp32 in global
memory by the bulk copy unit, which needs no thread. When all is added that belongs to a head, two warps that
have no other task turn its sums into rows.

A consumer warpgroup has 64 of the keys. Where heads are wide both have the same ones and divide the columns
of dK and dV; then weights, too, go through shared memory.

    P = exp2(S * scale * log2(e) - lse),   dS = P * (dP - delta),   dP = dO V^T

with lse in base 2 and delta = sum(dO * out) of a row less the cotangent of its log-sum-exp. A row that is not
there, or sees no key, comes with lse = +inf and delta = 0, so that its weights are 0.

Within a step the matmuls are ordered so that one always runs under the arithmetic of another: dP under the
exponentials, dV under the computation of dS (unless weights go through shared memory), dK under the write of
dQ and, where registers suffice, until the next step's scores are there. With `delay_dquery` dQ is that of the
step before, whose dS is there by then: warpgroups do not wait for each other, and one computes while another
multiplies.

The method is FlashAttention-2's and -3's (Dao, 2023; Shah et al., 2024).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream

from jax_r2p.kernels import blocks, mask
from jax_r2p.kernels.common import LOG2_E, AttentionKernel, fake_array, transposed
from jax_r2p.kernels.config import FINISH_WARPS, WARPGROUP, WARPGROUP_ROWS, BackwardConfig, box_columns

REDUCE_WARP = 1
"""The warp of the producing warpgroup that adds dQ to global memory; warp 0 loads, the others finish."""

WARP = 32
DQ_COLUMNS = 64
"""Columns of dQ that a warpgroup computes at a time."""

DQ_PART = WARPGROUP_ROWS * DQ_COLUMNS
"""Elements of dQ that it hands over at a time."""

FINISHED_OFFSET = 4
TURNS_OFFSET = 8
"""Marks of a slot, each an int32: how many CTAs have added to all of its heads so far; from these offsets in
bytes on, how many have finished their tiles of them, and, for each query tile, how many blocks have added to
it."""

DS_STAGES = 2
"""Tiles of dS in shared memory. With two, one barrier a step is enough: a warp that writes the tile of step i
has passed the barrier of step i - 1, at which all others had finished reading the tile of step i - 2."""


class Barrier:
    """Named barriers; number 0 belongs to `sync_threads`, and those of dQ exist for each warpgroup."""

    CONSUMERS = 1
    DQ_EMPTY = 2
    DQ_FULL = 4
    FINISHED = 6


class Schedule(NamedTuple):
    """From which the work of a CTA follows. Shapes are (length, head_dim, heads, batch)."""

    query_shape: Any
    key_shape: Any
    query_lengths: Any
    key_lengths: Any
    window_left: Any
    window_right: Any
    group: Any
    kv_repeat: Any
    kv_inner: Any
    slots: Any
    together: Any
    lag: Any
    deterministic: Any


class Block(NamedTuple):
    """The keys that a CTA owns: a block of a head. `place` numbers the heads of keys of all batches."""

    index: Any
    place: Any
    head: Any
    batch: Any


class Slot(NamedTuple):
    """Where a query head's sums are: their first tile, their marks, and what these count for heads before."""

    tile: Any
    marks: Any
    uses: Any


class Work(NamedTuple):
    """The keys of a CTA beside one of the query heads that share them."""

    first_key: Any
    batch: Any
    head: Any
    query_length: Any
    key_length: Any
    window_left: Any
    window_right: Any


class Matmuls(NamedTuple):
    """The five matmuls of a step; in pairs: one that overwrites its accumulator, and one that adds to it."""

    scores: Any
    dquery: Any
    dkey: Any
    dvalue: Any


class Operands(NamedTuple):
    """Operands in shared memory, as matmuls take them; `ds` and `weights` where they are not in registers."""

    keys: Any
    values: Any
    queries: Any
    douts: Any
    queries_by_row: Any
    douts_by_row: Any
    ds: Any
    weights: Any
    ds_by_row: Any
    keys_by_row: Any


class Registers(NamedTuple):
    """What a thread holds. `weights` and `ds` are `weight_pairs` and `ds_pairs` as operands of matmuls."""

    scores: Any
    products: Any
    dquery: Any
    dkey: Any
    dvalue: Any
    weight_pairs: Any
    weights: Any
    weights_rounded: Any
    ds_pairs: Any
    ds: Any
    ds_rounded: Any


class Pipelines(NamedTuple):
    """Shared-memory stages that the producer fills and the consumers empty."""

    query: Any
    dout: Any
    key: Any
    value: Any


class AttentionBackward(AttentionKernel):
    """Builds the backward kernel of one `BackwardConfig`."""

    def __init__(self, config: BackwardConfig):
        """Fix everything that is static."""
        super().__init__(config)
        self.config = config
        self.dout_stages = config.dout_stages
        self.consumer_threads = self.warpgroups * WARPGROUP
        # Warpgroups share out keys, each with all columns of dK and dV; or, where these are too many for its
        # registers, columns, and then the queries of the scores, which all of them need.
        self.split_columns = config.split_columns
        self.delay_dquery = config.delay_dquery
        parts = self.warpgroups if self.split_columns else 1
        self.own_queries = config.tile_m // parts
        self.own_columns = config.head_dim // parts
        self.own_value_columns = config.value_head_dim // parts
        # A warpgroup computes 64 rows of dQ: those of its number, or all there are and its share of columns.
        self.dq_by_rows = config.tile_m == self.warpgroups * WARPGROUP_ROWS
        self.dq_columns = config.head_dim if self.dq_by_rows else config.head_dim // self.warpgroups
        # More than 64 columns at once would not leave registers enough.
        self.dq_passes = self.dq_columns // DQ_COLUMNS
        # A finishing warp turns a chunk of 64 rows and some columns at a time into rows.
        self.chunk = WARPGROUP_ROWS * config.finish_columns
        self.part_steps = DQ_COLUMNS // (FINISH_WARPS * config.finish_columns)
        self.tile_steps = self.dq_passes * self.warpgroups * self.part_steps

    # Host side -------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        dout: cute.Tensor,
        dkey: cute.Tensor,
        dvalue: cute.Tensor,
        dquery: cute.Tensor,
        sums: cute.Tensor,
        marks: Int64,
        lse: cute.Tensor,
        delta: cute.Tensor,
        scale: cute.Tensor,
        dquery_factor: cute.Tensor,
        query_lengths: Int64,
        key_lengths: Int64,
        window_left: Int32,
        window_right: Int32,
        group: Int32,
        kv_repeat: Int32,
        kv_inner: Int32,
        slots: Int32,
        together: Int32,
        lag: Int32,
        deterministic: Int32,
        ctas: Int32,
        stream: CUstream,
    ):
        """Encode the tensor maps and launch; the shipped launcher (ffi/) does the same in C++.

        query, dquery and dout: (batch, query_length, heads, head_dim or value_head_dim); key, dkey:
        (kv_batch, key_length, kv_heads, head_dim); value, dvalue: likewise, value_head_dim wide. sums:
        float32, zeros, for each slot and query tile the tile_m * head_dim sums of a tile, in the order of
        `store_dquery`. marks: address of (slots, 2 + tiles) int32, zeros: see TURNS_OFFSET. lse, delta:
        float32, tile_m for each (batch, head, query tile). scale, dquery_factor: one float32 each.
        query_lengths, key_lengths: addresses of an int32 for each batch of the query, or 0. group: query
        heads of a key head. kv_repeat, kv_inner: batch b of the query uses batch b // (kv_repeat * kv_inner)
        * kv_inner + b % kv_inner of key and value. slots, lag: see `finish`; together: see `block`.
        deterministic: 0 for sums in any order. ctas: one for each block of keys, and for those of `lag` times
        `together` heads more.
        """
        by_length = [1, 3, 2, 0]
        q, k, v, do, dk, dv = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=by_length))
            for t in (query, key, value, dout, dkey, dvalue)
        )
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_layout, q_atom, q_coords = self._tma_operand(load, q, self._query_tile, self.stages)
        do_layout, do_atom, do_coords = self._tma_operand(load, do, self._dout_tile, self.dout_stages)
        k_layout, k_atom, k_coords = self._tma_operand(load, k, self._key_tile, 1)
        v_layout, v_atom, v_coords = self._tma_operand(load, v, self._value_tile, 1)
        _, dk_atom, dk_coords = self._tma_operand(save, dk, (WARPGROUP_ROWS, self.own_columns), 1)
        _, dv_atom, dv_coords = self._tma_operand(save, dv, (WARPGROUP_ROWS, self.own_value_columns), 1)
        ds_layout = self._shared_layout((self.tile_n, self.tile_m), DS_STAGES)
        self.kernel(
            q_atom,
            q_coords,
            k_atom,
            k_coords,
            v_atom,
            v_coords,
            do_atom,
            do_coords,
            dk_atom,
            dk_coords,
            dv_atom,
            dv_coords,
            dquery.iterator,
            sums.iterator,
            marks,
            lse.iterator,
            delta.iterator,
            scale.iterator,
            dquery_factor.iterator,
            query_lengths,
            key_lengths,
            window_left,
            window_right,
            group,
            kv_repeat,
            kv_inner,
            slots,
            together,
            lag,
            deterministic,
            q_layout,
            k_layout,
            v_layout,
            do_layout,
            ds_layout,
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

        query, dquery, dout = (
            fake_array(self.dtype, (batch, query_length, heads, width), 16)
            for width in (head_dim, head_dim, value_head_dim)
        )
        key, value, dkey, dvalue = (
            fake_array(self.dtype, (kv_batch, key_length, kv_heads, width), 16)
            for width in (head_dim, value_head_dim) * 2
        )
        sums, lse, delta = (fake_array(Float32, (cute.sym_int(),), 16) for _ in range(3))
        scale, dquery_factor = (fake_array(Float32, (1,), 4) for _ in range(2))
        arrays = (query, key, value, dout, dkey, dvalue, dquery, sums, Int64(0), lse, delta)
        numbers = (*[Int64(0)] * 2, *[Int32(1)] * 10)
        return (*arrays, scale, dquery_factor, *numbers, make_fake_stream())

    @property
    def _query_tile(self) -> tuple[int, int]:
        return (self.tile_m, self.head_dim)

    @property
    def _dout_tile(self) -> tuple[int, int]:
        return (self.tile_m, self.value_head_dim)

    @property
    def _key_tile(self) -> tuple[int, int]:
        return (self.tile_n, self.head_dim)

    @property
    def _value_tile(self) -> tuple[int, int]:
        return (self.tile_n, self.value_head_dim)

    def _matmul(self, columns: int, *, a: str, b_major: Any, accumulate: bool) -> Any:
        """A warpgroup's 64 x columns matmul. `a`: "rows", "columns" (transposed) or "registers"."""
        major, source = warpgroup.OperandMajorMode, warpgroup.OperandSource
        matmul = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            major.MN if a == "columns" else major.K,
            b_major,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, columns),
            a_source=source.RMEM if a == "registers" else source.SMEM,
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
        do_atom: cute.CopyAtom,
        do_coords: cute.Tensor,
        dk_atom: cute.CopyAtom,
        dk_coords: cute.Tensor,
        dv_atom: cute.CopyAtom,
        dv_coords: cute.Tensor,
        dquery: cute.Pointer,
        sums: cute.Pointer,
        marks: Int64,
        lse: cute.Pointer,
        delta: cute.Pointer,
        scale: cute.Pointer,
        dquery_factor: cute.Pointer,
        query_lengths: Int64,
        key_lengths: Int64,
        window_left: Int32,
        window_right: Int32,
        group: Int32,
        kv_repeat: Int32,
        kv_inner: Int32,
        slots: Int32,
        together: Int32,
        lag: Int32,
        deterministic: Int32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        do_layout: cute.ComposedLayout,
        ds_layout: cute.ComposedLayout,
    ):
        """Roles, shared memory, barriers; the work is in `produce`, `add_dquery`, `finish` and `consume`."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Weights go through shared memory where a warpgroup needs also those of others.
        weights_layout = self._shared_layout((self.tile_n, self.tile_m), 1)
        weight_tiles = cute.cosize(weights_layout) if self.split_columns else 0
        finishing = FINISH_WARPS * self.config.finish_stages

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            do_barriers: cute.struct.MemRange[Int64, 2 * self.dout_stages]
            k_barriers: cute.struct.MemRange[Int64, 2]
            v_barriers: cute.struct.MemRange[Int64, 2]
            ds_barriers: cute.struct.MemRange[Int64, DS_STAGES]
            chunk_barriers: cute.struct.MemRange[Int64, finishing]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, self.stages * self.tile_m], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, self.dout_stages * self.tile_m], 128]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            values: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            douts: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(do_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ds_layout)], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[self.dtype, weight_tiles], 1024]
            dquery: cute.struct.Align[cute.struct.MemRange[Float32, self.warpgroups * DQ_PART], 1024]
            chunks: cute.struct.Align[cute.struct.MemRange[Float32, finishing * self.chunk], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        s_queries = storage.queries.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_douts = storage.douts.get_tensor(do_layout.outer, swizzle=do_layout.inner)
        s_keys = storage.keys.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_values = storage.values.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        s_ds = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        s_weights = None
        if cutlass.const_expr(self.split_columns):
            s_weights = storage.weights.get_tensor(weights_layout.outer, swizzle=weights_layout.inner)
        # A thread's columns of a row of statistics: 2 * (lane % 4) + {0, 1} + 8 * j.
        s_lse, s_delta = (
            cute.make_tensor(
                rows.data_ptr(),
                cute.make_layout((2, 4, self.tile_m // 8, stages), stride=(1, 2, 8, self.tile_m)),
            )
            for rows, stages in ((storage.lse, self.stages), (storage.delta, self.dout_stages))
        )

        if warp_index == 0:
            for atom in (q_atom, k_atom, v_atom, do_atom, dk_atom, dv_atom):
                cpasync.prefetch_descriptor(atom)

        consumer_warps = self.consumer_threads // WARP

        # One warp produces; one lane of every consuming warp says that a stage is free.
        def make_pipeline(barriers: Any, stages: int, size: int) -> Any:
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumer_warps),
                tx_count=size,
                defer_sync=True,
            )

        # With its rows a stage holds one statistic of each.
        pipelines = Pipelines(
            query=make_pipeline(storage.q_barriers, self.stages, self.tile_m * (2 * self.head_dim + 4)),
            dout=make_pipeline(
                storage.do_barriers, self.dout_stages, self.tile_m * (2 * self.value_head_dim + 4)
            ),
            key=make_pipeline(storage.k_barriers, 1, self.tile_n * 2 * self.head_dim),
            value=make_pipeline(storage.v_barriers, 1, self.tile_n * 2 * self.value_head_dim),
        )
        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(DS_STAGES):
                    cute.arch.mbarrier_init(storage.ds_barriers.data_ptr() + stage, consumer_warps)
                for number in cutlass.range_constexpr(finishing):
                    cute.arch.mbarrier_init(storage.chunk_barriers.data_ptr() + number, 1)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        schedule = Schedule(
            query_shape=q_coords.shape,
            key_shape=k_coords.shape,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            window_left=window_left,
            window_right=window_right,
            group=group,
            kv_repeat=kv_repeat,
            kv_inner=kv_inner,
            slots=slots,
            together=together,
            lag=lag,
            deterministic=deterministic,
        )
        # The last CTAs only finish what those before have added.
        computes = cute.arch.block_idx()[0] < self.cta_count(schedule)
        self.exit_if(not computes and warp_index >= WARPGROUP // WARP)
        if warp_index < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == 0 and computes:
                self.produce(
                    (q_atom, q_coords, s_queries),
                    (k_atom, k_coords, s_keys),
                    (v_atom, v_coords, s_values),
                    (do_atom, do_coords, s_douts),
                    (lse, s_lse),
                    (delta, s_delta),
                    pipelines,
                    schedule,
                )
            if warp_index == REDUCE_WARP and computes:
                self.add_dquery(sums, marks, storage.dquery.data_ptr(), schedule)
            if warp_index > REDUCE_WARP:
                self.finish(
                    dquery,
                    sums,
                    marks,
                    dquery_factor,
                    storage.chunks.data_ptr(),
                    storage.chunk_barriers.data_ptr(),
                    schedule,
                )
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consume(
                (s_queries, s_keys, s_values, s_douts, s_ds, s_weights),
                (s_lse, s_delta),
                storage.dquery.data_ptr(),
                storage.ds_barriers.data_ptr(),
                (dk_atom, dk_coords),
                (dv_atom, dv_coords),
                scale,
                pipelines,
                schedule,
            )

    def exit_if(self, condition: Any) -> None:
        """End the thread. A branch around what consumers do otherwise would cost registers, and so spills."""
        cute.arch.inline_ptx(
            "{{ .reg .pred ends; setp.ne.s32 ends, {$r0}, 0; @ends exit; }}",
            read_only_args=[cutlass.select_(condition, Int32(1), Int32(0))],
        )

    # Schedule --------------------------------------------------------------------------------------------

    def block(self, schedule: Schedule, cta: Int32) -> Block:
        """The keys of a CTA. Blocks of a head start together: they share its query rows in L2.

        The first blocks of a causal head see the most queries, and begin; those of `together` heads, so that
        what is left for the end is short. Sums in a fixed order begin with the last block instead: it adds to
        a query tile before those that wait for it are started.
        """
        _, _, heads, batches = schedule.key_shape
        count = self.block_count(schedule)
        group, rest = divide(cta, schedule.together * count)
        first_place = group * schedule.together
        index, place = divide(rest, blocks.minimum(schedule.together, heads * batches - first_place))
        place += first_place
        index = cutlass.select_(schedule.deterministic != 0, count - 1 - index, index)
        batch, head = divide(place, heads)
        return Block(index=index, place=place, head=head, batch=batch)

    def block_count(self, schedule: Schedule) -> Int32:
        """Blocks of keys of a head."""
        return cute.ceil_div(schedule.key_shape[0], self.tile_n)

    def cta_count(self, schedule: Schedule) -> Int32:
        """CTAs that have keys."""
        _, _, heads, batch = schedule.key_shape
        return self.block_count(schedule) * heads * batch

    def locate(self, schedule: Schedule, block: Block, sharer: Int32) -> tuple[Work, blocks.QueryRange]:
        """The query head number `sharer` of those that share a block's keys, and the tiles that see them."""
        query_rows, _, _, _ = schedule.query_shape
        key_rows = schedule.key_shape[0]
        batch, head = self.query_head(schedule, block, sharer)
        work = Work(
            first_key=block.index * self.tile_n,
            batch=batch,
            head=head,
            query_length=self.sequence_length(schedule.query_lengths, batch, query_rows),
            key_length=self.sequence_length(schedule.key_lengths, batch, key_rows),
            window_left=schedule.window_left,
            window_right=schedule.window_right,
        )
        visited = blocks.query_range(
            work.first_key,
            tile_m=self.tile_m,
            tile_n=self.tile_n,
            query_length=work.query_length,
            key_length=work.key_length,
            left=schedule.window_left if self.has_left else None,
            right=self._right_bound(work),
        )
        return work, visited

    def query_head(self, schedule: Schedule, block: Block, sharer: Int32) -> tuple[Int32, Int32]:
        """Batch and head of the query number `sharer` of those that share a block's keys."""
        repeat, in_group = divide(sharer, schedule.group)
        outer, inner = divide(block.batch, schedule.kv_inner)
        batch = (outer * schedule.kv_repeat + repeat) * schedule.kv_inner + inner
        return batch, block.head * schedule.group + in_group

    def slot(self, schedule: Schedule, marks: Int64, block: Block, sharer: Int32) -> Slot:
        """Where the sums of a query head are, and their marks."""
        number = block.place * (schedule.group * schedule.kv_repeat) + sharer
        heads_before, slot = divide(number, schedule.slots)
        tiles = cute.ceil_div(schedule.query_shape[0], self.tile_m)
        return Slot(
            tile=slot * tiles,
            marks=marks + Int64(slot) * (TURNS_OFFSET + 4 * tiles),
            uses=heads_before * self.block_count(schedule),
        )

    def tile_number(self, schedule: Schedule, work: Work, tile: Int32) -> Int32:
        """The place of a query tile among those of all heads."""
        rows, _, heads, _ = schedule.query_shape
        return (work.batch * heads + work.head) * cute.ceil_div(rows, self.tile_m) + tile

    # Producer --------------------------------------------------------------------------------------------

    @cute.jit
    def produce(
        self,
        query: tuple,
        key: tuple,
        value: tuple,
        dout: tuple,
        lse: tuple,
        delta: tuple,
        pipelines: Pipelines,
        schedule: Schedule,
    ):
        """Load the CTA's keys and values, then the rows of every step with their statistics.

        Run by one whole warp: a TMA copy elects its issuing lane itself.
        """
        producer = pipeline.PipelineUserType.Producer
        block = self.block(schedule, cute.arch.block_idx()[0])
        place = (None, None, block.head, block.batch)
        once = pipeline.make_pipeline_state(producer, 1)
        for operand, tile, stages in (
            (key, self._key_tile, pipelines.key),
            (value, self._value_tile, pipelines.value),
        ):
            atom, shared, in_global = self._tma_tiles(operand, place, tile)
            stages.producer_acquire(once)
            cute.copy(
                atom,
                in_global[None, block.index],
                shared[None, 0],
                tma_bar_ptr=stages.producer_get_barrier(once),
            )

        q_state = pipeline.make_pipeline_state(producer, self.stages)
        do_state = pipeline.make_pipeline_state(producer, self.dout_stages)
        for sharer in cutlass.range(schedule.group * schedule.kv_repeat, unroll=1):
            work, visited = self.locate(schedule, block, sharer)
            rows = (None, None, work.head, work.batch)
            queries = self._tma_tiles(query, rows, self._query_tile)
            douts = self._tma_tiles(dout, rows, self._dout_tile)
            for step in cutlass.range(visited.stop - visited.start, unroll=1):
                tile = visited.start + step
                number = self.tile_number(schedule, work, tile)
                self.load(queries, lse, tile, number, pipelines.query, q_state)
                q_state.advance()
                self.load(douts, delta, tile, number, pipelines.dout, do_state)
                do_state.advance()

    def load(
        self, tiles: tuple, statistic: tuple, tile: Int32, number: Int32, stages: Any, state: Any
    ) -> None:
        """Wait for the stage to be free, then start the copies of a tile and of its rows' statistic."""
        atom, shared, in_global = tiles
        statistics, s_statistics = statistic
        stages.producer_acquire(state)
        barrier = stages.producer_get_barrier(state)
        cute.copy(atom, in_global[None, tile], shared[None, state.index], tma_bar_ptr=barrier)
        source = (statistics + Int64(number) * self.tile_m).toint()
        target = (s_statistics.iterator + state.index * self.tile_m).toint()
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[Int32(target), Int64(source), Int32(4 * self.tile_m), Int32(barrier.toint())],
            )

    # Sums of dQ ------------------------------------------------------------------------------------------

    @cute.jit
    def add_dquery(self, sums: cute.Pointer, marks: Int64, shared: cute.Pointer, schedule: Schedule):
        """Add each step's dQ to global memory: a bulk copy for each part that a warpgroup hands over.

        When a head's copies are complete its slot's mark says so; that is seen to a step later, under the
        copies of the next head. In a fixed order each tile has its own mark, and the next block waits for it.
        """
        block = self.block(schedule, cute.arch.block_idx()[0])
        done = Int64(0)
        for sharer in cutlass.range(schedule.group * schedule.kv_repeat, unroll=1):
            work, visited = self.locate(schedule, block, sharer)
            slot = self.slot(schedule, marks, block, sharer)
            # Also where there is no step: what it says below must not be taken for the head's before.
            self.await_count(slot.marks + FINISHED_OFFSET, slot.uses)
            for step in cutlass.range(visited.stop - visited.start, unroll=1):
                tile = visited.start + step
                turn_mark = slot.marks + TURNS_OFFSET + Int64(tile) * 4
                if schedule.deterministic != 0:
                    before = (
                        blocks.last_block(
                            tile * self.tile_m,
                            tile_m=self.tile_m,
                            tile_n=self.tile_n,
                            query_length=work.query_length,
                            key_length=work.key_length,
                            right=self._right_bound(work),
                        )
                        - block.index
                    )
                    self.await_count(turn_mark, before)
                for turn in cutlass.range_constexpr(self.dq_passes):
                    for wg in cutlass.range_constexpr(self.warpgroups):
                        # This warpgroup's last copy has read its part; those of the others may be under way.
                        cute.arch.cp_async_bulk_wait_group(self.warpgroups - 1, read=True)
                        cute.arch.sync_warp()
                        cute.arch.barrier_arrive(
                            barrier_id=Barrier.DQ_EMPTY + wg, number_of_threads=WARPGROUP + WARP
                        )
                        cute.arch.barrier(barrier_id=Barrier.DQ_FULL + wg, number_of_threads=WARPGROUP + WARP)
                        source = (shared + wg * DQ_PART).toint()
                        place = (Int64(slot.tile + tile) * self.warpgroups + wg) * self.dq_passes + turn
                        target = (sums + place * DQ_PART).toint()
                        with cute.arch.elect_one():
                            cute.arch.inline_ptx(
                                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                                "[{$r0}], [{$r1}], {$r2};",
                                read_only_args=[Int64(target), Int32(source), Int32(4 * DQ_PART)],
                            )
                        cute.arch.cp_async_bulk_commit_group()
                if schedule.deterministic != 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    cute.arch.sync_warp()
                    self.count_up(turn_mark)
                if done != 0:
                    cute.arch.cp_async_bulk_wait_group(self.dq_passes * self.warpgroups, read=False)
                    cute.arch.sync_warp()
                    self.count_up(done)
                    done = Int64(0)
            if done != 0:
                # This head had no step.
                self.complete(done)
            done = slot.marks
        if done != 0:
            self.complete(done)

    def complete(self, mark: Int64) -> None:
        """Wait until all copies are complete, and say so."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.sync_warp()
        self.count_up(mark)

    @cute.jit
    def await_count(self, counter: Int64, least: Int32):
        """Wait until a counter in global memory has come to `least`. What it counts is then visible here."""
        seen = Int32(-1)
        while seen < least:
            seen = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
                write_only_types=[Int32],
                read_only_args=[counter],
            )
        # Bulk copies are of another proxy than the counter.
        cute.arch.inline_ptx("fence.proxy.async;")
        cute.arch.sync_warp()

    def count_up(self, counter: Int64) -> None:
        """Add 1 to a counter; whoever sees it sees also what was done before."""
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "fence.proxy.async; red.release.gpu.global.add.s32 [{$r0}], {$r1};",
                read_only_args=[counter, Int32(1)],
            )

    # Rows of dQ ------------------------------------------------------------------------------------------

    @cute.jit
    def finish(
        self,
        dquery: cute.Pointer,
        sums: cute.Pointer,
        marks: Int64,
        factor_pointer: cute.Pointer,
        chunks: cute.Pointer,
        barriers: cute.Pointer,
        schedule: Schedule,
    ):
        """Turn sums of dQ into its rows, and into zeros for the next head that has their slot.

        Of the `slots` slots, query head n of all has slot n % slots, after n // slots others. A CTA finishes
        tiles of a head of keys `lag` times `together` before its own, to whose sums all CTAs that add are
        started by then, and mostly done. All that is waited for, here and in `add_dquery`, is done by CTAs of
        lower numbers, so it does not depend on how many run at once; the launcher checks that `slots` and
        `lag` are such.

        Run by two warps, which take chunks in turn. Sums come by shared memory, since there are registers for
        only a few at a time.
        """
        warp_number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - REDUCE_WARP - 1
        count = self.block_count(schedule)
        cta = cute.arch.block_idx()[0] - schedule.lag * schedule.together * count
        rows, width, heads, _ = schedule.query_shape
        factor = cute.arch.load(factor_pointer, Float32)
        chunks += warp_number * (self.config.finish_stages * self.chunk)
        barriers += warp_number * self.config.finish_stages
        number = Int32(0)
        if cta >= 0:
            block = self.block(schedule, cta)
            # Its tiles are every `count`th. In a step each warp has a chunk.
            steps = (cute.ceil_div(rows, self.tile_m) - block.index + count - 1) // count * self.tile_steps
            for sharer in cutlass.range(schedule.group * schedule.kv_repeat, unroll=1):
                batch, head = self.query_head(schedule, block, sharer)
                slot = self.slot(schedule, marks, block, sharer)
                own_sums = sums + (
                    Int64(slot.tile) * (self.tile_m * self.head_dim) + warp_number * self.chunk
                )
                self.await_count(slot.marks, slot.uses + count)
                for step in cutlass.range_constexpr(self.config.finish_stages):
                    if step < steps:
                        source = own_sums + self.chunk_place(block, count, Int32(step))
                        self.fetch(source, chunks, barriers, number + step)
                for step in cutlass.range(steps, unroll=1):
                    tile = block.index + step // self.tile_steps * count
                    part = step % self.tile_steps // self.part_steps
                    first_row, first_column = tile * self.tile_m, part * DQ_COLUMNS
                    if cutlass.const_expr(self.dq_by_rows):
                        first_row += part // self.dq_passes * WARPGROUP_ROWS
                        first_column = part % self.dq_passes * DQ_COLUMNS
                    chunk_in_part = step % self.part_steps * FINISH_WARPS + warp_number
                    first_column += chunk_in_part * self.config.finish_columns
                    stage = number % self.config.finish_stages
                    cute.arch.mbarrier_wait(barriers + stage, number // self.config.finish_stages % 2)
                    self.write_rows(
                        dquery + ((Int64(batch) * rows + first_row) * heads + head) * width + first_column,
                        own_sums + self.chunk_place(block, count, step),
                        chunks + stage * self.chunk,
                        factor,
                        rows - first_row,
                        width - first_column,
                        Int64(heads) * width,
                    )
                    if schedule.deterministic != 0:
                        cute.arch.inline_ptx(
                            "st.global.s32 [{$r0}], {$r1};",
                            read_only_args=[slot.marks + TURNS_OFFSET + Int64(tile) * 4, Int32(0)],
                        )
                    if step + self.config.finish_stages < steps:
                        source = own_sums + self.chunk_place(block, count, step + self.config.finish_stages)
                        self.fetch(source, chunks, barriers, number + self.config.finish_stages)
                    number += 1
                # Zeros written here before the copies of others that add to them.
                cute.arch.inline_ptx("fence.proxy.async;")
                cute.arch.barrier(barrier_id=Barrier.FINISHED, number_of_threads=FINISH_WARPS * WARP)
                if warp_number == 0:
                    self.count_up(slot.marks + FINISHED_OFFSET)

    def chunk_place(self, block: Block, count: Int32, step: Int32) -> Int64:
        """Where in a head's sums the chunks of a step are."""
        tile = block.index + step // self.tile_steps * count
        return Int64(tile * self.tile_steps + step % self.tile_steps) * (FINISH_WARPS * self.chunk)

    def fetch(
        self, source: cute.Pointer, chunks: cute.Pointer, barriers: cute.Pointer, number: Int32
    ) -> None:
        """Start the copy of chunk `number` into its stage, when all lanes have read what was there."""
        stage = number % self.config.finish_stages
        barrier = barriers + stage
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * self.chunk)
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[
                    Int32((chunks + stage * self.chunk).toint()),
                    Int64(source.toint()),
                    Int32(4 * self.chunk),
                    Int32(barrier.toint()),
                ],
            )

    @cute.jit
    def write_rows(
        self,
        target: cute.Pointer,
        source: cute.Pointer,
        chunk: cute.Pointer,
        factor: Float32,
        rows: Int32,
        columns: Int32,
        row_stride: Int64,
    ):
        """Round a chunk of sums, 64 rows of some columns, into rows of dQ, and leave zeros in its place.

        A lane has eight columns of a row, which are neighbours in both. `rows`, `columns`: how many of them
        from the chunk's first on are in the array.
        """
        lane = cute.arch.lane_idx()
        eights = self.config.finish_columns // 8
        # Four times eight numbers of eight rows at a time.
        eight, group_of_lane, row_of_eight = lane // 8 % eights, lane // 8 // eights, lane % 8
        for i in cutlass.range(WARPGROUP_ROWS // 8 * eights // 4, unroll=2):
            group = i * (4 // eights) + group_of_lane
            row = 8 * group + row_of_eight
            # [8 columns][upper or lower 8 rows of 16][16 rows][row][column]
            place = ((eight * 2 + group % 2) * 4 + group // 2) * 64 + row_of_eight * 8
            values = cute.make_rmem_tensor(8, Float32)
            cute.autovec_copy(cute.make_tensor((chunk + place).align(16), cute.make_layout(8)), values)
            pairs = [self.pack(values[2 * k] * factor, values[2 * k + 1] * factor) for k in range(4)]
            for half in cutlass.range_constexpr(2):
                cute.arch.inline_ptx(
                    "st.global.v4.f32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                    read_only_args=[(source + (place + 4 * half)).toint(), Float32(0.0)],
                )
            if row < rows and 8 * eight < columns:
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[(target + (Int64(row) * row_stride + 8 * eight)).toint(), *pairs],
                )

    # Consumers -------------------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        shared: tuple,
        statistics: tuple,
        s_dquery: cute.Pointer,
        ds_barriers: cute.Pointer,
        dkey: tuple,
        dvalue: tuple,
        scale_pointer: cute.Pointer,
        pipelines: Pipelines,
        schedule: Schedule,
    ):
        """Compute dK and dV of 64 keys, or half their columns; with the other warpgroup each step's dQ."""
        s_queries, s_keys, s_values, s_douts, s_ds, s_weights = shared
        s_lse, s_delta = statistics
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg, warp_in_group = warp_index // 4 - 1, warp_index % 4
        lane = thread % WARP
        quad = lane % 4

        matmuls = self.matmuls()
        operands = self.operands(matmuls, shared, wg)
        registers = self.registers(matmuls)
        registers.dkey.fill(0.0)
        registers.dvalue.fill(0.0)
        save = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype),
            matmuls.scores[0],
        ).get_slice(thread)
        own_ds = save.partition_D(self.own_scores(s_ds, wg))
        if cutlass.const_expr(self.split_columns):
            own_weights = save.partition_D(self.own_scores(s_weights, wg))

        scale = cute.arch.load(scale_pointer, Float32)
        factor = scale * LOG2_E
        block = self.block(schedule, cute.arch.block_idx()[0])
        # Of the thread's two keys the first, in the block, and of its queries the first, in a tile.
        key_in_block, query_in_tile = thread // WARP * 16 + lane // 4, 2 * quad
        if cutlass.const_expr(self.split_columns):
            query_in_tile += wg * self.own_queries
        else:
            key_in_block += wg * WARPGROUP_ROWS

        once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        pipelines.key.consumer_wait(once)
        pipelines.value.consumer_wait(once)
        # The query stages to wait for and to release.
        q_next = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.dout_stages)
        # Which tile of dS is written; whether a step's dQ, or its reading of weights, is still to be waited
        # for, and the phase of that barrier.
        parity, delayed, phase = Int32(0), Int32(0), Int32(0)

        for sharer in cutlass.range(schedule.group * schedule.kv_repeat, unroll=1):
            work, visited = self.locate(schedule, block, sharer)
            key_index = work.first_key + key_in_block
            self.clear_keys(s_keys, s_values, work, schedule)
            for step in cutlass.range(visited.stop - visited.start, unroll=1):
                tile = visited.start + step
                pipelines.query.consumer_wait(q_next)
                self.clear_rows(s_queries, q_next.index, tile, work, schedule, self.head_dim)
                self.issue(
                    matmuls.scores,
                    registers.scores,
                    operands.keys,
                    operands.queries[None, None, None, q_next.index],
                )
                pipelines.dout.consumer_wait(do_state)
                self.clear_rows(s_douts, do_state.index, tile, work, schedule, self.value_head_dim)
                self.issue(
                    matmuls.scores,
                    registers.products,
                    operands.values,
                    operands.douts[None, None, None, do_state.index],
                )
                warpgroup.wait_group(1)
                if cutlass.const_expr(self.config.overlap_dkey) and step > 0:
                    # dK of the step before has ended too.
                    pipelines.query.consumer_release(q_state)
                    q_state.advance()
                # dP runs.
                self.exponentiate(registers.scores, s_lse, quad, self.own_groups(wg), q_next.index, factor)
                if self.is_masked(tile, visited):
                    self.apply_mask(registers.scores, work, key_index, tile * self.tile_m + query_in_tile)
                self.round_pairs(registers.scores, registers.weight_pairs)
                if cutlass.const_expr(self.split_columns):
                    if delayed != 0:
                        # Matmuls of all warpgroups have read the weights of the step before.
                        cute.arch.mbarrier_wait(ds_barriers, phase)
                        phase = 1 - phase
                    cute.copy(save, save.retile(registers.weights_rounded), own_weights[None, None, None, 0])
                    warpgroup.wait_group(0)
                else:
                    self.issue_sum(
                        matmuls.dvalue,
                        registers.dvalue,
                        registers.weights,
                        operands.douts_by_row[None, None, None, do_state.index],
                    )
                    warpgroup.wait_group(1)
                    # dV runs.
                self.cotangents(registers, s_delta, quad, self.own_groups(wg), do_state.index)
                if cutlass.const_expr(self.delay_dquery):
                    if delayed != 0:
                        cute.arch.mbarrier_wait(ds_barriers + (1 - parity), phase)
                        phase = phase ^ (1 - parity)
                    # Where there is no step before, what this computes is not looked at.
                    self.issue_dquery(matmuls, registers, operands, 1 - parity, wg, 0)
                else:
                    cute.copy(save, save.retile(registers.ds_rounded), own_ds[None, None, None, parity])
                    cute.arch.fence_view_async_shared()
                    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=self.consumer_threads)
                if cutlass.const_expr(self.split_columns):
                    self.issue_sum(
                        matmuls.dvalue,
                        registers.dvalue,
                        operands.weights[None, None, None, 0],
                        operands.douts_by_row[None, None, None, do_state.index],
                    )
                    self.issue_dquery(matmuls, registers, operands, parity, wg, 0)
                    warpgroup.wait_group(1)
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(ds_barriers)
                    delayed = Int32(1)
                elif cutlass.const_expr(not self.delay_dquery):
                    warpgroup.wait_group(0)
                    self.issue_dquery(matmuls, registers, operands, parity, wg, 0)
                if cutlass.const_expr(not self.delay_dquery):
                    pipelines.dout.consumer_release(do_state)
                    do_state.advance()
                if cutlass.const_expr(self.split_columns):
                    self.issue_sum(
                        matmuls.dkey,
                        registers.dkey,
                        operands.ds[None, None, None, parity],
                        operands.queries_by_row[None, None, None, q_next.index],
                    )
                else:
                    self.issue_sum(
                        matmuls.dkey,
                        registers.dkey,
                        registers.ds,
                        operands.queries_by_row[None, None, None, q_next.index],
                    )
                q_next.advance()
                if cutlass.const_expr(self.delay_dquery):
                    cute.copy(save, save.retile(registers.ds_rounded), own_ds[None, None, None, parity])
                    cute.arch.fence_view_async_shared()
                warpgroup.wait_group(1)
                # dK runs.
                if cutlass.const_expr(self.delay_dquery):
                    # dQ of the step before and dV have ended: the others may write over what they read.
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(ds_barriers + parity)
                    pipelines.dout.consumer_release(do_state)
                    do_state.advance()
                    if delayed != 0:
                        self.store_dquery(registers.dquery, s_dquery, wg, thread)
                    delayed = Int32(1)
                else:
                    self.store_dquery(registers.dquery, s_dquery, wg, thread)
                for turn in cutlass.range_constexpr(1, self.dq_passes):
                    self.issue_dquery(matmuls, registers, operands, parity, wg, turn)
                    warpgroup.wait_group(0)
                    self.store_dquery(registers.dquery, s_dquery, wg, thread)
                parity = 1 - parity
                if cutlass.const_expr(not self.config.overlap_dkey):
                    warpgroup.wait_group(0)
                    pipelines.query.consumer_release(q_state)
                    q_state.advance()
            if cutlass.const_expr(self.config.overlap_dkey):
                warpgroup.wait_group(0)
                if visited.stop > visited.start:
                    pipelines.query.consumer_release(q_state)
                    q_state.advance()

        if cutlass.const_expr(self.delay_dquery):
            if delayed != 0:
                cute.arch.mbarrier_wait(ds_barriers + (1 - parity), phase)
            self.issue_dquery(matmuls, registers, operands, 1 - parity, wg, 0)
            warpgroup.wait_group(0)
            if delayed != 0:
                self.store_dquery(registers.dquery, s_dquery, wg, thread)

        # The other warpgroup has read this one's keys, whose place dK takes.
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=self.consumer_threads)
        for i in cutlass.range_constexpr(cute.size(registers.dkey)):
            registers.dkey[i] = registers.dkey[i] * scale
        self.store_part(matmuls.dkey, registers.dkey, s_keys, dkey, self.own_columns, block, wg, thread)
        self.store_part(
            matmuls.dvalue, registers.dvalue, s_values, dvalue, self.own_value_columns, block, wg, thread
        )
        if warp_in_group == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def matmuls(self) -> Matmuls:
        """The five matmuls of a step, S and dP being alike."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        both = (False, True)
        a = "rows" if self.split_columns else "registers"
        return Matmuls(
            scores=tuple(
                self._matmul(self.own_queries, a="rows", b_major=k_major, accumulate=x) for x in both
            ),
            dquery=tuple(self._matmul(DQ_COLUMNS, a="columns", b_major=mn_major, accumulate=x) for x in both),
            dkey=self._matmul(self.own_columns, a=a, b_major=mn_major, accumulate=True),
            dvalue=self._matmul(self.own_value_columns, a=a, b_major=mn_major, accumulate=True),
        )

    def own_scores(self, tiles: Any, wg: Int32) -> Any:
        """This warpgroup's part of tiles of scores, (tile_n, tile_m): its 64 keys, or its queries."""
        parts = cute.local_tile(tiles, (WARPGROUP_ROWS, self.own_queries), (None, None, None))
        return parts[None, None, 0, wg, None] if self.split_columns else parts[None, None, wg, 0, None]

    def own_groups(self, wg: Int32) -> Any:
        """Where this warpgroup's queries begin in a tile, in eights."""
        return wg * (self.own_queries // 8) if self.split_columns else 0

    def operands(self, matmuls: Matmuls, shared: tuple, wg: Int32) -> Operands:
        """Shared-memory operands of a warpgroup.

        dQ sums over all keys. Of its operand A a warpgroup takes its rows, or of B its columns.
        """
        s_queries, s_keys, s_values, s_douts, s_ds, s_weights = shared
        scores, dquery, dkey, dvalue = matmuls.scores[0], matmuls.dquery[0], matmuls.dkey, matmuls.dvalue

        def rows(matmul: Any, tile: Any, width: int) -> Any:
            parts = cute.local_tile(tile, (WARPGROUP_ROWS, width), (None, 0))
            part = 0 if self.split_columns else wg
            return matmul.make_fragment_A(matmul.get_slice(0).partition_A(parts))[None, None, None, part]

        def part_of_b(matmul: Any, tiles: Any, part_shape: tuple[int, int]) -> Any:
            parts = cute.local_tile(tiles, part_shape, (None, 0, None))
            part = wg if self.split_columns else 0
            fragment = matmul.make_fragment_B(matmul.get_slice(0).partition_B(parts))
            return fragment[None, None, None, part, None]

        def staged_rows(matmul: Any, tiles: Any) -> Any:
            return matmul.make_fragment_A(matmul.get_slice(0).partition_A(tiles))

        a_tiles = cute.local_tile(transposed(s_ds), (WARPGROUP_ROWS, self.tile_n), (None, 0, None))
        b_tiles = cute.local_tile(transposed(s_keys)[None, None, 0], (DQ_COLUMNS, self.tile_n), (None, 0))
        a_tile = wg if self.dq_by_rows else 0
        part = dquery.get_slice(0)
        return Operands(
            keys=rows(scores, s_keys[None, None, 0], self.head_dim),
            values=rows(scores, s_values[None, None, 0], self.value_head_dim),
            queries=part_of_b(scores, s_queries, (self.own_queries, self.head_dim)),
            douts=part_of_b(scores, s_douts, (self.own_queries, self.value_head_dim)),
            queries_by_row=part_of_b(dkey, transposed(s_queries), (self.own_columns, self.tile_m)),
            douts_by_row=part_of_b(dvalue, transposed(s_douts), (self.own_value_columns, self.tile_m)),
            ds=staged_rows(dkey, s_ds) if self.split_columns else None,
            weights=staged_rows(dvalue, s_weights) if self.split_columns else None,
            ds_by_row=dquery.make_fragment_A(part.partition_A(a_tiles))[None, None, None, a_tile, None],
            keys_by_row=dquery.make_fragment_B(part.partition_B(b_tiles)),
        )

    def registers(self, matmuls: Matmuls) -> Registers:
        """A thread's accumulators; and weights and their cotangents, rounded, two to a register."""

        def accumulator(matmul: Any, columns: int) -> Any:
            return cute.make_rmem_tensor(matmul.partition_shape_C((WARPGROUP_ROWS, columns)), Float32)

        scores, products = (accumulator(matmuls.scores[0], self.own_queries) for _ in range(2))
        weight_pairs, ds_pairs = (cute.make_rmem_tensor(self.own_queries // 4, Uint32) for _ in range(2))
        a_layout = cute.make_layout(((2, 2, 2), 1, self.own_queries // 16))
        rounded = [cute.recast_ptr(pairs.iterator, dtype=self.dtype) for pairs in (weight_pairs, ds_pairs)]
        return Registers(
            scores=scores,
            products=products,
            dquery=accumulator(matmuls.dquery[0], DQ_COLUMNS),
            dkey=accumulator(matmuls.dkey, self.own_columns),
            dvalue=accumulator(matmuls.dvalue, self.own_value_columns),
            weight_pairs=weight_pairs,
            weights=cute.make_tensor(rounded[0], a_layout),
            weights_rounded=cute.make_tensor(rounded[0], scores.layout),
            ds_pairs=ds_pairs,
            ds=cute.make_tensor(rounded[1], a_layout),
            ds_rounded=cute.make_tensor(rounded[1], scores.layout),
        )

    def issue(self, matmuls: tuple, acc: Any, frag_a: Any, frag_b: Any) -> None:
        """Start acc = A B, both in shared memory."""
        overwrite, accumulate = matmuls
        acc.fill(0.0)  # overwritten; but else the compiler keeps what it held before, and d64 spills
        warpgroup.fence()
        for k in range(cute.size(frag_a.shape[2])):
            cute.gemm(
                overwrite if k == 0 else accumulate, acc, frag_a[None, None, k], frag_b[None, None, k], acc
            )
        warpgroup.commit_group()

    def issue_sum(self, matmul: Any, acc: Any, frag_a: Any, frag_b: Any) -> None:
        """Start acc += A B, with A in shared memory or in registers."""
        warpgroup.fence()
        for k in range(cute.size(frag_b.shape[2])):
            cute.gemm(matmul, acc, frag_a[None, None, k], frag_b[None, None, k], acc)
        warpgroup.commit_group()

    def issue_dquery(
        self, matmuls: Matmuls, registers: Registers, operands: Operands, stage: Int32, wg: Int32, number: int
    ) -> None:
        """Start pass `number` over this warpgroup's columns of dQ."""
        tile = number if self.dq_by_rows else wg * self.dq_passes + number
        self.issue(
            matmuls.dquery,
            registers.dquery,
            operands.ds_by_row[None, None, None, stage],
            operands.keys_by_row[None, None, None, tile],
        )

    def is_masked(self, tile: Int32, visited: blocks.QueryRange) -> Any:
        """Whether a bound or the end of the keys crosses a query tile."""
        masked = tile < visited.right_masked
        return (
            cutlass.Boolean(masked) | cutlass.Boolean(tile >= visited.left_masked)
            if self.has_left
            else masked
        )

    def exponentiate(
        self, scores: Any, s_lse: Any, quad: Int32, first: Any, stage: Int32, factor: Float32
    ) -> None:
        """Turn scores into weights, in place."""
        pair = cute.make_rmem_tensor(2, Float32)
        for j in range(self.own_queries // 8):
            cute.autovec_copy(s_lse[None, quad, first + j, stage], pair)
            for r in range(2):
                for c in range(2):
                    i = 4 * j + 2 * r + c
                    scores[i] = cute.arch.exp2(scores[i] * factor - pair[c])

    def apply_mask(self, weights: Any, work: Work, key_index: Int32, origin: Int32) -> None:
        """Set weights of the thread's two keys, and of queries that do not see them, to 0.

        `origin`: the query at the thread's first column of the tile.
        """
        above, below = [], []
        for r in range(2):
            first, end = blocks.query_limits(
                key_index + 8 * r,
                query_length=work.query_length,
                key_length=work.key_length,
                left=work.window_left if self.has_left else None,
                right=self._right_bound(work),
            )
            above.append(first - origin)
            if end is not None:
                below.append(end - origin)
        mask.apply_r2p(weights, below=tuple(below), above=tuple(above), hidden=0.0)

    def cotangents(self, registers: Registers, s_delta: Any, quad: Int32, first: Any, stage: Int32) -> None:
        """DS = P * (dP - delta), rounded."""
        pair = cute.make_rmem_tensor(2, Float32)
        weights, products = registers.scores, registers.products
        for j in range(self.own_queries // 8):
            cute.autovec_copy(s_delta[None, quad, first + j, stage], pair)
            for r in range(2):
                i = 4 * j + 2 * r
                registers.ds_pairs[2 * j + r] = self.pack(
                    weights[i] * (products[i] - pair[0]), weights[i + 1] * (products[i + 1] - pair[1])
                )

    def store_dquery(self, acc: Any, shared: cute.Pointer, wg: Int32, thread: Int32) -> None:
        """Hand 64 rows and columns of dQ to `add_dquery`.

        Two columns of a row at a time, [column / 8: 8][r: 2][thread: 128][2]: those of thread t are row
        16 * (t // 32) + 8 * r + t % 32 // 4 and columns 2 * (t % 4) + {0, 1} of the eight; so eight columns
        of a row are neighbours.
        """
        target = cute.make_tensor(
            shared + wg * DQ_PART,
            cute.make_layout((2, WARPGROUP, DQ_PART // WARPGROUP // 2), stride=(1, 2, 2 * WARPGROUP)),
        )
        pair = cute.make_rmem_tensor(2, Float32)
        threads = WARPGROUP + WARP
        cute.arch.barrier(barrier_id=Barrier.DQ_EMPTY + wg, number_of_threads=threads)
        for i in range(DQ_PART // WARPGROUP // 2):
            pair[0], pair[1] = acc[2 * i], acc[2 * i + 1]
            cute.autovec_copy(pair, target[None, thread, i])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + wg, number_of_threads=threads)

    @cute.jit
    def clear_keys(self, s_keys: cute.Tensor, s_values: cute.Tensor, work: Work, schedule: Schedule):
        """Set keys and values beyond the sequence to 0: times their weights of 0, NaN would stay NaN."""
        if work.first_key + self.tile_n > work.key_length and work.key_length < schedule.key_shape[0]:
            first = blocks.maximum(work.key_length - work.first_key, 0)
            self.clear(s_keys.iterator, self.tile_n, self.head_dim, first)
            self.clear(s_values.iterator, self.tile_n, self.value_head_dim, first)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=self.consumer_threads)

    @cute.jit
    def clear_rows(
        self,
        s_rows: cute.Tensor,
        stage: Int32,
        tile: Int32,
        work: Work,
        schedule: Schedule,
        width: cutlass.Constexpr,
    ):
        """Set rows of a query or dout tile beyond the sequence to 0, for the same reason."""
        end = tile * self.tile_m + self.tile_m
        if end > work.query_length and work.query_length < schedule.query_shape[0]:
            first = blocks.maximum(work.query_length - tile * self.tile_m, 0)
            self.clear(s_rows[None, None, stage].iterator, self.tile_m, width, first)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=self.consumer_threads)

    @cute.jit
    def clear(self, tile: cute.Pointer, rows: cutlass.Constexpr, width: cutlass.Constexpr, first: Int32):
        """Set rows from `first` on to 0. A tile is a row of boxes; in each a row stays in its place."""
        box_words = box_columns(width) // 2
        words = cute.make_tensor(cute.recast_ptr(tile, dtype=Uint32), cute.make_layout(rows * width // 2))
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        for box in cutlass.range_constexpr(width // box_columns(width)):
            start = box * rows * box_words + first * box_words
            count = (rows - first) * box_words
            steps = (count - thread + self.consumer_threads - 1) // self.consumer_threads
            for step in cutlass.range(steps, unroll=1):
                words[start + step * self.consumer_threads + thread] = Uint32(0)

    def store_part(
        self,
        matmul: Any,
        acc: Any,
        s_rows: Any,
        target: tuple,
        columns: int,
        block: Block,
        wg: Int32,
        thread: Int32,
    ) -> None:
        """Round this warpgroup's part of dK or dV into shared memory and start its store."""
        pairs = cute.make_rmem_tensor(cute.size(acc) // 2, Uint32)
        self.round_pairs(acc, pairs)
        rounded = cute.make_tensor(cute.recast_ptr(pairs.iterator, dtype=self.dtype), acc.layout)
        save = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype), matmul
        ).get_slice(thread)
        # The parts of one tile are below one another, or side by side.
        parts = (0, None) if self.split_columns else (None, 0)
        tiles = cute.local_tile(s_rows[None, None, 0], (WARPGROUP_ROWS, columns), parts)
        cute.copy(save, save.retile(rounded), save.partition_D(tiles[None, None, wg]))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=Barrier.DQ_EMPTY + wg, number_of_threads=WARPGROUP)
        self.start_store(target, tiles, columns, block, wg)

    @cute.jit
    def start_store(
        self, target: tuple, tiles: cute.Tensor, columns: cutlass.Constexpr, block: Block, wg: Int32
    ):
        """Start the TMA store of the part number `wg`."""
        atom, coords = target
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            place = (None, None, block.head, block.batch)
            tile = (WARPGROUP_ROWS, columns)
            if cutlass.const_expr(self.split_columns):
                _, s_view, g_view = self._tma_tiles((atom, coords, tiles), place, tile, (block.index, None))
                cute.copy(atom, s_view[None, wg], g_view[None, wg])
            else:
                _, s_view, g_view = self._tma_tiles((atom, coords, tiles), place, tile)
                cute.copy(atom, s_view[None, wg], g_view[None, block.index * self.warpgroups + wg])
            cute.arch.cp_async_bulk_commit_group()


def divide(a: Int32, b: Int32) -> tuple[Int32, Int32]:
    """Quotient and remainder of two numbers that are not negative, by one unsigned division."""
    quotient = Int32(Uint32(a) // Uint32(b))
    return quotient, a - quotient * b

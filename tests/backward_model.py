"""Runs the Python source of the warps that add and finish sums of dquery, with plain numbers and no GPU.

What the kernel takes from its compiler is replaced: pointers are places in numpy arrays, and instructions
are known by their text. Every warp is a thread, of which one runs at a time; where it looks at or changes
what others see, it may have to let another go on. Copies stay under way as long as nothing waits for them.
The warps of matmuls are a list of numbers to hand over. The memory order of instructions is not modelled:
what is done is seen by all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jax_r2p.kernels import backward, blocks
from jax_r2p.kernels.config import WARPGROUP_ROWS, BackwardConfig

MARKS = 1 << 20
"""Their address: 0 is none."""


def some_lengths(rng: np.random.Generator, batch: int, extent: int) -> tuple[int, ...]:
    """A length of each sequence, or none."""
    return tuple(int(x) for x in rng.integers(0, extent + 1, batch)) if rng.integers(2) else ()


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A place in a flat array, counted in elements."""

    array: np.ndarray
    place: int

    def __add__(self, other: int) -> Pointer:
        return Pointer(self.array, self.place + other)

    def align(self, size: int) -> Pointer:
        assert self.place * 4 % size == 0
        return self

    def toint(self) -> Pointer:
        return self

    def view(self, count: int) -> np.ndarray:
        assert 0 <= self.place <= self.array.size - count
        return self.array[self.place : self.place + count]


class Rows:
    """A tensor in memory, of which rows along mode 0 are taken."""

    def __init__(self, pointer: Pointer, layout: tuple[tuple[int, ...], tuple[int, ...]]):
        self.pointer, (self.shape, self.stride) = pointer, layout

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        assert index[0] is None
        assert self.stride[0] == 1
        assert all(0 <= i < size for i, size in zip(index[1:], self.shape[1:], strict=True))
        offset = sum(i * stride for i, stride in zip(index[1:], self.stride[1:], strict=True))
        return (self.pointer + offset).view(self.shape[0])


class Warps:
    """Threads of which one runs at a time.

    Each has a priority, so that some are far behind others; now and then it gets another one.
    """

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.waiting: dict[Any, Callable[[], bool]] = {}
        self.turns: dict[Any, threading.Semaphore] = {}
        self.priorities: dict[Any, float] = {}
        self.own = threading.local()
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.queue: list[tuple[Any, Callable[[], None]]] = []

    def run(self, queue: list[tuple[Any, Callable[[], None]]], most: int) -> None:
        """Runs each (name, function) of a list, whose order is that of their starts, `most` at a time."""
        self.queue = queue[::-1]
        for _ in range(min(most, len(queue))):
            self._start()
        self._next()
        self.done.wait()
        if self.error:
            raise self.error

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets another warp run. This one goes on when `ready` holds and none that can has precedence."""
        name = self.own.name
        if self.rng.integers(50) == 0:
            self.priorities[name] = self.rng.random()
        self.waiting[name] = ready
        self._next()
        self.turns[name].acquire()
        if self.error:
            raise SystemExit

    def _start(self) -> None:
        name, function = self.queue.pop()
        self.turns[name] = threading.Semaphore(0)
        self.priorities[name] = self.rng.random()
        self.waiting[name] = lambda: True

        def body() -> None:
            self.own.name = name
            self.turns[name].acquire()
            try:
                if not self.error:
                    function()
            except SystemExit:
                return
            except BaseException as error:  # noqa: BLE001 - it is raised again by `run`
                self._fail(error)
                return
            if self.queue:
                self._start()
            self._next()

        threading.Thread(target=body, daemon=True).start()

    def _next(self) -> None:
        ready = [name for name, condition in self.waiting.items() if condition()]
        if not ready:
            if self.waiting:
                self._fail(AssertionError(f"{sorted(self.waiting)} wait for ever"))
            else:
                self.done.set()
            return
        name = max(ready, key=self.priorities.__getitem__)
        del self.waiting[name]
        self.turns[name].release()

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.done.set()
        for turn in self.turns.values():
            turn.release()


@dataclasses.dataclass
class Copy:
    """A bulk copy that adds: `data` is what it has read, if it has."""

    target: Pointer
    source: Pointer
    size: int
    data: np.ndarray | None = None
    is_complete: bool = False

    def read(self) -> None:
        if self.data is None:
            self.data = self.source.view(self.size).copy()

    def complete(self) -> None:
        self.read()
        if not self.is_complete:
            self.target.view(self.size)[:] += self.data
        self.is_complete = True


class Warp:
    """What a warp has for itself. `parts`: what matmuls hand over to it, for each warpgroup."""

    def __init__(self, cta: int, number: int, parts: list[Iterator[np.ndarray]], shared: Pointer):
        self.cta, self.number, self.parts, self.shared = cta, number, parts, shared
        self.copies: list[Copy] = []
        self.phases: dict[int, int] = {}
        self.lane = 0


def constants(**values: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**values)


class Model(backward.AttentionBackward):
    """A kernel whose adding and finishing warps run here. Use it in `in_place_of_the_compiler`."""

    add_dquery = backward.AttentionBackward.add_dquery.__wrapped__
    finish = backward.AttentionBackward.finish.__wrapped__

    def __init__(self, config: BackwardConfig, warps: Warps, marks: np.ndarray):
        super().__init__(config)
        self.warps, self.own, self.marks = warps, threading.local(), marks
        self.arrived: dict[int, int] = {}

    @property
    def warp(self) -> Warp:
        return self.own.warp

    # In place of what is compiled in another way.

    def sequence_length(self, lengths: Any, batch: int, extent: int) -> int:
        return min(max(lengths[batch], 0), extent) if lengths else extent

    def pack(self, low: float, high: float) -> tuple[float, float]:
        return low, high

    def await_count(self, counter: int, least: int) -> None:
        mark = self.mark(counter)
        self.warps.pause(lambda: self.marks[mark] >= least)

    def write_rows(self, *arguments: Any) -> None:
        for self.warp.lane in range(32):
            backward.AttentionBackward.write_rows.__wrapped__(self, *arguments)
        self.warps.pause()

    def mark(self, address: int) -> int:
        place, rest = divmod(address - MARKS, 4)
        assert rest == 0
        assert 0 <= place < self.marks.size
        return place

    # Instructions.

    def inline_ptx(self, text: str, read_only_args: Iterable[Any] = (), **_: Any) -> None:
        args = list(read_only_args)
        if text == "fence.proxy.async;":
            return
        self_contained = {
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 ": self.start_adding,
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes ": self.fetch_chunk,
            "fence.proxy.async; red.release.gpu.global.add.s32 ": self.add_to_mark,
            "st.global.s32 ": self.set_mark,
            "st.global.v4.f32 ": self.set_four,
            "st.global.v4.b32 ": self.store_eight,
        }
        (action,) = (action for start, action in self_contained.items() if text.startswith(start))
        action(*args)

    def start_adding(self, target: Pointer, source: Pointer, size: int) -> None:
        copy = Copy(target, source, size // 4)
        self.warp.copies.append(copy)
        if self.warps.rng.integers(2):
            copy.complete()

    def fetch_chunk(self, target: Pointer, source: Pointer, size: int, barrier: Pointer) -> None:
        self.warps.pause()
        target.view(size // 4)[:] = source.view(size // 4)
        barrier.view(1)[0] += 1

    def add_to_mark(self, address: int, number: int) -> None:
        self.warps.pause()
        self.marks[self.mark(address)] += number

    def set_mark(self, address: int, number: int) -> None:
        self.marks[self.mark(address)] = number

    def set_four(self, target: Pointer, number: float) -> None:
        assert target.place % 4 == 0
        target.view(4)[:] = number

    def store_eight(self, target: Pointer, *pairs: tuple[float, float]) -> None:
        assert target.place % 8 == 0
        assert np.isnan(target.view(8)).all(), "written twice"
        target.view(8)[:] = [number for pair in pairs for number in pair]

    def wait_group(self, most: int, read: bool) -> None:
        """Of the copies that are under way, all but the last ones come to an end, or have read."""
        self.warps.pause()
        count = max(0, len(self.warp.copies) - most)
        for copy in self.warp.copies[:count]:
            copy.read()
        if not read:
            for copy in self.warp.copies[:count]:
                copy.complete()
            del self.warp.copies[:count]

    def mbarrier_wait(self, barrier: Pointer, phase: int) -> None:
        """The copy is made at once; so there is one that nothing has waited for, of this phase."""
        waited = self.warp.phases.get(barrier.place, 0)
        assert barrier.view(1)[0] == waited + 1
        assert phase == waited % 2
        self.warp.phases[barrier.place] = waited + 1

    def barrier_arrive(self, barrier_id: int, number_of_threads: int) -> None:
        """A part may be written. It is at once. (`fragments` has no warp.)"""
        if not hasattr(self.own, "warp"):
            return
        wg = barrier_id - backward.Barrier.DQ_EMPTY
        assert 0 <= wg < self.warpgroups
        assert number_of_threads == 160
        part = next(self.warp.parts[wg])
        (self.warp.shared + wg * backward.DQ_PART).view(backward.DQ_PART)[:] = part

    def barrier(self, barrier_id: int, number_of_threads: int) -> None:
        if not hasattr(self.own, "warp"):
            return
        if barrier_id != backward.Barrier.FINISHED:
            assert 0 <= barrier_id - backward.Barrier.DQ_FULL < self.warpgroups
            return
        # The two finishing warps of a CTA meet; a number for each of the two, of how often they came.
        assert number_of_threads == 64
        first = 2 * self.warp.cta
        mine, other = first + self.warp.number % 2, first + 1 - self.warp.number % 2
        self.arrived[mine] = self.arrived.get(mine, 0) + 1
        self.warps.pause(lambda: self.arrived.get(other, 0) >= self.arrived[mine])


@contextlib.contextmanager
def in_place_of_the_compiler(model: Model, monkeypatch: Any) -> Iterator[None]:
    """Gives the source its names: plain numbers in place of registers."""

    def same(x: Any) -> Any:
        return x

    arch = constants(
        make_warp_uniform=same,
        warp_idx=lambda: model.warp.number,
        block_idx=lambda: (model.warp.cta, 0, 0),
        lane_idx=lambda: model.warp.lane,
        load=lambda pointer, _: pointer.view(1)[0],
        elect_one=contextlib.nullcontext,
        sync_warp=lambda: None,
        fence_view_async_shared=lambda: None,
        inline_ptx=model.inline_ptx,
        mbarrier_wait=model.mbarrier_wait,
        mbarrier_arrive_and_expect_tx=lambda *_: None,
        barrier=model.barrier,
        barrier_arrive=model.barrier_arrive,
        cp_async_bulk_commit_group=lambda: None,
        cp_async_bulk_wait_group=model.wait_group,
    )

    def copy(source: np.ndarray, target: np.ndarray) -> None:
        target[:] = source

    def make_tensor(pointer: Pointer, layout: Any) -> Any:
        return pointer.view(layout) if isinstance(layout, int) else Rows(pointer, layout)

    cute = constants(
        arch=arch,
        ceil_div=lambda a, b: -(-a // b),
        make_layout=lambda shape, stride=None: shape if stride is None else (shape, stride),
        make_tensor=make_tensor,
        make_rmem_tensor=lambda size, _: np.zeros(size),
        autovec_copy=copy,
    )
    cutlass = constants(
        range=lambda *bounds, unroll: range(*bounds),
        range_constexpr=range,
        const_expr=same,
        select_=lambda condition, a, b: a if condition else b,
    )
    with monkeypatch.context() as patch:
        for name, value in {"cute": cute, "cutlass": cutlass, "divide": divmod}.items():
            patch.setattr(backward, name, value)
        for name in ("Int32", "Int64", "Float32", "Uint32"):
            patch.setattr(backward, name, same)
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of the kernel, with what `_ffi.plan_sums` would choose."""

    batch: int
    queries: int
    heads: int
    width: int
    kv_batch: int
    keys: int
    kv_heads: int
    kv_inner: int = 1
    left: int = 0
    right: int = 0
    query_lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    slots: int
    together: int
    lag: int
    deterministic: bool = False

    @property
    def kv_repeat(self) -> int:
        return self.batch // self.kv_batch

    @property
    def sharers(self) -> int:
        return self.batch * self.heads // (self.kv_batch * self.kv_heads)

    def visited(self, config: BackwardConfig, batch: int, block: int) -> blocks.QueryRange:
        """The query tiles of a batch entry that a block of keys adds to."""
        t, s = (
            min(max(lengths[batch], 0), extent) if lengths else extent
            for lengths, extent in ((self.query_lengths, self.queries), (self.key_lengths, self.keys))
        )
        return blocks.query_range(
            block * config.tile_n,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            query_length=t,
            key_length=s,
            left=self.left if config.mask == "window" else None,
            right={"none": None, "causal": 0, "window": self.right}[config.mask],
        )


def fragments(model: Model) -> np.ndarray:
    """Where `store_dquery` puts the elements of 64 rows and columns: (row, column)."""
    where = np.zeros((WARPGROUP_ROWS, backward.DQ_COLUMNS), int)
    shared = np.full(backward.DQ_PART, -1.0)
    for thread in range(128):
        # The accumulator of a WGMMA: two columns of a row, then of the row 8 below, then of the next eight.
        i = np.arange(backward.DQ_PART // 128)
        row = 16 * (thread // 32) + 8 * (i // 2 % 2) + thread % 32 // 4
        column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
        model.store_dquery(row * backward.DQ_COLUMNS + column, Pointer(shared, 0), 0, thread)
    where.flat[shared.astype(int)] = np.arange(backward.DQ_PART)
    return where


def run(
    config: BackwardConfig, p: Problem, addends: Callable[[int, int, int, int], np.ndarray], **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[tuple[int, int, int], list[int]]]:
    """Runs all thread blocks of a problem.

    Args:
      config: The kernel.
      p: The problem.
      addends: What a block of keys adds to a tile, (tile_m, head_dim), by batch, head, block and tile.
      **options: `factor` of dquery; `resident`, how many thread blocks run at a time; `seed`; `monkeypatch`.

    Returns:
      dquery, NaN where nothing was written; the sums and marks that are left; the blocks that have added, in
      order, by batch, head and tile.
    """
    tiles, key_blocks = math.ceil(p.queries / config.tile_m), math.ceil(p.keys / config.tile_n)
    sums = np.zeros(p.slots * tiles * config.tile_m * config.head_dim)
    marks = np.zeros((p.slots, 2 + tiles), int)
    dquery = np.full((p.batch, p.queries, p.heads, p.width), np.nan)
    warps = Warps(options["seed"])
    model = Model(config, warps, marks.reshape(-1))
    order: dict[tuple[int, int, int], list[int]] = {}
    schedule = backward.Schedule(
        query_shape=(p.queries, p.width, p.heads, p.batch),
        key_shape=(p.keys, p.width, p.kv_heads, p.kv_batch),
        query_lengths=p.query_lengths,
        key_lengths=p.key_lengths,
        window_left=p.left,
        window_right=p.right,
        group=p.heads // p.kv_heads,
        kv_repeat=p.kv_repeat,
        kv_inner=p.kv_inner,
        slots=p.slots,
        together=p.together,
        lag=p.lag,
        deterministic=int(p.deterministic),
    )

    with in_place_of_the_compiler(model, options["monkeypatch"]):
        places = fragments(model)

        def parts(cta: int, wg: int) -> Iterator[np.ndarray]:
            """What warpgroup `wg` hands over, step by step: see `issue_dquery` and `operands`."""
            block = model.block(schedule, cta)
            for sharer in range(p.sharers):
                work, visited = model.locate(schedule, block, sharer)
                for tile in range(visited.start, visited.stop):
                    if wg == 0:
                        order.setdefault((work.batch, work.head, tile), []).append(block.index)
                    addend = addends(work.batch, work.head, block.index, tile)
                    for number in range(model.dq_passes):
                        row = wg * WARPGROUP_ROWS if model.dq_by_rows else 0
                        column = number if model.dq_by_rows else wg * model.dq_passes + number
                        column *= backward.DQ_COLUMNS
                        part = np.zeros(backward.DQ_PART)
                        rows, columns = (
                            row + np.arange(WARPGROUP_ROWS),
                            column + np.arange(backward.DQ_COLUMNS),
                        )
                        part[places] = addend[np.ix_(rows, columns)]
                        yield part

        def adding(cta: int) -> None:
            shared = Pointer(np.zeros(model.warpgroups * backward.DQ_PART), 0)
            supply = [parts(cta, wg) for wg in range(model.warpgroups)]
            model.own.warp = warp = Warp(cta, backward.REDUCE_WARP, supply, shared)
            model.add_dquery(Pointer(sums, 0), MARKS, shared, schedule)
            assert warp.copies == [], "copies are under way at the end"
            assert all(next(rest, None) is None for rest in supply)

        def finishing(cta: int, number: int, chunks: Pointer, barriers: Pointer) -> None:
            model.own.warp = Warp(cta, number, [], chunks)
            factor = Pointer(np.array([options["factor"]]), 0)
            model.finish(
                Pointer(dquery.reshape(-1), 0), Pointer(sums, 0), MARKS, factor, chunks, barriers, schedule
            )

        count = p.kv_batch * p.kv_heads * key_blocks
        queue: list[tuple[Any, Callable[[], None]]] = []
        for cta in range(count + p.lag * p.together * key_blocks):
            stages = 2 * config.finish_stages
            chunks = Pointer(np.full(stages * model.chunk, np.nan), 0)
            barriers = Pointer(np.zeros(stages, int), 0)
            if cta < count:
                queue.append(((cta, 1), lambda cta=cta: adding(cta)))
            for number in (2, 3):
                arguments = (cta, number, chunks, barriers)
                queue.append(((cta, number), lambda arguments=arguments: finishing(*arguments)))
        warps.run(queue, 3 * options["resident"])
    return dquery, sums, marks, order

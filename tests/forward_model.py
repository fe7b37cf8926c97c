"""Runs the Python source of the forward kernel's producer and consumers, without arithmetic and a GPU.

Every warpgroup is a thread, of which one runs at a time (`backward_model.Warps`). Stages of shared memory
hold the names of tiles in place of their elements; a matmul looks at which it reads. What the kernel takes
from its compiler is replaced, and what computes on registers does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from backward_model import Warps

from jax_r2p.kernels import forward
from jax_r2p.kernels.config import WARPGROUP_ROWS, ForwardConfig


class Divisor(int):
    """A number that also is its own divisor."""

    @property
    def divisor(self) -> int:
        return int(self)


@dataclasses.dataclass
class State:
    """A place in the round of stages, and in which of two rounds."""

    count: int
    index: int = 0
    phase: int = 0

    def advance(self) -> None:
        self.index += 1
        if self.index == self.count:
            self.index, self.phase = 0, 1 - self.phase


class Stages:
    """Stages that one producer fills, and that `consumers` warpgroups empty, or one of them each."""

    def __init__(self, warps: Warps, count: int, consumers: int):
        self.warps, self.consumers = warps, consumers
        self.content: list[Any] = [None] * count
        self.fills = [0] * count
        self.releases = [0] * count
        self.seen: dict[tuple[Any, int], int] = {}

    def producer_acquire(self, state: State) -> None:
        stage = state.index
        self.warps.pause(lambda: self.releases[stage] == self.consumers * self.fills[stage])
        assert state.phase == self.fills[stage] % 2

    def producer_get_barrier(self, state: State) -> tuple[Stages, int]:
        return self, state.index

    def fill(self, stage: int, content: Any) -> None:
        self.content[stage] = content
        self.fills[stage] += 1

    def consumer_wait(self, state: State) -> None:
        """Waits as an mbarrier does: by the phase alone, which tells a fill from the next one only."""
        stage = state.index
        self.warps.pause(lambda: self.fills[stage] % 2 != state.phase)
        self.seen[self.warps.own.name, stage] = self.fills[stage]

    def consumer_release(self, state: State) -> None:
        self.warps.pause()
        if self.warps.own.none_left and not self.is_held(state.index):
            return  # nobody waits any more
        seen = self.seen.pop((self.warps.own.name, state.index), None)
        assert seen == self.fills[state.index], "released without having been waited for"
        self.releases[state.index] += 1
        assert self.releases[state.index] <= self.consumers * seen, "released twice"

    def is_held(self, stage: int) -> bool:
        return self.seen.get((self.warps.own.name, stage)) == self.fills[stage]

    def read(self, stage: int) -> Any:
        """What is in a stage; only between waiting for it and releasing it."""
        assert self.is_held(stage), "read while not held"
        return self.content[stage]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of the kernel. `ctas` and `paired_tiles` as the launcher chooses them."""

    batch: int
    queries: int
    keys: int
    heads: int
    left: int = 0
    right: int = 0
    query_lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    ctas: int
    paired_tiles: int = 0


class Model(forward.AttentionForward):
    """A kernel whose roles run here. Use it in `in_place_of_the_compiler`."""

    produce = forward.AttentionForward.produce.__wrapped__
    consume = forward.AttentionForward.consume.__wrapped__
    skip = forward.AttentionForward.skip.__wrapped__

    def __init__(self, config: ForwardConfig, warps: Warps):
        super().__init__(config)
        self.warps, self.own = warps, warps.own
        self.computed: dict[tuple[int, int, int], list[tuple[int, bool, bool]]] = {}
        self.turns: dict[tuple[int, int], int] = {}

    # In place of what is compiled in another way.

    def sequence_length(self, lengths: Any, batch: int, extent: int) -> int:
        return min(max(lengths[batch], 0), extent) if lengths else extent

    def _tma_tiles(self, operand: Any, place: tuple, tile: Any, which: Any = None) -> tuple[Any, Any, Any]:
        _, _, head, batch = place
        return None, _Anything(), _Named((operand, batch, head))

    def _scores_matmul(self, accumulate: bool) -> Any:
        return mock.MagicMock()

    def _output_matmul(self) -> Any:
        return mock.MagicMock()

    # What computes: only what it reads and where is of interest.

    def begin_scores(self, matmul: Any, s_rows: Any, pipelines: Any, *arguments: Any) -> Any:
        _, index, count, _ = arguments
        self.own.none_left = index >= count
        self.own.early_slot = index % self.config.query_stages * self.warpgroups + self.own.wg
        begin = forward.AttentionForward.begin_scores.__wrapped__
        return begin(self, matmul, s_rows, pipelines, *arguments)

    def query_rows(self, frag_q: Any, slot: int) -> int:
        return slot

    def issue_scores(self, qk: Any, scores: Any, slot: int, frag_k: Any, stage: int) -> None:
        del qk, scores, frag_k
        if self.own.none_left:
            return
        queries = self.own.pipelines.query
        slot = self.own.early_slot if not isinstance(slot, int) else slot
        if queries.is_held(slot) or not self.config.query_in_registers:
            self.own.query = queries.read(slot)
        self.own.scores = (self.own.query, self.own.pipelines.key.read(stage))

    def apply_mask(self, scores: Any, work: Any, row: int, origin: int, *, right: bool, left: bool) -> None:
        del scores
        query, (name, batch, head, block) = self.own.scores
        assert (name, batch, head) == ("key", work.kv_batch, work.kv_head)
        group_row = work.first_row + self.own.wg * WARPGROUP_ROWS
        assert query == ("query", work.batch, work.head, group_row // WARPGROUP_ROWS)
        assert (row, origin) == (group_row, block * self.tile_n)
        place = (work.batch, work.head, group_row)
        self.computed.setdefault(place, []).append((block, right, left))
        self.own.pending.append(("value", batch, head, block))

    def issue_output(self, pv: Any, acc: Any, weights: Any, frag_v: Any, stage: int) -> None:
        del pv, acc, weights, frag_v
        assert self.own.pipelines.value.read(stage) == self.own.pending.pop(0)

    def finish(self, store: Any, slot: int, *arguments: Any) -> None:
        del store, arguments
        if self.config.out_in_query:
            self.own.pipelines.query.read(slot)
        assert not self.own.pending, "weights without values"

    def take_turn(self, wg: int) -> None:
        if self.config.ping_pong:
            key = (self.own.cta, wg)
            self.warps.pause(lambda: self.turns.get(key, 0) > 0)
            self.turns[key] -= 1

    def pass_turn(self, wg: int) -> None:
        if self.config.ping_pong:
            key = (self.own.cta, (wg + 1) % self.warpgroups)
            self.turns[key] = self.turns.get(key, 0) + 1

    def softmax(self, *_: Any, **__: Any) -> None: ...
    def shrink(self, *_: Any) -> None: ...
    def round_pairs(self, *_: Any) -> None: ...
    def negate(self, *_: Any) -> None: ...
    def sync_warpgroup(self, *_: Any) -> None: ...


class _Anything:
    """What is indexed by a stage, and is that stage."""

    def __getitem__(self, index: tuple[None, int]) -> int:
        return index[1]


class _Named:
    """Tiles of a head by number."""

    def __init__(self, name: tuple[str, int, int]):
        self.name = name

    def __getitem__(self, index: tuple[None, int]) -> tuple[str, int, int, int]:
        return (*self.name, index[1])


@contextlib.contextmanager
def in_place_of_the_compiler(model: Model, monkeypatch: Any) -> Iterator[None]:
    """Gives the source its names: plain numbers in place of registers."""

    def same(x: Any) -> Any:
        return x

    def copy(atom: Any, source: Any, target: Any, tma_bar_ptr: Any = None) -> None:
        del atom
        if tma_bar_ptr:  # else into registers
            stages, stage = tma_bar_ptr
            assert stage == target
            stages.fill(stage, source)

    cute = mock.MagicMock()
    cute.arch.block_idx = lambda: (model.own.cta, 0, 0)
    cute.arch.grid_dim = lambda: (model.own.ctas, 1, 1)
    cute.arch.thread_idx = lambda: (0, 0, 0)
    cute.arch.warp_idx = lambda: 4 * (model.own.wg + 1)
    cute.arch.make_warp_uniform = same
    cute.arch.load = lambda *_: 1.0
    cute.arch.fmax = lambda a, b, nan: max(a, b)
    cute.ceil_div = lambda a, b: -(-a // b)
    cute.copy = copy
    cutlass = types.SimpleNamespace(
        range=lambda *bounds, unroll: range(*bounds),
        range_constexpr=range,
        const_expr=same,
        select_=lambda condition, a, b: a if condition else b,
    )
    pipeline = types.SimpleNamespace(
        PipelineUserType=types.SimpleNamespace(Producer=0, Consumer=1),
        # A producer's first round finds all stages empty; `Stages` counts in place of a phase for that.
        make_pipeline_state=lambda _, count: State(count),
        PipelineState=lambda count, _, index, phase: State(count, index, phase),
    )
    replaced = {"cute": cute, "cutlass": cutlass, "pipeline": pipeline}
    replaced |= {name: mock.MagicMock() for name in ("warp", "warpgroup", "a_operand_layout", "transposed")}
    with monkeypatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(forward, name, value)
        for name in ("Int32", "Float32"):
            number = mock.MagicMock(side_effect=same)
            number.inf = float("inf")
            patch.setattr(forward, name, number)
        yield


def run(config: ForwardConfig, p: Problem, *, seed: int, monkeypatch: Any) -> Any:
    """Runs all thread blocks of a problem.

    Returns:
      By batch, head and first row of a warpgroup: the key blocks that it computed, in order, each with
      whether it took the masks of the right and the left bound.
    """
    warps = Warps(seed)
    model = Model(config, warps)
    tiles = -(-p.queries // config.tile_m)
    schedule = forward.Schedule(
        query_shape=(p.queries, config.head_dim, p.heads, p.batch),
        key_shape=(p.keys, config.head_dim, p.heads, p.batch),
        lengths=forward.Lengths(p.query_lengths, p.key_lengths),
        value_shape=(p.keys, config.value_head_dim, p.heads, p.batch),
        window_left=p.left,
        window_right=p.right,
        paired_tiles=p.paired_tiles,
        section_tiles=Divisor(p.heads * tiles),
        section_heads=Divisor(p.heads),
        heads=Divisor(p.heads),
        group=Divisor(1),
        kv_outer=Divisor(1),
        kv_inner=Divisor(1),
    )

    def role(cta: int, wg: int, pipelines: forward.Pipelines) -> None:
        own = model.own
        own.cta, own.ctas, own.wg, own.pipelines, own.pending = cta, p.ctas, wg, pipelines, []
        own.none_left = False
        if wg < 0:
            model.produce("query", "key", "value", pipelines, schedule)
        else:
            arrays = forward.Arrays(*[None] * 5)
            model.consume((mock.MagicMock(),) * 3, None, pipelines, arrays, schedule)

    queue = []
    for cta in range(p.ctas):
        pipelines = forward.Pipelines(
            query=Stages(warps, model.query_slots, 1),
            key=Stages(warps, config.stages, model.warpgroups),
            value=Stages(warps, config.stages, model.warpgroups),
        )
        queue += [
            ((cta, wg), lambda cta=cta, wg=wg, pipelines=pipelines: role(cta, wg, pipelines))
            for wg in range(-1, model.warpgroups)
        ]
    with in_place_of_the_compiler(model, monkeypatch):
        warps.run(queue, len(queue))
    return model.computed

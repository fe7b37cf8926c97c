"""The arithmetic of visited and masked key blocks, with plain integers against the definition of the mask."""

from __future__ import annotations

import dataclasses
from typing import Any, SupportsIndex

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jax_r2p._spec import UNBOUNDED
from jax_r2p.kernels import blocks

LONGEST_KEYS = UNBOUNDED
LONGEST_QUERY = 2**29


@dataclasses.dataclass(frozen=True)
class Problem:
    query_length: int
    key_length: int
    left: int | None
    right: int | None

    def keys_of(self, row: int) -> range:
        """The keys that `row` sees, by the definition."""
        center = row + self.key_length - self.query_length
        start = 0 if self.left is None else max(0, center - self.left)
        stop = self.key_length if self.right is None else min(self.key_length, center + self.right + 1)
        return range(start, max(start, stop))

    def block_range(self, first_row: int, tile_m: int, tile_n: int) -> blocks.BlockRange:
        return blocks.block_range(first_row, tile_m=tile_m, tile_n=tile_n, **dataclasses.asdict(self))


def bounds(largest: int) -> st.SearchStrategy[int | None]:
    # What a launch can pass: none at all (the kernel was compiled without), any number, or "unbounded".
    return st.one_of(st.none(), st.integers(0, largest), st.just(UNBOUNDED))


def problems(largest: int) -> st.SearchStrategy[Problem]:
    lengths = st.integers(1, largest)
    return st.builds(Problem, lengths, lengths, left=bounds(largest), right=bounds(largest))


# Small tiles cross every kind of edge at small lengths. 64 and 160 are what the kernels have.
tiles = st.sampled_from([(4, 4), (4, 12), (12, 4), (64, 64), (128, 160)])


@given(problems(largest=300), tiles)
@example(Problem(query_length=200, key_length=72, left=None, right=0), (64, 64))
@example(Problem(query_length=5, key_length=300, left=0, right=0), (4, 4))
@example(Problem(query_length=300, key_length=5, left=1, right=0), (12, 4))
def test_visited_blocks_hold_every_visible_key(problem: Problem, tile: tuple[int, int]) -> None:
    tile_m, tile_n = tile
    for first_row in range(0, problem.query_length, tile_m):
        visited = problem.block_range(first_row, tile_m, tile_n)
        rows = range(first_row, min(first_row + tile_m, problem.query_length))
        needed = {key // tile_n for row in rows for keys in [problem.keys_of(row)] for key in keys}
        # A block in the middle may hold nothing, where rows far from each other see keys far from each other.
        if needed:
            assert (visited.start, visited.stop) == (min(needed), max(needed) + 1)
        else:
            assert visited.stop == visited.start + 1, "one block, to be masked whole"
        assert visited.start >= 0
        assert visited.stop <= -(-problem.key_length // tile_n)


@given(problems(largest=300), tiles)
@example(Problem(query_length=128, key_length=128, left=None, right=0), (64, 64))
@example(Problem(query_length=65, key_length=300, left=64, right=0), (64, 64))
def test_unmasked_blocks_are_visible_whole(problem: Problem, tile: tuple[int, int]) -> None:
    tile_m, tile_n = tile
    for first_row in range(0, problem.query_length, tile_m):
        visited = problem.block_range(first_row, tile_m, tile_n)
        assert visited.start <= visited.left_masked
        assert visited.start <= visited.right_masked <= visited.stop - 1
        rows = range(first_row, min(first_row + tile_m, problem.query_length))
        # The first block visited, stop - 1, takes every mask.
        for block in range(visited.start, visited.stop - 1):
            keys = range(block * tile_n, (block + 1) * tile_n)
            right_crossed = any(keys[-1] > problem.keys_of(row).stop - 1 for row in rows)
            left_crossed = any(keys[0] < problem.keys_of(row).start for row in rows)
            if block < visited.right_masked:
                assert not right_crossed
            if block >= visited.left_masked:
                assert not left_crossed


@given(problems(largest=300), tiles)
def test_masked_blocks_are_crossed_by_the_bound(problem: Problem, tile: tuple[int, int]) -> None:
    """No block pays for a mask that hides nothing there."""
    tile_m, tile_n = tile
    center = problem.key_length - problem.query_length
    for first_row in range(0, problem.query_length, tile_m):
        visited = problem.block_range(first_row, tile_m, tile_n)
        last_row = min(first_row + tile_m, problem.query_length) - 1
        for block in range(visited.start, visited.stop - 1):
            if block >= visited.right_masked:
                assert problem.right is not None
                assert first_row + center + problem.right < (block + 1) * tile_n - 1
            if block < visited.left_masked:
                assert problem.left is not None
                assert last_row + center - problem.left > block * tile_n


@given(problems(largest=300), tiles)
@example(Problem(query_length=128, key_length=128, left=None, right=0), (64, 64))
@example(Problem(query_length=64, key_length=64, left=0, right=0), (12, 4))
@example(Problem(query_length=65, key_length=300, left=64, right=0), (64, 64))
def test_loops_run_through_every_block_once(problem: Problem, tile: tuple[int, int]) -> None:
    """From the last to the first, each with the bounds that cross it and no others."""
    tile_m, tile_n = tile
    has_right, has_left = problem.right is not None, problem.left is not None
    for first_row in range(0, problem.query_length, tile_m):
        visited = problem.block_range(first_row, tile_m, tile_n)
        loops = visited.loops(has_right=has_right, has_left=has_left)
        rounds = [(block, loop) for loop in loops for block in range(loop.high - 1, loop.low - 1, -1)]
        # The block visited first is outside the loops.
        assert [block for block, _ in rounds] == list(range(visited.stop - 2, visited.start - 1, -1))
        for block, loop in rounds:
            right_crossed = has_right and block >= visited.right_masked
            left_crossed = has_left and block < visited.left_masked
            # Blocks that the right bound crosses take both masks: one loop for them is enough.
            assert (loop.right, loop.left) == (right_crossed, has_left if right_crossed else left_crossed)


@pytest.mark.parametrize(
    ("has_right", "has_left", "masks"),
    [
        (False, False, [(False, False)]),
        (True, False, [(True, False), (False, False)]),
        (False, True, [(False, False), (False, True)]),
        (True, True, [(True, True), (False, False), (False, True)]),
    ],
)
def test_a_mask_has_only_the_loops_of_its_bounds(
    has_right: bool, has_left: bool, masks: list[tuple[bool, bool]]
) -> None:
    loops = blocks.BlockRange(2, 4, 7, 9).loops(has_right=has_right, has_left=has_left)
    assert [(loop.right, loop.left) for loop in loops] == masks


@given(problems(largest=300), st.sampled_from([(12, 4), (12, 12), (128, 32)]))
def test_blocks_of_a_part_of_a_tile(problem: Problem, tile: tuple[int, int]) -> None:
    """Each of four parts has some of its tile's blocks; if it sees a key, just those it has as a tile."""
    tile_m, tile_n = tile
    rows = tile_m // 4
    for first_row in range(0, problem.query_length, tile_m):
        visited = problem.block_range(first_row, tile_m, tile_n)
        for part_row in range(first_row, first_row + tile_m, rows):
            alone = problem.block_range(part_row, rows, tile_n)
            own = alone.within(visited)
            assert visited.start <= own.start < own.stop <= visited.stop
            assert own.start <= own.left_masked
            assert own.start <= own.right_masked < own.stop
            there = range(part_row, min(part_row + rows, problem.query_length))
            if any(len(problem.keys_of(row)) for row in there):
                assert own == alone


@given(problems(largest=300), tiles, st.integers(0, 3))
def test_tiles_beyond_the_queries_visit_one_block(problem: Problem, tile: tuple[int, int], more: int) -> None:
    """A sequence may be shorter than its array, and have no key or no query: one block, masked whole."""
    tile_m, tile_n = tile
    for key_length in (0, problem.key_length):
        for query_length in (0, problem.query_length):
            short = dataclasses.replace(problem, query_length=query_length, key_length=key_length)
            first_row = (-(-query_length // tile_m) + more) * tile_m
            visited = short.block_range(first_row, tile_m, tile_n)
            assert visited == blocks.BlockRange(start=0, left_masked=0, right_masked=0, stop=1)
            loops = visited.loops(has_right=problem.right is not None, has_left=problem.left is not None)
            assert all(loop.high <= loop.low for loop in loops)


@given(problems(largest=300), tiles)
def test_sequences_without_keys_visit_one_block(problem: Problem, tile: tuple[int, int]) -> None:
    tile_m, tile_n = tile
    empty = dataclasses.replace(problem, key_length=0)
    for first_row in range(0, empty.query_length, tile_m):
        visited = empty.block_range(first_row, tile_m, tile_n)
        assert visited == blocks.BlockRange(start=0, left_masked=0, right_masked=0, stop=1)
        for row in range(first_row, first_row + tile_m):
            lengths = {"query_length": empty.query_length, "key_length": 0}
            assert blocks.right_limit(row, right=problem.right, **lengths) <= 0


@given(problems(largest=300))
def test_limits_of_a_row(problem: Problem) -> None:
    lengths = {"query_length": problem.query_length, "key_length": problem.key_length}
    for row in range(problem.query_length):
        stop = blocks.right_limit(row, right=problem.right, **lengths)
        start = 0 if problem.left is None else blocks.left_limit(row, left=problem.left, **lengths)
        visible = [key for key in range(problem.key_length) if start <= key < stop]
        assert visible == list(problem.keys_of(row))


# The backward pass: query tiles of a key block ----------------------------------------------------------

backward_tiles = st.sampled_from([(4, 4), (4, 12), (64, 64), (64, 128), (128, 128)])


def lengths_from_zero(largest: int) -> st.SearchStrategy[Problem]:
    lengths = st.integers(0, largest)
    return st.builds(Problem, lengths, lengths, left=bounds(largest), right=bounds(largest))


def visible_pairs(problem: Problem) -> np.ndarray:
    """(query_length, key_length), by the definition."""
    pairs = np.zeros((problem.query_length, problem.key_length), bool)
    for row in range(problem.query_length):
        keys = problem.keys_of(row)
        pairs[row, keys.start : keys.stop] = True
    return pairs


def ranges(problem: Problem, tile: tuple[int, int], more: int = 1) -> dict[int, blocks.QueryRange]:
    """Of each key block of arrays that hold `more` blocks than the sequence."""
    tile_m, tile_n = tile
    sizes = {"tile_m": tile_m, "tile_n": tile_n, **dataclasses.asdict(problem)}
    count = -(-problem.key_length // tile_n) + more
    return {block: blocks.query_range(block * tile_n, **sizes) for block in range(count)}


def last_block(problem: Problem, tile: tuple[int, int], number: int) -> int:
    fields = dataclasses.asdict(problem)
    del fields["left"]
    return blocks.last_block(number * tile[0], tile_m=tile[0], tile_n=tile[1], **fields)


ends = (
    example(Problem(200, 72, None, 0), (64, 64)),  # rows that see nothing
    example(Problem(5, 300, 0, 0), (4, 4)),
    example(Problem(300, 5, 1, 0), (4, 12)),
    example(Problem(129, 300, 64, 0), (64, 128)),
    example(Problem(0, 9, None, None), (4, 4)),
    example(Problem(9, 0, 3, 0), (4, 4)),
    example(Problem(65, 257, 7, UNBOUNDED), (64, 64)),
)


def with_examples(test: Any) -> Any:
    for add in ends:
        test = add(test)
    return test


@with_examples
@given(lengths_from_zero(largest=300), backward_tiles)
def test_query_tiles_hold_every_visible_pair(problem: Problem, tile: tuple[int, int]) -> None:
    """No pair is missed, and no tile visited for nothing, but for a last one with rows that are not there."""
    tile_m, tile_n = tile
    pairs = visible_pairs(problem)
    tiles_there = -(-problem.query_length // tile_m)
    for block, visited in ranges(problem, tile).items():
        assert 0 <= visited.start <= visited.stop
        assert visited.start == visited.stop or visited.stop <= tiles_there
        keys = pairs[:, block * tile_n : (block + 1) * tile_n]
        for number in range(tiles_there):
            rows = keys[number * tile_m : (number + 1) * tile_m]
            is_visited = visited.start <= number < visited.stop
            if len(rows) == tile_m:
                assert is_visited == bool(rows.any()), (block, number)
            else:
                assert is_visited or not rows.any(), (block, number)


@with_examples
@given(lengths_from_zero(largest=300), backward_tiles)
def test_unmasked_query_tiles_are_wholly_visible(problem: Problem, tile: tuple[int, int]) -> None:
    """And masked ones hide something, as far as all their rows are there."""
    tile_m, tile_n = tile
    pairs = visible_pairs(problem)
    for block, visited in ranges(problem, tile).items():
        for number in range(visited.start, visited.stop):
            rows = pairs[number * tile_m : (number + 1) * tile_m, block * tile_n : (block + 1) * tile_n]
            # As `AttentionBackward.is_masked`.
            masked = number < visited.right_masked or (
                problem.left is not None and number >= visited.left_masked
            )
            if not masked:
                assert rows.shape[1] == tile_n, "the end of the keys is in no unmasked tile"
                assert rows.all(), (block, number)
            elif rows.shape == (tile_m, tile_n):
                assert not rows.all(), (block, number)


@with_examples
@given(lengths_from_zero(largest=300), backward_tiles)
def test_blocks_of_a_query_tile_take_turns_without_gaps(problem: Problem, tile: tuple[int, int]) -> None:
    """From the last one down: block n waits for `last_block` - n others, and so many come before it."""
    visiting: dict[int, list[int]] = {}
    for block, visited in ranges(problem, tile).items():
        for number in range(visited.start, visited.stop):
            visiting.setdefault(number, []).append(block)
    for number, found in visiting.items():
        last = last_block(problem, tile, number)
        assert found == list(range(found[0], last + 1)), number
        for turn, block in enumerate(reversed(found)):
            assert last - block == turn, "as many as have added before"


@with_examples
@given(lengths_from_zero(largest=300), backward_tiles)
def test_limits_of_a_key(problem: Problem, tile: tuple[int, int]) -> None:
    """The queries from the first limit up to the second see the key; of rows that are there, no others."""
    pairs = visible_pairs(problem)
    for key in range(-(-problem.key_length // tile[1]) * tile[1]):
        first, end = blocks.query_limits(key, **dataclasses.asdict(problem))
        rows = range(problem.query_length)
        seen = [first <= row and (end is None or row < end) for row in rows]
        if key < problem.key_length:
            assert seen == pairs[:, key].tolist(), key
        else:
            assert not any(seen), key


class Int32(int):
    """A plain integer whose arithmetic fails where a 32-bit register would wrap around."""

    def __new__(cls, value: SupportsIndex) -> Int32:
        if not -(2**31) <= int(value) < 2**31:
            raise OverflowError(f"{int(value)} needs more than 32 bits")
        return super().__new__(cls, value)


def _checked(name: str) -> Any:
    plain = getattr(int, name)
    return lambda self, other: Int32(plain(int(self), int(other)))


for _name in ("add", "sub", "mul", "floordiv"):
    for _prefix in ("__", "__r"):
        setattr(Int32, f"{_prefix}{_name}__", _checked(f"{_prefix}{_name}__"))


def test_checked_integers_notice_an_overflow() -> None:
    with pytest.raises(OverflowError, match="2147483648 needs"):
        Int32(2**31 - 1) + 1
    with pytest.raises(OverflowError, match="-2147483649 needs"):
        1 - Int32(2**31 - 1) - Int32(3)


@st.composite
def launched_problems(draw: st.DrawFn) -> Problem:
    """What the launcher lets through: window ends reach at most all keys or rows of the arrays, and sequences
    may be shorter than these.
    """
    rows = draw(st.integers(1, LONGEST_QUERY))
    keys = draw(st.integers(1, LONGEST_KEYS))
    left = draw(st.one_of(st.none(), st.integers(0, keys), st.just(keys)))
    right = draw(st.one_of(st.none(), st.integers(0, rows), st.just(rows)))
    query_length = draw(st.just(rows) | st.integers(0, rows))
    key_length = draw(st.just(keys) | st.integers(0, keys))
    return Problem(query_length, key_length, left, right)


@settings(max_examples=400)
@given(launched_problems(), tiles, st.data())
@example(Problem(LONGEST_QUERY, LONGEST_KEYS, LONGEST_KEYS, LONGEST_QUERY), (128, 160), None)
@example(Problem(LONGEST_QUERY, 1, 1, LONGEST_QUERY), (128, 160), None)
@example(Problem(1, LONGEST_KEYS, LONGEST_KEYS, 1), (128, 160), None)
@example(Problem(0, 0, LONGEST_KEYS, LONGEST_QUERY), (128, 160), None)
@example(Problem(0, LONGEST_KEYS, LONGEST_KEYS, LONGEST_QUERY), (128, 160), None)
@example(Problem(LONGEST_QUERY, 0, LONGEST_KEYS, LONGEST_QUERY), (128, 160), None)
def test_no_32_bit_overflow(problem: Problem, tile: tuple[int, int], data: st.DataObject | None) -> None:
    tile_m, tile_n = tile
    wide = dataclasses.asdict(problem)
    narrow = {name: value if value is None else Int32(value) for name, value in wide.items()}
    last_tile = (LONGEST_QUERY - 1) // tile_m  # of the array, whatever the sequence's length
    chosen = {0, last_tile} if data is None else {data.draw(st.integers(0, last_tile))}
    for first_row in (index * tile_m for index in sorted(chosen)):
        tile_sizes = {"tile_m": tile_m, "tile_n": tile_n}
        expected = blocks.block_range(first_row, **tile_sizes, **wide)
        assert blocks.block_range(Int32(first_row), **tile_sizes, **narrow) == expected
        # The kernel takes the limits of every row of a tile, those past the end too.
        for row in (first_row, first_row + tile_m - 1):
            lengths = {name: narrow[name] for name in ("query_length", "key_length")}
            blocks.right_limit(Int32(row), right=narrow["right"], **lengths)
            if problem.left is not None:
                blocks.left_limit(Int32(row), left=narrow["left"], **lengths)
        # A key block of the backward pass, and its last tile.
        first_key = min(first_row, (LONGEST_KEYS - 1) // tile_n * tile_n)
        expected_tiles = blocks.query_range(first_key, **tile_sizes, **wide)
        assert blocks.query_range(Int32(first_key), **tile_sizes, **narrow) == expected_tiles
        if expected_tiles.stop > expected_tiles.start:
            fields = {name: narrow[name] for name in ("query_length", "key_length", "right")}
            blocks.last_block(Int32(expected_tiles.stop - 1) * tile_m, **tile_sizes, **fields)
        for key in (first_key, first_key + tile_n - 1):
            first, end = blocks.query_limits(Int32(key), **narrow)
            for origin in (0, last_tile * tile_m + 6):
                assert first - Int32(origin) is not None
                assert end is None or end - Int32(origin) is not None

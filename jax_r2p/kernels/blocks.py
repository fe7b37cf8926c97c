"""Which key blocks a query tile visits, and which of them a mask crosses.

Every function takes plain integers or the compiler's `Int32`, so that tests can check the arithmetic that the
kernel runs. Key j is visible to query i iff i + offset - left <= j <= i + offset + right, j < key_length and
i < query_length, with offset = key_length - query_length (the last query is aligned with the last key). The
lengths are those of one sequence; its arrays may be longer. `left` or `right` is None where the mask has no
such bound.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Index = Any
"""A plain int, or the compiler's Int32."""

FAR = 1 << 30
"""Further than any query: the bound of a key that is not there."""


def _choose(python_function: Any, name: str, a: Index, b: Index) -> Index:
    if isinstance(a, int) and isinstance(b, int):
        return python_function(a, b)
    import cutlass

    return getattr(cutlass, name)(a, b)


def minimum(a: Index, b: Index) -> Index:
    """The smaller of two indices."""
    return _choose(min, "min", a, b)


def maximum(a: Index, b: Index) -> Index:
    """The larger of two indices."""
    return _choose(max, "max", a, b)


def select(condition: Any, a: Index, b: Index) -> Index:
    """`a` if the condition holds, else `b`."""
    if isinstance(condition, bool):
        return a if condition else b
    import cutlass

    return cutlass.select_(condition, a, b)


class Loop(NamedTuple):
    """Blocks from `high - 1` down to `low`, and the bounds that they are masked by; none if high <= low."""

    high: Index
    low: Index
    right: bool
    left: bool


class BlockRange(NamedTuple):
    """Key blocks of one query tile, visited from `stop - 1` down to `start`.

    Blocks at or above `right_masked` cross the right bound, blocks below `left_masked` the left one; both are
    clamped so that start <= left_masked and right_masked <= stop - 1: the block visited first is outside this
    division because it takes every mask, the end of the keys included.
    """

    start: Index
    left_masked: Index
    right_masked: Index
    stop: Index

    def within(self, other: BlockRange) -> BlockRange:
        """This range with what lies outside of another cut off; at least one block of it."""
        start = minimum(maximum(self.start, other.start), other.stop - 1)
        stop = minimum(maximum(self.stop, start + 1), other.stop)
        return BlockRange(
            start=start,
            left_masked=maximum(self.left_masked, start),
            right_masked=minimum(maximum(self.right_masked, start), stop - 1),
            stop=stop,
        )

    def loops(self, *, has_right: bool, has_left: bool) -> list[Loop]:
        """The loops over the blocks after the first, in the order in which they run.

        `has_right`, `has_left`: whether the mask has such a bound at all.
        """
        interior_stop = self.right_masked if has_right else self.stop - 1
        loops = [Loop(interior_stop, self.left_masked, False, False)]
        if has_right:
            loops.insert(0, Loop(self.stop - 1, interior_stop, True, has_left))
        if has_left:
            left_stop = minimum(self.right_masked, self.left_masked)
            loops.append(Loop(left_stop, self.start, False, True))
        return loops


def block_range(
    first_row: Index,
    *,
    tile_m: int,
    tile_n: int,
    query_length: Index,
    key_length: Index,
    left: Index | None,
    right: Index | None,
) -> BlockRange:
    """Blocks visited by the query tile that starts at row `first_row`.

    A tile whose rows see no key at all still visits one block, which is masked whole: the kernel then needs
    no second way to write zeros. For a tile beyond the queries that is block 0.
    """
    key_length = select(first_row < query_length, key_length, 0)
    offset = key_length - query_length
    last_row = minimum(first_row + tile_m, query_length) - 1
    start: Index = 0
    left_masked: Index = 0
    end = key_length
    if left is not None:
        start = maximum(minimum(first_row, query_length) + offset - left, 0) // tile_n
        left_masked = (maximum(last_row + offset - left, 0) + tile_n - 1) // tile_n
    if right is not None:
        end = minimum(end, maximum(last_row + offset + right + 1, 0))
    stop = maximum((end + tile_n - 1) // tile_n, start + 1)
    right_masked = stop - 1
    if right is not None:
        right_masked = minimum(right_masked, maximum(first_row + offset + right + 1, 0) // tile_n)
    return BlockRange(
        start=start,
        left_masked=maximum(left_masked, start),
        right_masked=maximum(right_masked, start),
        stop=stop,
    )


def right_limit(row: Index, *, query_length: Index, key_length: Index, right: Index | None) -> Index:
    """First key that `row` does not see on the right: by its own bound or by the end of the keys."""
    if right is None:
        return key_length
    return minimum(row + (key_length - query_length) + right + 1, key_length)


def left_limit(row: Index, *, query_length: Index, key_length: Index, left: Index) -> Index:
    """First key that `row` sees on the left. It may be negative: then the bound hides nothing."""
    return row + (key_length - query_length) - left


class QueryRange(NamedTuple):
    """Query tiles that a key block is visited with in the backward pass, from `start` up to `stop` - 1.

    Tiles below `right_masked` cross the right bound, tiles from `left_masked` on the left one. A block that
    the end of the keys crosses is masked in every tile.
    """

    start: Index
    right_masked: Index
    left_masked: Index
    stop: Index


def query_range(
    first_key: Index,
    *,
    tile_m: int,
    tile_n: int,
    query_length: Index,
    key_length: Index,
    left: Index | None,
    right: Index | None,
) -> QueryRange:
    """Tiles of `tile_m` query rows that see a key of the block at `first_key`; none: start = stop.

    A tile is visited iff its rows, those beyond the queries included, reach into the block on the right, and
    a row that is there does on the left: so the blocks of a tile are neighbours, and `last_block` knows them.
    """
    offset = key_length - query_length
    start: Index = 0
    right_masked: Index = 0
    end = select(first_key < key_length, query_length, 0)
    if right is not None:
        start = maximum(first_key - offset - right, 0) // tile_m
        # A tile crosses the bound if its first row does not see the last key.
        right_masked = (maximum(first_key + tile_n - 1 - offset - right, 0) + tile_m - 1) // tile_m
    if left is not None:
        end = minimum(end, maximum(minimum(first_key + tile_n, key_length) - offset + left, 0))
    stop = maximum((end + tile_m - 1) // tile_m, start)
    left_masked = stop
    if left is not None:
        # A tile crosses the bound if its last row does not see the first key.
        left_masked = maximum(first_key - offset + left + 1, 0) // tile_m
    whole = first_key + tile_n <= key_length
    return QueryRange(
        start=start,
        right_masked=select(whole, right_masked, stop),
        left_masked=left_masked,
        stop=stop,
    )


def last_block(
    first_row: Index, *, tile_m: int, tile_n: int, query_length: Index, key_length: Index, right: Index | None
) -> Index:
    """The last key block that visits the query tile at `first_row`, given that some block does."""
    last_key = key_length - 1
    if right is not None:
        last_key = minimum(last_key, first_row + tile_m - 1 + (key_length - query_length) + right)
    return last_key // tile_n


def query_limits(
    key: Index, *, query_length: Index, key_length: Index, left: Index | None, right: Index | None
) -> tuple[Index, Index | None]:
    """First query that sees `key`, and the first after it that does not, None for the end of the queries.

    Both may be negative. They do not stop at the queries: rows beyond them have weights of 0.
    """
    offset = key_length - query_length
    first = select(key < key_length, 0 if right is None else key - offset - right, FAR)
    return first, None if left is None else key - offset + left + 1

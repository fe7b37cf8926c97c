"""Score masks of the forward kernel: R2P, and an integer compare an element.

A thread of a warpgroup holds two rows of a score tile. In a row its elements sit at tile columns 0, 1, 8,
9, 16, 17, ... counted from its own first column 2 * (lane % 4). A bound in columns is turned into a bound
in elements (`column_limit_to_element`), the bound into a 32-bit keep-mask for every 32 elements
(`r2p_bitmask_below`, `r2p_bitmask_above`), and the mask's bits, tested with constant positions, into
predicates: ptxas makes one `R2P` of every seven, and tests the eighth of each byte by itself.

The arithmetic takes plain integers as well as the compiler's, so that tests can compare every bit with the
definition of the mask.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from jax_r2p.kernels.blocks import Index, maximum, minimum

WORD = 32
"""Elements whose mask bits share one register."""

ALL_BITS = 0xFFFFFFFF


def _shift(name: str, word: Index, amount: Index) -> Index:
    """`word` shifted by `amount` >= 0 bits, zero from 32 bits on.

    PTX clamps the amount. LLVM leaves a shift by 32 or more undefined and removes code that depends on it
    (seen: the test of one element a word vanished), so the compiled form is inline PTX.
    """
    if isinstance(amount, int):
        if amount >= WORD:
            return 0
        return word >> amount if name == "shr" else (word << amount) & ALL_BITS
    instruction = {"shr": "shr.u32", "shl": "shl.b32"}[name]
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[Uint32(word), Int32(amount)],
    )


def column_limit_to_element(limit: Index) -> Index:
    """How many of a thread's elements in a row lie below column `limit`, counted from its first column.

    Holds for `limit` of any size and sign; a negative one gives a result <= 0.
    """
    return (limit >> 3) * 2 + minimum(limit & 7, 2)


def r2p_bitmask_below(limit: Index, word: int) -> Index:
    """Keep-mask of elements 32 * word ... 32 * word + 31: bit e is set iff 32 * word + e < limit."""
    return _shift("shr", ALL_BITS, maximum((word + 1) * WORD - limit, 0))


def r2p_bitmask_above(limit: Index, word: int) -> Index:
    """Keep-mask of elements 32 * word ... 32 * word + 31: bit e is set iff 32 * word + e >= limit."""
    return _shift("shl", ALL_BITS, maximum(limit - word * WORD, 0))


def keep_word(below: Index | None, above: Index | None, word: int) -> Index:
    """Keep-mask for an upper bound (exclusive), a lower bound (inclusive) or both, in elements."""
    if above is None:
        return r2p_bitmask_below(below, word)
    if below is None:
        return r2p_bitmask_above(above, word)
    return r2p_bitmask_below(below, word) & r2p_bitmask_above(above, word)


def element_column(element: int) -> int:
    """Tile column of a thread's element in a row, counted from the thread's first column."""
    return element // 2 * 8 + element % 2


def score_index(row: int, element: int) -> int:
    """Where element `element` of the thread's row 0 or 1 sits in the accumulator's registers."""
    return element // 2 * 4 + row * 2 + element % 2


def apply_r2p(
    scores: Any, *, below: tuple[Index, ...], above: tuple[Index, ...], hidden: float = -math.inf
) -> None:
    """Set to `hidden` the scores outside [above, below) by bit masks and R2P.

    `scores`: a thread's accumulator of a 64 x tile_n score tile. `below`, `above`: the bounds of its two rows
    in columns counted from the thread's first one: one bound if both rows share it, none where there is none.

    Traced straight-line code: bit positions must be constants, or the compiler cannot emit R2P. Rows that
    share their bounds share predicates, so both are selected on while a predicate is alive.
    """
    count = cute.size(scores) // 2
    distinct = max(len(below), len(above))
    for i in range(distinct):
        rows = range(2) if distinct == 1 else (i,)
        below_element = column_limit_to_element(below[i]) if below else None
        above_element = column_limit_to_element(above[i]) if above else None
        for word in range((count + WORD - 1) // WORD):
            keep = keep_word(below_element, above_element, word)
            for bit in range(min(WORD, count - word * WORD)):
                kept = Boolean(keep & Uint32(1 << bit))
                for row in rows:
                    index = score_index(row, word * WORD + bit)
                    scores[index] = cutlass.select_(kept, scores[index], Float32(hidden))


def apply_compare(scores: Any, coordinates: Any, *, below: Any, above: Any, swapped: bool = False) -> None:
    """Set to -inf the scores outside [above, below) by one or two integer compares an element.

    For any accumulator layout: `coordinates` holds (row, column) of each element of `scores`, or (column,
    row) if A and B are `swapped`; a swapped tile has its columns across threads, so no word of mask bits
    belongs to one thread's row. `below`, `above`: functions from a row to its bound in tile columns, or
    None.
    """
    for index in range(cute.size(scores)):
        row, column = coordinates[index]
        if swapped:
            row, column = column, row
        for bound, inside in ((below, lambda c, b: c < b), (above, lambda c, b: c >= b)):
            if bound is not None:
                scores[index] = cutlass.select_(inside(column, bound(row)), scores[index], -Float32.inf)

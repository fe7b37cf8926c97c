"""The masks' arithmetic, with plain integers: every bit against the definition of the mask."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_r2p._spec import UNBOUNDED
from jax_r2p.kernels import blocks

pytest.importorskip("cutlass", reason="the masks are written in CuTeDSL: pip install jax_r2p[aot]")

from jax_r2p.kernels import mask

# The widest tile has 256 keys: 64 elements in a row of a thread, two words.
ELEMENTS = range(64)
WORDS = range(2)

# Within the tile and a little beyond it on both sides; and as far away as lengths and windows allow.
limits = st.one_of(st.integers(-40, 300), st.integers(-(2**31), 2**31 - 1))


def bits(word: int) -> list[bool]:
    assert 0 <= word < 2**32
    return [bool(word >> bit & 1) for bit in range(32)]


@pytest.mark.parametrize("lane", range(4))
def test_lanes_share_the_columns_of_a_row(lane: int) -> None:
    """Each of the four lanes of a row holds a quarter of its columns, and none is held twice."""
    columns = {2 * lane + mask.element_column(element) for element in ELEMENTS}
    others = {
        2 * other + mask.element_column(element)
        for other in range(4)
        if other != lane
        for element in ELEMENTS
    }
    assert columns | others == set(range(256))
    assert not columns & others


@given(limits)
@example(0)
@example(-1)
@example(8)
@example(256)
def test_column_limit_counts_the_elements_below_it(limit: int) -> None:
    count = mask.column_limit_to_element(limit)
    for element in ELEMENTS:
        assert (element < count) == (mask.element_column(element) < limit)


@pytest.mark.parametrize("word", WORDS)
@given(limit=limits)
@example(limit=0)
@example(limit=1)
@example(limit=31)
@example(limit=32)
@example(limit=33)
@example(limit=64)
@example(limit=-1)
def test_below_keeps_what_is_below_and_above_the_rest(word: int, limit: int) -> None:
    below = [32 * word + bit < limit for bit in range(32)]
    assert bits(mask.r2p_bitmask_below(limit, word)) == below
    assert bits(mask.r2p_bitmask_above(limit, word)) == [not kept for kept in below]


bounds = st.one_of(st.none(), st.integers(0, 600), st.just(UNBOUNDED))


@given(
    query_length=st.integers(1, 400),
    key_length=st.integers(1, 400),
    left=bounds,
    right=bounds,
    tile_n=st.sampled_from([16, 64, 128, 160, 256]),
    lane=st.integers(0, 3),
    data=st.data(),
)
def test_words_of_a_row_are_the_mask(
    query_length: int,
    key_length: int,
    left: int | None,
    right: int | None,
    tile_n: int,
    lane: int,
    data: st.DataObject,
) -> None:
    """From a row and a block to bits by the kernel's steps: limits of the row, of the block, of the lane."""
    row = data.draw(st.integers(0, query_length - 1), label="row")
    block = data.draw(st.integers(0, (key_length - 1) // tile_n), label="block")
    lengths = {"query_length": query_length, "key_length": key_length}
    first_column = block * tile_n + 2 * lane
    below = mask.column_limit_to_element(blocks.right_limit(row, right=right, **lengths) - first_column)
    above = None
    if left is not None:
        above = mask.column_limit_to_element(blocks.left_limit(row, left=left, **lengths) - first_column)

    for element in range(tile_n // 4):
        kept = bits(mask.keep_word(below, above, element // 32))[element % 32]
        key = first_column + mask.element_column(element)
        center = row + key_length - query_length
        visible = (
            key < key_length
            and (left is None or key >= center - left)
            and (right is None or key <= center + right)
        )
        assert kept == visible, f"{element=} {key=}"


def test_rows_and_elements_fill_the_accumulator() -> None:
    """A thread's two rows cover its registers of the score tile, each once."""
    indices = [mask.score_index(row, element) for row in range(2) for element in ELEMENTS]
    assert sorted(indices) == list(range(2 * len(ELEMENTS)))


# What is done to the scores. The traced code is straight-line, so with the compiler's types replaced by plain
# ones the very same functions run on lists.


@contextlib.contextmanager
def plain_types() -> Iterator[None]:
    with (
        mock.patch.object(mask.cutlass, "select_", lambda condition, a, b: a if condition else b),
        mock.patch.object(mask.cute, "size", len),
        mock.patch.object(mask, "Boolean", bool),
        mock.patch.object(mask, "Uint32", int),
    ):
        yield


@given(
    bounds=st.one_of(
        st.tuples(st.tuples(limits), st.just(())),
        st.tuples(st.tuples(limits, limits), st.just(())),
        st.tuples(st.just(()), st.tuples(limits, limits)),
        st.tuples(st.tuples(limits, limits), st.tuples(limits, limits)),
    ),
    tile_n=st.sampled_from([16, 64, 128, 160, 256]),
)
def test_both_lowerings_hide_the_same_scores(bounds: tuple[tuple[int, ...], ...], tile_n: int) -> None:
    """R2P and compares, for one bound that both rows share, for one each, and for a window."""
    below, above = bounds
    count = tile_n // 2
    by_bits, by_compares = [list(map(float, range(count))) for _ in range(2)]
    places = {
        mask.score_index(r, e): (r, mask.element_column(e)) for r in range(2) for e in range(count // 2)
    }
    with plain_types():
        mask.apply_r2p(by_bits, below=below, above=above)
        mask.apply_compare(
            by_compares,
            [places[index] for index in range(count)],
            below=(lambda row: below[row % len(below)]) if below else None,
            above=(lambda row: above[row]) if above else None,
        )
    for index, (row, column) in places.items():
        kept = not below or column < below[row % len(below)]
        kept = kept and (not above or column >= above[row])
        assert by_bits[index] == by_compares[index] == (index if kept else -math.inf), (row, column)


def test_compares_take_a_transposed_tile() -> None:
    """With A and B swapped a thread's registers run along the rows: coordinates say which is which."""
    scores = [float(i) for i in range(6)]
    coordinates = [(column, row) for row in range(3) for column in (4, 5)]
    with plain_types():
        mask.apply_compare(
            scores, coordinates, below=lambda row: row + 4, above=lambda row: 2 * row + 2, swapped=True
        )
    # Row 0 sees columns 2 to 3, row 1 column 4, row 2 none of 6 to 5.
    assert scores == [-math.inf, -math.inf, 2.0, -math.inf, -math.inf, -math.inf]


# The backward pass: transposed tiles, whose rows are keys and whose columns are queries.


@given(
    query_length=st.integers(0, 300),
    key_length=st.integers(1, 300),
    left=bounds,
    right=bounds,
    tile=st.sampled_from([(64, 64), (64, 128), (128, 128)]),
    thread=st.integers(0, 127),
    data=st.data(),
)
def test_weights_of_hidden_pairs_become_0(
    query_length: int,
    key_length: int,
    left: int | None,
    right: int | None,
    tile: tuple[int, int],
    thread: int,
    data: st.DataObject,
) -> None:
    """A thread's weights of two keys and a tile of queries, by the very bounds that the kernel takes."""
    tile_m, tile_n = tile
    block = data.draw(st.integers(0, (key_length - 1) // tile_n), label="block")
    number = data.draw(st.integers(0, max(query_length - 1, 0) // tile_m), label="tile")
    key = block * tile_n + data.draw(st.integers(0, tile_n // 64 - 1), label="warpgroup") * 64
    key += thread // 32 * 16 + thread % 32 // 4
    origin = number * tile_m + 2 * (thread % 4)
    limits = [
        blocks.query_limits(
            key + 8 * row, query_length=query_length, key_length=key_length, left=left, right=right
        )
        for row in range(2)
    ]
    count = tile_m // 2
    weights = [1.0] * count
    with plain_types():
        mask.apply_r2p(
            weights,
            below=tuple(end - origin for _, end in limits if end is not None),
            above=tuple(first - origin for first, _ in limits),
            hidden=0.0,
        )
    for row in range(2):
        for element in range(count // 2):
            query, own = origin + mask.element_column(element), key + 8 * row
            center = query + key_length - query_length
            visible = (
                own < key_length
                and (left is None or own >= center - left)
                and (right is None or own <= center + right)
            )
            # Rows that are not there have weights of 0 already, whatever the mask says of them.
            if query < query_length:
                assert weights[mask.score_index(row, element)] == float(visible), (query, own)

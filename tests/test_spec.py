"""The rule of visible keys, against its definition written out key by key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_r2p._spec import AttentionSpec

SIDES = st.none() | st.integers(0, 12)
LENGTHS = st.integers(0, 9)


def visible(spec: AttentionSpec, t: int, s: int) -> list[list[bool]]:
    """The definition, which `AttentionSpec` states: i + o - left <= j <= i + o + right, o = S - T."""
    o = s - t
    left, right = (10**6 if side is None else side for side in (spec.left, spec.right))
    return [[i + o - left <= j <= i + o + right for j in range(s)] for i in range(t)]


@given(SIDES, SIDES, LENGTHS, LENGTHS)
def test_bounds_are_the_definition(left, right, t, s):
    spec = AttentionSpec(left=left, right=right)
    low, high = spec.bounds(t, s)
    got = [
        [(low is None or low <= j - i) and (high is None or j - i <= high) for j in range(s)]
        for i in range(t)
    ]
    assert got == visible(spec, t, s)


@given(SIDES, SIDES, LENGTHS, LENGTHS)
def test_effective_masks_the_same_elements(left, right, t, s):
    spec = AttentionSpec(left=left, right=right)
    assert visible(spec.effective(t, s), t, s) == visible(spec, t, s)


@given(SIDES, SIDES, LENGTHS, LENGTHS, st.data())
def test_effective_masks_the_same_elements_of_shorter_sequences(left, right, t, s, data):
    """With lengths, masks are aligned to these, but what may be dropped follows from the arrays' sizes."""
    spec = AttentionSpec(left=left, right=right)
    own_t, own_s = (data.draw(st.integers(0, size)) for size in (t, s))
    assert visible(spec.effective(t, s), own_t, own_s) == visible(spec, own_t, own_s)


@given(SIDES, SIDES, st.integers(1, 9), st.integers(1, 9))
def test_effective_keeps_only_bounds_that_hide_something(left, right, t, s):
    effective = AttentionSpec(left=left, right=right).effective(t, s)
    for side in ("left", "right"):
        if getattr(effective, side) is not None:
            alone = AttentionSpec(**{side: getattr(effective, side)})
            assert not all(map(all, visible(alone, t, s)))


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [(None, None, "none"), (None, 0, "causal"), (None, 1, "window"), (0, None, "window"), (3, 0, "window")],
)
def test_mask_kind(left, right, kind):
    assert AttentionSpec(left=left, right=right).mask_kind == kind


def test_decoding_needs_no_causal_mask():
    assert AttentionSpec(right=0).effective(1, 4096).mask_kind == "none"


@given(SIDES, SIDES, LENGTHS, LENGTHS)
def test_empties_rows(left, right, t, s):
    spec = AttentionSpec(left=left, right=right)
    assert spec.empties_rows(t + 1, s) == (not all(map(any, visible(spec, t + 1, s))))

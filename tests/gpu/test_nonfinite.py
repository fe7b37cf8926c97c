"""NaN and infinity in keys and values: where a row cannot see them they do not matter, where it can they
propagate.

0 * NaN is NaN, so a weight of zero does not hide a value. The positions below put the bad key into blocks
that are skipped, masked and interior, beside the diagonal, and in the tail of the last tile.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from harness import Call, run
from numerics import check as compare
from numerics import expected, visible

BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
CALLS = [
    Call(t=t, s=s, h=h, n=4, k=2, dtype=dtype, **mask)
    for t, s in ((200, 200), (150, 333), (333, 150))
    for h, dtype in ((64, "bfloat16"), (128, "float16"), (72, "bfloat16"))
    for mask in ({"is_causal": True}, {"window": (50, 3)}, {"window": (0, 0)})
]
# The other variants, with heads as wide as their tiles and less: a repaired row is divided among lanes.
CALLS += [
    Call(t=200, s=200, h=h, hv=hv, n=4, k=2, **mask)
    for h, hv in ((96, 96), (88, 72), (192, 192), (136, 104), (192, 128), (256, 256), (248, 8), (64, 200))
    for mask in ({"is_causal": True}, {"window": (50, 3)})
]


def _hidden(p) -> np.ndarray:
    """bool (T, S): what each row cannot see."""
    _, t, s, _, _, _ = p.shape
    return ~visible(t, s, p.left, p.right)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_what_nobody_sees_never_matters(bad, where):
    """Keys outside every row's band, filled with the bad value: results as if they held anything else."""
    calls = [
        Call(t=t, s=s, h=h, n=4, k=2, window=window)
        for t, s in ((70, 500), (1, 300), (130, 400))
        for window in ((20, 0), (100, 3), (0, 0))
        for h in (64, 128)
    ]
    clean, dirty = [], []
    for call in calls:
        p = call.problem()
        unseen = _hidden(p).all(axis=0)
        assert unseen.any(), call
        q = dataclasses.replace(p, key=p.key.copy(), value=p.value.copy())
        for name in ("key", "value"):
            if where in (name, "both"):
                getattr(q, name)[:, unseen] = BAD[bad]
        clean.append(p)
        dirty.append(q)
    for call, (out, residual), want in zip(calls, run(calls, dirty), expected(clean), strict=True):
        compare(out, residual, want, name=f"{call} {bad} in {where}")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, 63, 64, 101, 127, 128, 149])
def test_value_reaches_only_rows_that_see_it(bad, at):
    """One bad element of V: the rows that see its key get it in that lane; other rows, lanes and heads are as
    before.
    """
    problems = []
    for call in CALLS:
        p = call.problem()
        p.value[0, at, 1, 5] = BAD[bad]
        problems.append(p)
    wanted = expected(problems)
    for call, p, (out, residual), want in zip(CALLS, problems, run(CALLS, problems), wanted, strict=True):
        touched = ~np.isfinite(want.out)
        assert not np.delete(touched, 5, axis=-1).any()
        assert not touched[:, :, :2].any()
        np.testing.assert_array_equal(touched[0, :, 2, 5], ~_hidden(p)[:, at])
        compare(out, residual, want, name=f"{call} value[{at}]={bad}")


@pytest.mark.parametrize("at", [0, 63, 64, 101, 127, 128, 149])
def test_nan_key_reaches_only_rows_that_see_it(at):
    """One bad element of K makes a score NaN: the rows that see it are NaN, others as before."""
    problems = []
    for call in CALLS:
        p = call.problem()
        p.key[0, at, 0, 3] = np.nan
        problems.append(p)
    wanted = expected(problems)
    for call, p, (out, residual), want in zip(CALLS, problems, run(CALLS, problems), wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(want.out[0, :, 0, 0]), ~_hidden(p)[:, at])
        compare(out, residual, want, name=f"{call} key[{at}]=nan")


def test_infinite_key_hidden_by_causality():
    """Infinite keys give scores of +-inf: rows before them are untouched."""
    calls = [Call(t=200, h=h, n=2, k=2, is_causal=True) for h in (64, 128)]
    problems = [c.problem() for c in calls]
    for p in problems:
        p.key[:, 120:] = np.inf
    for call, (out, residual), want in zip(calls, run(calls, problems), expected(problems), strict=True):
        rows = slice(0, 120)
        trimmed = dataclasses.replace(
            want, out=want.out[:, rows], residual=want.residual[:, rows], low=want.low[:, rows]
        )
        assert np.isfinite(trimmed.out).all()
        compare(out[:, rows], residual[:, rows], trimmed, name=str(call))


def test_whole_blocks_of_nan_behind_the_diagonal():
    """Every key after the first row's diagonal is NaN in V: only the rows that reach them turn NaN."""
    calls = [Call(t=260, h=h, n=2, k=1, is_causal=True) for h in (64, 128)]
    problems = [c.problem() for c in calls]
    for p in problems:
        p.value[:, 100:] = np.nan
    for call, (out, residual), want in zip(calls, run(calls, problems), expected(problems), strict=True):
        assert np.isnan(want.out[:, 100:]).all()
        assert np.isfinite(want.out[:, :100]).all()
        compare(out, residual, want, name=str(call))


def test_nan_query_stays_in_its_row():
    calls = [Call(t=150, h=h, n=2, k=1, **m) for h in (64, 128) for m in ({}, {"is_causal": True})]
    problems = [c.problem() for c in calls]
    for p in problems:
        p.query[0, 77, 1, 0] = np.nan
    for call, (out, residual), want in zip(calls, run(calls, problems), expected(problems), strict=True):
        assert np.isnan(want.out[0, 77, 1]).all()
        assert np.isnan(want.out).sum() == call.h
        compare(out, residual, want, name=str(call))

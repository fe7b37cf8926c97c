"""The loop over cases: every rival timed on every workload, one case after the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_r2p.bench import environment, measure, report, rivals
from jax_r2p.bench.report import Row
from jax_r2p.bench.rivals import Rival
from jax_r2p.bench.workloads import MATMUL_WITH, Matmul, Workload


def samples(
    cases: Sequence[Workload], chosen: Sequence[Rival], *, rounds: int, matmul: Matmul | None = None
) -> int:
    """Returns how often `time_cases` calls `advance`."""
    matmuls = sum(_with_matmul(w, matmul) is not None for w in cases)
    return (len(cases) * len(chosen) + matmuls) * (rounds + 1)


def _with_matmul(w: Workload, matmul: Matmul | None) -> Matmul | None:
    """The matmul that takes turns with the calls of a workload, if one does."""
    return matmul if w.name == MATMUL_WITH else None


def time_cases(
    cases: Sequence[Workload],
    chosen: Sequence[Rival],
    *,
    rounds: int,
    sample_seconds: float,
    commit: str,
    advance: Callable[[str], None],
    matmul: Matmul | None = None,
) -> Iterator[list[Row]]:
    """Times every rival on every workload.

    Args:
      cases: The workloads.
      chosen: The rivals. In one case all get the same inputs.
      rounds: Samples of each rival that count.
      sample_seconds: Length of a sample.
      commit: What the installed package was built from, for the rows.
      advance: Called with the name of the case after each sample, whether it was taken or not.
      matmul: What takes turns with the rivals on the workload `MATMUL_WITH`.

    Yields:
      The rows of one case, one a rival and one of the matmul, as soon as it is timed.
    """
    about = environment.describe(commit)
    for seed, w in enumerate(cases):
        rows = _time_case(
            w,
            chosen,
            seed,
            rounds,
            sample_seconds,
            functools.partial(advance, w.name),
            _with_matmul(w, matmul),
        )
        report.add_ratios([row for row in rows if not report.is_matmul(row)])
        yield [{**row, **about} for row in rows]


def _time_case(
    w: Workload,
    chosen: Sequence[Rival],
    seed: int,
    rounds: int,
    sample_seconds: float,
    advance: Callable[[], None],
    matmul: Matmul | None,
) -> list[Row]:
    inputs = measure.input_sets(w, seed)
    functions: dict[str, rivals.Timed] = {}
    reasons: dict[str, str] = {}
    errors: dict[str, float] = {}
    for rival in chosen:
        f = rivals.prepare(rival, w, inputs[0])
        if isinstance(f, rivals.Unavailable):
            reasons[rival.name] = f.reason
            for _ in range(rounds + 1):
                advance()
        else:
            functions[rival.name] = f
            errors[rival.name] = measure.relative_error(f, w, inputs[0])
    timed, sets = measure.as_called(w, functions, inputs)
    if matmul is not None:
        timed[matmul.name] = measure.matmul(matmul, seed)
    taken = measure.alternate(
        timed,
        sets,
        rounds=rounds,
        sample_seconds=sample_seconds,
        calls_each=w.calls,
        advance=advance,
    )
    rows = []
    for rival in chosen:
        if rival.name in reasons:
            rows.append({"case": w.name, "impl": rival.name, "pass": w.pass_, "status": reasons[rival.name]})
            continue
        error = errors[rival.name]
        rows.append(
            _row(
                w,
                rival.name,
                taken[rival.name],
                input_sets=len(inputs),
                calls_each=w.calls,
                # JSON has no NaN
                relative_error=float(f"{error:.3e}") if math.isfinite(error) else None,
                impl_version=rival.package_version(),
            )
        )
    if matmul is not None:
        rows.append(_row(matmul, "xla", taken[matmul.name]))
    return rows


def _row(w: Workload | Matmul, name: str, s: measure.Samples, **more: Any) -> Row:
    return report.timed_row(
        w,
        name,
        s.median(),
        s.total,
        calls=s.calls,
        queued_ms=round(s.median_queued(), 5),
        host_ms=round(s.median_host(), 5),
        host_bound=s.host_bound(),
        **more,
    )

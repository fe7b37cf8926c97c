"""The loop over cases: every rival timed on every workload, one case after the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

from jax_r2p.bench import environment, measure, report, rivals
from jax_r2p.bench.report import Row
from jax_r2p.bench.rivals import Rival
from jax_r2p.bench.workloads import Workload


def samples(cases: Sequence[Workload], chosen: Sequence[Rival], *, rounds: int) -> int:
    """Returns how often `time_cases` calls `advance`."""
    return len(cases) * len(chosen) * (rounds + 1)


def time_cases(
    cases: Sequence[Workload],
    chosen: Sequence[Rival],
    *,
    rounds: int,
    sample_seconds: float,
    commit: str,
    advance: Callable[[str], None],
) -> Iterator[list[Row]]:
    """Times every rival on every workload.

    Args:
      cases: The workloads.
      chosen: The rivals. In one case all get the same inputs.
      rounds: Samples of each rival that count.
      sample_seconds: Length of a sample.
      commit: What the installed package was built from, for the rows.
      advance: Called with the name of the case after each sample, whether it was taken or not.

    Yields:
      The rows of one case, one a rival, as soon as it is timed.
    """
    about = environment.describe(commit)
    for seed, w in enumerate(cases):
        rows = _time_case(w, chosen, seed, rounds, sample_seconds, functools.partial(advance, w.name))
        report.add_ratios(rows)
        yield [{**row, **about} for row in rows]


def _time_case(
    w: Workload,
    chosen: Sequence[Rival],
    seed: int,
    rounds: int,
    sample_seconds: float,
    advance: Callable[[], None],
) -> list[Row]:
    inputs = measure.input_sets(w, seed)
    functions, reasons, errors = {}, {}, {}
    for rival in chosen:
        f = rivals.prepare(rival, w, inputs[0])
        if isinstance(f, rivals.Unavailable):
            reasons[rival.name] = f.reason
            for _ in range(rounds + 1):
                advance()
        else:
            functions[rival.name] = f
            errors[rival.name] = measure.relative_error(f, w, inputs[0])
    taken = measure.alternate(
        functions, inputs, rounds=rounds, sample_seconds=sample_seconds, advance=advance
    )
    rows = []
    for rival in chosen:
        if rival.name in reasons:
            rows.append({"case": w.name, "impl": rival.name, "status": reasons[rival.name]})
            continue
        s, error = taken[rival.name], errors[rival.name]
        rows.append(
            report.timed_row(
                w,
                rival.name,
                s.median(),
                s.total,
                calls=s.calls,
                queued_ms=round(s.median_queued(), 5),
                host_bound=s.host_bound(),
                input_sets=len(inputs),
                # JSON has no NaN
                relative_error=float(f"{error:.3e}") if math.isfinite(error) else None,
                impl_version=rival.package_version(),
            )
        )
    return rows

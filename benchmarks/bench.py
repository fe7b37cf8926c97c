"""Time attention implementations side by side in one process.

    python benchmarks/bench.py --out rows.jsonl --commit $(git rev-parse HEAD)
    python benchmarks/bench.py --cases headline --impls jax_r2p,cudnn --out rows.jsonl --plot bars.png
    python benchmarks/bench.py --cold --out cold.jsonl          process start to first result
    python benchmarks/bench.py --show rows.jsonl --markdown     the table of recorded rows, for the README

How it is timed: measure.py. What is timed: workloads.py, rivals.py. TFLOP/s count 4 * B * N * H operations
for each query-key pair that the mask lets through. A time over that of the best rival below 1 means jax_r2p
is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import report

    if args.show:
        rows = report.read_rows(args.show)
    elif args.out is None:
        raise SystemExit("--out is needed: rows are the result")
    elif args.cold:
        import cold

        rows = cold.run(args)
    else:
        rows = run(args)
    if args.cold:
        cold.print_summary(rows)
        return 0
    if args.markdown:
        print(report.markdown(rows))
    else:
        report.print_table(rows)
    if args.into:
        args.into.write_text(
            report.insert_table(args.into.read_text("utf-8"), report.markdown(rows)), "utf-8"
        )
    if args.plot:
        report.plot(rows, args.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="all", help="all, headline, or names separated by commas")
    parser.add_argument("--impls", default="default", help="default, or names separated by commas")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each implementation (default 9)")
    parser.add_argument("--sample-ms", type=float, default=30.0, help="length of one sample (default 30)")
    parser.add_argument(
        "--scale-down", type=int, default=1, help="divide batch and length, for trying it out"
    )
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    parser.add_argument("--commit", default="unknown", help="commit the installed package was built from")
    parser.add_argument("--plot", type=Path, help="write bars of TFLOP/s to this file")
    parser.add_argument("--show", type=Path, help="time nothing; show the rows of this file")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of a terminal table")
    parser.add_argument("--into", type=Path, help="replace the measured table in this document")
    parser.add_argument("--cold", action="store_true", help="time process start to first result instead")
    parser.add_argument("--repeats", type=int, default=7, help="with --cold: processes of each (default 7)")
    return parser


def run(args: argparse.Namespace) -> list[dict]:
    """Time every selected rival on every selected workload; returns the rows, also in `args.out`."""
    import environment
    import report
    import rivals
    import workloads
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    cases = [workloads.shrink(w, args.scale_down) for w in workloads.select(args.cases)]
    chosen = rivals.select(args.impls)
    about = environment.describe(args.commit)
    rows = []
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("samples", total=len(cases) * len(chosen) * (args.rounds + 1), now="")
        for number, w in enumerate(cases):
            progress.update(task, now=w.name)
            mine = _time_case(w, chosen, number, args, lambda n=1: progress.advance(task, n))
            report.add_ratios(mine)
            for row in mine:
                row.update(about)
            report.write_rows(args.out, mine)
            rows += mine
    return rows


def _time_case(w, chosen, seed, args, advance) -> list[dict]:
    """The rows of one workload. All rivals get the same inputs."""
    import measure
    import report
    import rivals

    inputs = measure.input_sets(w, seed)
    ready = {rival.name: rivals.prepare(rival, w, inputs[0]) for rival in chosen}
    functions = {name: f for name, f in ready.items() if not isinstance(f, rivals.Unavailable)}
    advance((len(ready) - len(functions)) * (args.rounds + 1))
    errors = {name: measure.relative_error(f, w, inputs[0]) for name, f in functions.items()}
    samples = measure.alternate(
        functions, inputs, rounds=args.rounds, sample_seconds=args.sample_ms / 1e3, advance=advance
    )
    rows = []
    for rival in chosen:
        if rival.name not in functions:
            rows.append({"case": w.name, "impl": rival.name, "status": ready[rival.name].reason})
            continue
        s = samples[rival.name]
        rows.append(
            report.timed_row(
                w,
                rival.name,
                s.median(),
                s.total,
                calls=s.calls,
                queued_ms=round(sorted(s.queued)[len(s.queued) // 2], 5),
                host_bound=s.host_bound(),
                input_sets=len(inputs),
                relative_error=float(f"{errors[rival.name]:.3e}"),
                impl_version=rival.package_version(),
            )
        )
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())

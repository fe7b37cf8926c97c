"""Time attention implementations side by side.

    jax-r2p bench --list                                      what can be timed, and what is installed
    jax-r2p bench --out rows.jsonl --plot bars.png            every case
    jax-r2p bench --cases headline --impls jax_r2p,cudnn
    jax-r2p bench --pass training                             forward and backward
    jax-r2p bench --cold                                      process start to first result
    jax-r2p bench --show rows.jsonl --markdown                the table of recorded rows

All run in one process and get the same inputs. A sample is many calls queued without waiting, then one wait:
the time of the device, not of the call; where queueing may have been the slower part, the table has a `*`,
and --host prints what it takes. The implementations take turns, in an order that changes from round to round.
Inputs change from call to call, so that none is in the L2 cache. The first round does not count; the table
has medians of the others.

With --pass training a call gives the gradients of query, key and value, by jax.vjp, from a random cotangent.
Where jax_r2p has no backward kernel that is listed, and plain XLA is not timed in its place.

TFLOP/s count 4 * batch * heads * head dim operations for each query-key pair that the mask lets through, and
3.5 times as many forward and backward. A time over that of the best rival below 1 means that jax_r2p is
faster. What is not installed, or refuses a case, is listed as such; the exit status is 1 if nothing could be
timed. `pip install dew-flash-attn-cu13 fa4-jax tokamax` installs the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jax_r2p.bench import cold, report, rivals, workloads
from jax_r2p.bench.report import Row
from jax_r2p.bench.rivals import Rival
from jax_r2p.bench.workloads import Pass, Workload
from jax_r2p.cli.output import CommandError, UsageError, print_json, print_table, progress

_TIMING, _COLD, _SHOW, _LIST = "timing", "--cold", "--show", "--list"

_OPTIONS = {
    "pass_": ("forward", (_TIMING,)),
    "cases": (None, (_TIMING,)),
    "matmul": (False, (_TIMING,)),
    "rounds": (9, (_TIMING,)),
    "sample_ms": (30.0, (_TIMING,)),
    "impls": ("default", (_TIMING, _COLD)),
    "scale_down": (1, (_TIMING, _COLD)),
    "out": (None, (_TIMING, _COLD)),
    "commit": ("unknown", (_TIMING, _COLD)),
    "repeats": (7, (_COLD,)),
    "plot": (None, (_TIMING, _SHOW)),
    "plot_lengths": (None, (_TIMING, _SHOW)),
    "markdown": (False, (_TIMING, _SHOW)),
    "host": (False, (_TIMING, _SHOW)),
    "into": (None, (_TIMING, _SHOW)),
}
"""Default of each option, and what the command can be asked to do with it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="time nothing; list the cases and implementations")
    what.add_argument("--cold", action="store_true", help="time process start to first result instead")
    what.add_argument("--show", type=Path, metavar="FILE", help="time nothing; show the rows of this file")
    parser.add_argument(
        "--pass",
        dest="pass_",
        choices=workloads.PASSES,
        help="what is timed: forward (default), or training, which is forward and backward",
    )
    parser.add_argument(
        "--cases",
        metavar="NAMES",
        help="all (default), headline, training (default with --pass training), lengths, or names of --list, "
        "with commas",
    )
    parser.add_argument("--impls", metavar="NAMES", help="default, or names of --list, with commas")
    parser.add_argument(
        "--rounds", type=_whole, metavar="N", help="samples of each implementation (default %(default)s)"
    )
    parser.add_argument(
        "--matmul",
        action="store_true",
        help=f"time a matmul of 8192 x 8192 matrices in turn with {workloads.MATMUL_WITH}, as a yardstick",
    )
    parser.add_argument(
        "--sample-ms", type=_number, metavar="MS", help="length of a sample (default %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=_whole, metavar="N", help="with --cold: processes of each (default %(default)s)"
    )
    parser.add_argument(
        "--scale-down", type=_whole, metavar="N", help="divide batch and length, for trying it out"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append the rows to this file, as JSON lines"
    )
    parser.add_argument("--commit", help="what the installed package was built from, for the rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bars of TFLOP/s into this file")
    parser.add_argument(
        "--plot-lengths", type=Path, metavar="FILE", help="draw TFLOP/s over the length (--cases lengths)"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="write the table between the markers of this document"
    )
    parser.add_argument(
        "--host", action="store_true", help="print also the host's time to queue a call, in microseconds"
    )
    parser.set_defaults(**{name: default for name, (default, _) in _OPTIONS.items()})


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    task = _LIST if options.list else _COLD if options.cold else _SHOW if options.show else _TIMING
    _check_combination(options, task)
    if task == _LIST:
        _list(as_json=options.json)
        return 0
    rows = _recorded(options) if task == _SHOW else _time(options, task)
    timed = [row for row in rows if not report.is_cold(row)]
    if options.json:
        print_json(rows)
    elif options.markdown:
        print("\n".join(_markdown(rows, host=options.host)), end="")
    else:
        _print_tables(rows, host=options.host)
    if task != _SHOW and all("status" in row for row in rows if not report.is_matmul(row)):
        raise CommandError("nothing was timed: no implementation is installed and takes such a call")
    if options.into:
        document = options.into.read_text("utf-8")
        for pass_, of_pass in report.by_pass(rows).items():
            document = report.insert_table(document, report.markdown(of_pass), pass_)
        options.into.write_text(document, "utf-8")
    if options.plot:
        report.plot(timed, options.plot, _kind(options.plot))
    if options.plot_lengths:
        report.plot_lengths(timed, options.plot_lengths, _kind(options.plot_lengths))
    return 0


def _whole(text: str) -> int:
    """An argument that is a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    """An argument that is a number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")


def _check_combination(options: argparse.Namespace, task: str) -> None:
    """Raises UsageError for an option that would change nothing."""
    for name, (default, tasks) in _OPTIONS.items():
        if getattr(options, name) == default or task in tasks:
            continue
        flag = f"--{name.strip('_').replace('_', '-')}"
        if task == _TIMING:
            raise UsageError(f"{flag} needs {' or '.join(tasks)}")
        raise UsageError(f"{flag} does not go with {task}")
    if options.json and options.markdown:
        raise UsageError("--markdown does not go with --json: one of them is printed")
    if options.json and options.host:
        raise UsageError("--host does not go with --json: its rows have host_ms")


def _check_files(options: argparse.Namespace, passes: Iterable[Pass]) -> None:
    """Raises UsageError or CommandError if --into, --plot or --out could not be written in the end."""
    if options.into:
        try:
            for pass_ in passes:
                report.insert_table(options.into.read_text("utf-8"), "", pass_)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--into must be a document with a measured table, got {options.into}: {error}"
            ) from error
    for flag, path in (("--plot", options.plot), ("--plot-lengths", options.plot_lengths)):
        if path:
            _check_plot(flag, path)
    if options.out:
        try:
            report.write_rows(options.out, [])
        except OSError as error:
            raise UsageError(f"--out must be a file to append to, got {options.out}: {error}") from error


def _check_plot(flag: str, path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"{flag} must be a file in a folder that exists, got {path}")
    try:
        report.plot([], io.BytesIO(), _kind(path))
    except ImportError as error:
        raise CommandError(f"{flag} needs matplotlib: pip install 'jax_r2p[bench]' ({error})") from error
    except Exception as error:  # each format fails in its own way
        raise UsageError(
            f"{flag} must end in a file type that matplotlib can write, such as .png, got {path}: {error}"
        ) from error


def _kind(path: Path) -> str:
    """The type of a file by its name, for example "png"."""
    return path.suffix.removeprefix(".")


def _recorded(options: argparse.Namespace) -> list[Row]:
    """The rows of --show, after a check that they have what else is asked for."""
    try:
        rows = report.read_rows(options.show)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--show must be a file that --out has written, got {options.show}: {error}"
        ) from error
    for flag, wanted, needed, kind in (
        ("--markdown", options.markdown, "case", ""),
        ("--host", options.host, "host_ms", " with host_ms"),
        ("--into", options.into, "case", ""),
        ("--plot", options.plot, "ms", ""),
        ("--plot-lengths", options.plot_lengths, "ms", ""),
    ):
        if wanted and not any(needed in row for row in rows if not report.is_cold(row)):
            raise UsageError(f"{flag} needs rows of timed calls{kind}, got none in --show {options.show}")
    _check_files(options, report.by_pass(rows))
    return rows


def _time(options: argparse.Namespace, task: str) -> list[Row]:
    """Times what is asked for; returns the rows, and appends them to --out as they come."""
    training = options.pass_ == "training"
    try:
        selected = workloads.select(options.cases or ("training" if training else "all"))
    except ValueError as error:
        raise UsageError(f"--cases {error}") from error
    if training and options.cases == "all":
        selected = tuple(w for w in selected if w.calls == 1)
    if training and (chains := [w.name for w in selected if w.calls > 1]):
        raise UsageError(f"--cases {', '.join(chains)}: a program of several calls is forward only")
    cases = [
        dataclasses.replace(workloads.shrink(w, options.scale_down), training=training) for w in selected
    ]
    try:
        chosen = rivals.select(
            options.impls, pass_=options.pass_, default=cold.DEFAULT if task == _COLD else None
        )
    except ValueError as error:
        raise UsageError(f"--impls {error}") from error
    if options.matmul and workloads.MATMUL_WITH not in [w.name for w in cases]:
        raise UsageError(f"--matmul needs {workloads.MATMUL_WITH} among --cases, with which it takes turns")
    _check_files(options, [options.pass_])

    # Set here for the fresh processes, too: memory as it is needed, and no notes of the compiler's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Whatever an implementation prints, standard output has the result and nothing else.
    with contextlib.redirect_stdout(sys.stderr):
        groups = _time_starts(options, chosen) if task == _COLD else _time_cases(options, cases, chosen)
        rows = []
        for group in groups:
            if options.out:
                report.write_rows(options.out, group)
            rows += group
    return rows


def _time_cases(
    options: argparse.Namespace, cases: Sequence[Workload], chosen: Sequence[Rival]
) -> Iterator[list[Row]]:
    from jax_r2p.bench.run import samples, time_cases

    matmul = None
    if options.matmul:
        size = max(16, workloads.MATMUL.size // options.scale_down)
        matmul = dataclasses.replace(workloads.MATMUL, size=size, pass_=options.pass_)
    with progress("samples", samples(cases, chosen, rounds=options.rounds, matmul=matmul)) as advance:
        yield from time_cases(
            cases,
            chosen,
            rounds=options.rounds,
            sample_seconds=options.sample_ms / 1e3,
            commit=options.commit,
            advance=advance,
            matmul=matmul,
        )


def _time_starts(options: argparse.Namespace, chosen: Sequence[Rival]) -> Iterator[list[Row]]:
    with progress("fresh processes", options.repeats * len(chosen)) as advance:
        try:
            yield cold.time_starts(
                chosen,
                repeats=options.repeats,
                commit=options.commit,
                scale_down=options.scale_down,
                advance=advance,
            )
        except cold.ProcessFailed as error:
            raise CommandError(str(error)) from error


def _markdown(rows: Sequence[Row], *, host: bool) -> Iterator[str]:
    for of_pass in report.by_pass(rows).values():
        yield report.markdown(of_pass)
        if host:
            yield report.host_markdown(of_pass)


def _print_tables(rows: Sequence[Row], *, host: bool) -> None:
    starts = [row for row in rows if report.is_cold(row)]
    for pass_, of_pass in report.by_pass(rows).items():
        what, device = report.TITLES[pass_], of_pass[0].get("device", "unknown device")
        title = f"{what}: milliseconds a call, median over rounds, {device}"
        print_table(title, *report.table_cells(of_pass), bold=report.fastest_cells(of_pass))
        for line in report.notes(of_pass):
            print(line)
        if host:
            print_table(f"{what}: microseconds of the host to queue a call", *report.host_cells(of_pass))
    if starts:
        print_table("Seconds from process start to first result", *report.cold_cells(starts), left=2)


def _list(*, as_json: bool) -> None:
    """Prints what can be timed. Imports none of it."""
    cases = [dataclasses.asdict(w) for w in workloads.WORKLOADS]
    for case in cases:
        del case["training"]  # any can be; --pass says
    implementations = [
        {
            "name": r.name,
            "about": r.about,
            "passes": list(r.passes),
            "package": r.package,
            "installed": r.is_installed(),
            "version": r.package_version(),
        }
        for r in rivals.RIVALS.values()
    ]
    if as_json:
        print_json({"cases": cases, "implementations": implementations})
        return
    sizes = ("batch", "length", "heads", "kv_heads", "head_dim", "value_head_dim")
    print_table(
        "Cases",
        ["name", "mask", *(name.replace("_", " ") for name in sizes)],
        [[w.name, w.mask, *(str(getattr(w, name)) for name in sizes)] for w in workloads.WORKLOADS],
        left=2,
    )
    print(f"headline: {', '.join(workloads.HEADLINE)}")
    print(f"training: {', '.join(workloads.TRAINING)}")
    print(f"lengths: {', '.join(w.name for w in workloads.LENGTHS)}\n")
    print_table(
        "Implementations",
        ["name", "what it is", "package", "version"],
        [
            [
                str(row["name"]),
                str(row["about"]),
                str(row["package"]),
                str(row["version"] or "unknown") if row["installed"] else rivals.NOT_INSTALLED,
            ]
            for row in implementations
        ],
        left=4,
    )
    for pass_, names in rivals.DEFAULT.items():
        print(f"default, {pass_}: {', '.join(names)}")

"""Find the tiles of a forward kernel: compile candidates here, time them on a GPU host, print the table.

    python benchmarks/tune.py build DIR --variant fwd_bf16_d128_causal [--with stages=3]     needs no GPU
    python benchmarks/tune.py run DIR --out rows.jsonl --commit $(git rev-parse HEAD)
    python benchmarks/tune.py show rows.jsonl [--markdown]

`build` goes through all combinations of tile_m, tile_n, CTAs on an SM and place of the query, says of each
that cannot fit why, by arithmetic and before compiling it, and compiles the others into one folder, on all
processors. In all else they are as the shipped kernel, but for what `--with` sets in all of them. `run` times
them in turns, with the shipped kernel, on every workload of `jax-r2p bench`, and of a few more, that has
these head dims and this mask, also on those for whose length another kernel is chosen. The table names each
candidate as in `jax_r2p/aot/variants.py`. Backward kernels have other choices and are not for it, nor are
those of fp16, which cost the same: the workloads are bf16.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import bundle

from jax_r2p._manifest import FILE_NAME, Variant, parse_manifest
from jax_r2p.aot.variants import FORWARD, VariantRow
from jax_r2p.bench import workloads
from jax_r2p.cli.output import print_table, progress
from jax_r2p.kernels.config import MAX_CONSUMER_WARPGROUPS, REGISTER_FILE, WARPGROUP, WARPGROUP_ROWS

TILES_M = tuple(WARPGROUP_ROWS * n for n in range(1, MAX_CONSUMER_WARPGROUPS + 1))
TILES_N = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
CTAS = (1, 2, 3, 4)
LEAST_PRODUCER_REGISTERS = 24
MOST_CONSUMER_REGISTERS = 240
OTHER_REGISTERS = 24
"""What a consumer thread needs besides its tiles: addresses, barriers, row sums. No kernel did with fewer."""

CHOICES = {
    "stages": int,
    "query_stages": int,
    "out_in_query": bool,
    "own_blocks": bool,
    "early_scores": bool,
    "rescale_late": bool,
    "skip_rescale": bool,
}
"""Fields of `ForwardConfig` that `--with` sets."""

TUNED = {name: row for name, row in FORWARD.items() if row.config.dtype == "bf16"}
"""Kernels that have candidates, by name."""

CASES = (*workloads.WORKLOADS, *workloads.TUNING)
"""What candidates are timed on."""


def candidate(
    base: VariantRow, tile_m: int, tile_n: int, ctas: int, in_registers: bool, **choices: Any
) -> VariantRow | str:
    """The kernel with other tiles and as many registers as there are; or why it cannot fit, with the sums.

    Args:
      base: What is changed.
      tile_m: Query rows.
      tile_n: Keys of a block.
      ctas: Thread blocks that share an SM.
      in_registers: Where the query is, else in shared memory.
      **choices: What else is not as in `base`, of `CHOICES`.
    """
    suffix = "".join(
        f"_{'' if value else 'no_'}{name}" if CHOICES[name] is bool else f"_{name}{value}"
        for name, value in choices.items()
    )
    warpgroups = tile_m // WARPGROUP_ROWS
    threads = WARPGROUP * (warpgroups + 1)
    pool = REGISTER_FILE // (threads * ctas) // 8 * 8 * (warpgroups + 1)
    consumer = min((pool - LEAST_PRODUCER_REGISTERS) // warpgroups // 8 * 8, MOST_CONSUMER_REGISTERS)
    producer = min((pool - consumer * warpgroups) // 8 * 8, consumer)
    tile = f"_{tile_m}x{tile_n}x{ctas}{'q' if in_registers else 's'}"
    choices = {"out_in_query": base.config.out_in_query and not in_registers} | choices
    try:
        row = bundle.with_tile(
            base,
            *(tile_m, tile_n, ctas, suffix + tile),
            producer_registers=producer,
            consumer_registers=consumer,
            query_in_registers=in_registers,
            **choices,
        )
    except ValueError as error:
        return str(error)
    needs = {
        "scores": tile_n // 2,
        "weights": tile_n // 4,
        "out": row.config.value_head_dim // 2,
        "query": row.config.head_dim // 4 if in_registers else 0,
        "others": OTHER_REGISTERS,
    }
    if sum(needs.values()) > consumer:
        parts = " + ".join(f"{name} {number}" for name, number in needs.items() if number)
        return f"a consumer thread needs {parts} = {sum(needs.values())} registers and has {consumer}"
    return row


def candidates(base: VariantRow, **choices: Any) -> Iterator[tuple[str, VariantRow | str]]:
    """Every combination, with a name, and the kernel or the reason against it."""
    for tile_m, tile_n, ctas, in_registers in itertools.product(TILES_M, TILES_N, CTAS, (True, False)):
        place = "registers" if in_registers else "shared memory"
        name = f"{tile_m} x {tile_n}, {ctas} CTAs an SM, query in {place}"
        yield name, candidate(base, tile_m, tile_n, ctas, in_registers, **choices)


def served(variant: Variant, cases: Iterable[workloads.Workload]) -> list[workloads.Workload]:
    """The workloads that a kernel can run."""
    shape = (variant.head_dim, variant.value_head_dim, variant.mask)
    return [w for w in cases if (w.head_dim, w.value_head_dim, bundle.mask_of(w)) == shape]


def build(options: argparse.Namespace) -> int:
    """Compiles what fits."""
    base = FORWARD[options.variant]
    found = dict(candidates(base, **dict(options.choices)))
    rows = {name: row for name, row in found.items() if isinstance(row, VariantRow)}
    if options.only:
        rows = {name: row for name, row in rows.items() if any(row.name.endswith(x) for x in options.only)}
    rejected = [[name, reason] for name, reason in found.items() if isinstance(reason, str)]
    compiled, failed = bundle.compile_into(options.folder, list(rows.values()), skip_failures=True)
    rejected += [[name, failed[row.name]] for name, row in rows.items() if row.name in failed]
    print_table("not timed", ["candidate", "why"], rejected, left=2)
    if not compiled:
        raise SystemExit(f"no kernel was built, {options.folder} is as it was")
    print(f"{len(compiled)} kernels in {options.folder}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Times the candidates of a folder on every workload that they serve."""
    from jax_r2p.bench import environment, measure, report

    names = [v.name for v in parse_manifest((options.folder / FILE_NAME).read_text("utf-8")).variants]
    variants = bundle.register(options.folder)
    shipped = max((name for name in FORWARD if names[0].startswith(name)), key=len)
    cases = served(variants[names[0]], options.cases)
    if not cases:
        got = ", ".join(w.name for w in options.cases)
        raise SystemExit(
            f"--cases must have a workload with the head dims and the mask of {shipped}, got {got}"
        )
    about = environment.describe(options.commit)
    with progress("samples", len(cases) * (len(names) + 1) * (options.rounds + 1)) as advance:
        for seed, w in enumerate(cases):
            import jax

            inputs = measure.input_sets(w, seed)
            functions = {name: jax.jit(bundle.call(w, variants[name])) for name in (shipped, *names)}
            errors = {name: measure.relative_error(f, w, inputs[0]) for name, f in functions.items()}
            taken = measure.alternate(
                *measure.as_called(w, functions, inputs),
                rounds=options.rounds,
                sample_seconds=options.sample_ms / 1e3,
                calls_each=w.calls,
                advance=lambda now=w.name: advance(now),
            )
            rows = [
                {
                    **report.timed_row(w, name, s.median(), s.total, relative_error=errors[name]),
                    "calls_each": w.calls,
                    "shipped": name == shipped,
                    **about,
                }
                for name, s in taken.items()
            ]
            report.write_rows(options.out, rows)
    return 0


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: milliseconds, and time over that of the shipped kernel; the best in sum first."""
    from jax_r2p.bench import report

    by_case = report.by_case(rows)
    shipped = {case: next(r["ms"] for r in line.values() if r["shipped"]) for case, line in by_case.items()}
    names = list(dict.fromkeys(row["impl"] for row in rows))
    ratios = {name: [line[name]["ms"] / shipped[case] for case, line in by_case.items()] for name in names}
    lines = [
        [
            name,
            *(f"{line[name]['ms']:.4f} ({line[name]['ms'] / shipped[c]:.3f})" for c, line in by_case.items()),
            f"{sum(ratios[name]) / len(ratios[name]):.3f}",
        ]
        for name in sorted(names, key=lambda name: sum(ratios[name]))
    ]
    return ["kernel", *by_case, "mean ratio"], lines


def show(options: argparse.Namespace) -> int:
    """Prints the table of recorded rows."""
    from jax_r2p.bench import report

    rows = report.read_rows(options.rows)
    header, lines = table(rows)
    title = "milliseconds a call (over those of the shipped kernel)"
    if not options.markdown:
        print_table(title, header, lines)
        return 0
    first = rows[0]
    print(f"{title}. {first['device']}, commit {first['commit']}, {first['date'][:10]}.\n")
    for cells in (header, ["---"] + ["---:"] * (len(header) - 1), *lines):
        print(f"| {' | '.join(cells)} |")
    return 0


def _variant(text: str) -> str:
    """An argument that is a forward kernel of bf16."""
    if text not in TUNED:
        raise argparse.ArgumentTypeError(
            f"must be a forward kernel of bf16, as the workloads are: {', '.join(TUNED)}; got {text!r}"
        )
    return text


def _choice(text: str) -> tuple[str, int | bool]:
    """An argument that is a field of `CHOICES` and its value."""
    name, _, value = text.partition("=")
    kind = CHOICES.get(name)
    if kind is bool and value in ("true", "false"):
        return name, value == "true"
    if kind is int and value.isdecimal() and int(value) > 0:
        return name, int(value)
    fields = [f"{name}={'true|false' if kind is bool else 'NUMBER'}" for name, kind in CHOICES.items()]
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(fields)}; got {text!r}")


def _cases(text: str) -> tuple[workloads.Workload, ...]:
    """An argument that names workloads."""
    try:
        return workloads.select(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build")
    command.add_argument("folder", type=Path)
    command.add_argument(
        "--variant", required=True, metavar="NAME", type=_variant, help="a forward kernel of bf16"
    )
    command.add_argument(
        "--with",
        dest="choices",
        metavar="FIELD=VALUE",
        type=_choice,
        action="append",
        default=[],
        help=f"set in every candidate, and in its name; may be repeated. Fields: {', '.join(CHOICES)}",
    )
    command.add_argument("--only", nargs="+", metavar="SUFFIX", help="ends of names, e.g. 128x128x1q")
    command.set_defaults(do=build)
    command = commands.add_parser("run")
    bundle.add_run_arguments(command, 9)
    command.add_argument(
        "--cases",
        type=_cases,
        default=CASES,
        metavar="NAMES",
        help="workloads of `jax-r2p bench`, separated by commas (default: all, and those of other kernels)",
    )
    command.add_argument("--sample-ms", type=float, default=30.0)
    command.set_defaults(do=run)
    command = commands.add_parser("show")
    command.add_argument("rows", type=Path)
    command.add_argument("--markdown", action="store_true")
    command.set_defaults(do=show)
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return options.do(options)


if __name__ == "__main__":
    sys.exit(main())

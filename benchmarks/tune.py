"""Find the tiles of a forward kernel: compile candidates here, time them on a GPU host, print the table.

    python benchmarks/tune.py build DIR --variant fwd_bf16_d128_causal      needs no GPU
    python benchmarks/tune.py run DIR --out rows.jsonl --commit $(git rev-parse HEAD)
    python benchmarks/tune.py show rows.jsonl [--markdown]

`build` goes through all combinations of tile_m, tile_n, CTAs on an SM and place of the query, says of each
that cannot fit why, by arithmetic and before compiling it, and compiles the others into one folder, on all
processors. `run` times them in turns, with the shipped kernel, on every workload of `jax-r2p bench` that has
these head dims and this mask, also on those for whose length another kernel is chosen. The table names each
candidate as in `jax_r2p/aot/variants.py`. Backward kernels have other choices and are not for it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundle

from jax_r2p._manifest import FILE_NAME, parse_manifest
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


def candidate(base: VariantRow, tile_m: int, tile_n: int, ctas: int, in_registers: bool) -> VariantRow | str:
    """The kernel with other tiles and as many registers as there are; or why it cannot fit, with the sums."""
    warpgroups = tile_m // WARPGROUP_ROWS
    threads = WARPGROUP * (warpgroups + 1)
    pool = REGISTER_FILE // (threads * ctas) // 8 * 8 * (warpgroups + 1)
    consumer = min((pool - LEAST_PRODUCER_REGISTERS) // warpgroups // 8 * 8, MOST_CONSUMER_REGISTERS)
    producer = min((pool - consumer * warpgroups) // 8 * 8, consumer)
    try:
        row = bundle.with_tile(
            base,
            *(tile_m, tile_n, ctas, f"_{tile_m}x{tile_n}x{ctas}{'q' if in_registers else 's'}"),
            producer_registers=producer,
            consumer_registers=consumer,
            query_in_registers=in_registers,
            out_in_query=base.config.out_in_query and not in_registers,
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


def candidates(base: VariantRow) -> Iterator[tuple[str, VariantRow | str]]:
    """Every combination, with a name, and the kernel or the reason against it."""
    for tile_m, tile_n, ctas, in_registers in itertools.product(TILES_M, TILES_N, CTAS, (True, False)):
        place = "registers" if in_registers else "shared memory"
        name = f"{tile_m} x {tile_n}, {ctas} CTAs an SM, query in {place}"
        yield name, candidate(base, tile_m, tile_n, ctas, in_registers)


def build(options: argparse.Namespace) -> int:
    """Compiles what fits."""
    base = FORWARD[options.variant]
    found = dict(candidates(base))
    rows = {name: row for name, row in found.items() if isinstance(row, VariantRow)}
    if options.only:
        rows = {name: row for name, row in rows.items() if any(row.name.endswith(x) for x in options.only)}
    rejected = [[name, reason] for name, reason in found.items() if isinstance(reason, str)]
    compiled, failed = bundle.compile_into(options.folder, list(rows.values()), skip_failures=True)
    rejected += [[name, failed[row.name]] for name, row in rows.items() if row.name in failed]
    print_table("not timed", ["candidate", "why"], rejected, left=2)
    print(f"{len(compiled)} kernels in {options.folder}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Times the candidates of a folder on every workload that they serve."""
    from jax_r2p.bench import environment, measure, report

    names = [v.name for v in parse_manifest((options.folder / FILE_NAME).read_text("utf-8")).variants]
    variants = bundle.register(options.folder)
    first = variants[names[0]]
    shipped = max((name for name in FORWARD if names[0].startswith(name)), key=len)
    served = [
        w
        for w in workloads.select(options.cases)
        if (w.head_dim, w.value_head_dim, bundle.mask_of(w))
        == (first.head_dim, first.value_head_dim, first.mask)
    ]
    about = environment.describe(options.commit)
    with progress("samples", len(served) * (len(names) + 1) * (options.rounds + 1)) as advance:
        for seed, w in enumerate(served):
            import jax

            inputs = measure.input_sets(w, seed)
            functions = {name: jax.jit(bundle.call(w, variants[name])) for name in (shipped, *names)}
            errors = {name: measure.relative_error(f, w, inputs[0]) for name, f in functions.items()}
            taken = measure.alternate(
                functions,
                inputs,
                rounds=options.rounds,
                sample_seconds=options.sample_ms / 1e3,
                advance=lambda now=w.name: advance(now),
            )
            rows = [
                {
                    **report.timed_row(w, name, s.median(), s.total, relative_error=errors[name]),
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


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build")
    command.add_argument("folder", type=Path)
    command.add_argument(
        "--variant", required=True, metavar="NAME", choices=list(FORWARD), help="a forward kernel"
    )
    command.add_argument("--only", nargs="+", metavar="SUFFIX", help="ends of names, e.g. 128x128x1q")
    command.set_defaults(do=build)
    command = commands.add_parser("run")
    bundle.add_run_arguments(command, 9)
    command.add_argument("--cases", default="all", help="workloads of `jax-r2p bench`, separated by commas")
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

"""What R2P and unmasked interior blocks are worth: the same kernel in several forms, alternating in one run.

    python benchmarks/ablation.py build DIR                          compile the kernels; needs no GPU
    python benchmarks/ablation.py run DIR --out rows.jsonl --commit $(git rev-parse HEAD)
    python benchmarks/ablation.py show rows.jsonl --into docs/r2p.md --plot docs/r2p.png

`build` leaves one folder with every form of the kernels and what was counted in their machine code, so that
the machine with the GPU needs neither a compiler nor a disassembler. `run` takes the shipped kernels from the
installed package. `counters DIR --out counters.jsonl` asks Nsight Compute what bounds them, and runs
`once DIR CASE KERNEL...` for it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bundle

from jax_r2p._manifest import Variant, load_manifest, read_cubin
from jax_r2p.aot import audit
from jax_r2p.aot.compile import entry_symbol
from jax_r2p.aot.variants import VARIANTS, VariantRow, without_r2p
from jax_r2p.bench import workloads
from jax_r2p.bench.workloads import Workload
from jax_r2p.cli.output import print_table, progress
from jax_r2p.kernels import blocks

COUNTS_FILE = "counts.json"
COMPARE, EVERY = "_compare", "_every"
ROUNDS = 21
SAMPLE_SECONDS = 0.03
CHAIN = 20
"""Calls in one program where the arrays stay in the L2 cache; a single one would be over before the next is
queued.
"""

# Kernels ---------------------------------------------------------------------------------------------------

SHAPES = {
    "fwd_bf16_d64_window": ((192, 64, 1, 32, 160), (128, 64, 1, 24, 240), (64, 64, 2, 24, 232)),
    "fwd_bf16_d128_window": ((192, 48, 1, 32, 160), (128, 64, 1, 24, 240)),
    "fwd_bf16_d128_window_wide": ((64, 64, 2, 24, 232), (128, 64, 1, 24, 240)),
    "fwd_bf16_d64_causal_wide": ((192, 64, 1, 32, 160), (128, 128, 1, 24, 240)),
    "fwd_bf16_d128_causal_wide": ((128, 64, 1, 24, 240), (64, 64, 2, 24, 232)),
}
"""Other tiles for a kernel: tile_m, tile_n, CTAs an SM, registers of a producer and of a consumer thread."""


def kernel_rows() -> Iterator[VariantRow]:
    """Every kernel that is compared with a shipped one. Names: that one's, tiles, blocks, lowering."""
    for name in dict.fromkeys(case.kernels[0] for case in cases()):
        row = VARIANTS[name]
        every = with_every_block_masked(row)
        yield from (without_r2p(row), every, without_r2p(every))
        for shape in SHAPES.get(name, ()):
            tile_m, tile_n, ctas, producer, consumer = shape
            other = bundle.with_tile(
                row,
                *(tile_m, tile_n, ctas, f"_{tile_m}x{tile_n}x{ctas}"),
                producer_registers=producer,
                consumer_registers=consumer,
                # Three consumer warpgroups have no registers left for it, as in the shipped kernels.
                query_in_registers=row.config.query_in_registers and tile_m <= 128,
            )
            yield from (other, without_r2p(other))


def with_every_block_masked(row: VariantRow) -> VariantRow:
    """The same kernel with all masks on all blocks, which is what the published kernel does."""
    config = dataclasses.replace(row.config, mask_every_block=True)
    return dataclasses.replace(row, config=config, suffix=f"{row.suffix}{EVERY}")


def build(options: argparse.Namespace) -> int:
    """Compiles the kernels and counts the instructions of all, the shipped ones too."""
    from jax_r2p.aot import sass

    rows = list(kernel_rows())
    compiled, _ = bundle.compile_into(options.folder, rows)
    cubins = {done.variant: done.cubin for done in compiled}
    shipped = (v for v in load_manifest().variants if v.dtype == "bf16" and v.role == "forward")
    cubins |= {v: read_cubin(v) for v in shipped}
    counts = {
        variant.name: audit.count_parts(sass.disassemble(cubin), variant.mask, audit.OPCODES)
        for variant, cubin in cubins.items()
    }
    (options.folder / COUNTS_FILE).write_text(json.dumps(counts, indent=1), "utf-8")
    print(f"{len(rows)} kernels in {options.folder}")
    return 0


# Cases -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload, the kernels that are compared on it, and whether its arrays stay in the L2 cache.

    The first of the kernels is the one that the package runs on it.
    """

    workload: Workload
    kernels: tuple[str, ...]
    in_l2: bool = False

    @property
    def name(self) -> str:
        """Name of the workload, marked where it stays in the cache."""
        return self.workload.name + ("_in_l2" if self.in_l2 else "")


def cases() -> list[Case]:
    """The five rows of the published comparison, wider windows, and narrow windows from the cache."""
    names = (
        "causal_d64_s8192",
        "causal_d128_s8192",
        "local64_d64_s8192",
        "local64_d128_s8192",
        "full_d128_s4096",
        "local256_d64_s8192",
        "local256_d128_s8192",
        "local1024_d128_s8192",
    )
    found = [Case(w, tuple(_kernels(w))) for w in workloads.select("all") if w.name in names]
    for head_dim, heads in ((64, 8), (128, 4)):
        [w] = workloads.select(f"local64_d{head_dim}_s8192")
        small = dataclasses.replace(w, batch=1, heads=heads, kv_heads=1)
        found.append(Case(small, tuple(_kernels(small)), in_l2=True))
    return found


def _kernels(w: Workload) -> Iterator[str]:
    base = bundle.shipped(w).name
    yield from (base, base + COMPARE, base + EVERY, base + EVERY + COMPARE)
    for tile_m, tile_n, min_blocks, _, _ in SHAPES.get(base, ()):
        name = f"{base}_{tile_m}x{tile_n}x{min_blocks}"
        yield from (name, name + COMPARE)


def visits(w: Workload, variant: Variant) -> dict[str, int]:
    """How many blocks of keys the tiles of one head visit, by the part of the kernel that computes them."""
    spec = bundle.bounds(w)
    has_left, has_right = variant.mask == "window", variant.mask != "none"
    total = dict.fromkeys((audit.FIRST, *audit.LOOPS[variant.mask]), 0)
    for first_row in range(0, w.length, variant.tile_m):
        visited = blocks.block_range(
            first_row,
            tile_m=variant.tile_m,
            tile_n=variant.tile_n,
            query_length=w.length,
            key_length=w.length,
            left=spec.left if has_left else None,
            right=spec.right if has_right else None,
        )
        total[audit.FIRST] += 1
        loops = visited.loops(has_right=has_right, has_left=has_left)
        for part, loop in zip(audit.LOOPS[variant.mask], loops, strict=True):
            total[part] += max(0, loop.high - loop.low)
    return total


def instructions(visited: dict[str, int], counts: audit.Parts) -> float:
    """Instructions that a consumer warp issues for blocks, a tile on average."""
    return sum(number * counts[part][audit.TOTAL] for part, number in visited.items()) / visited[audit.FIRST]


# Running ---------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Times every kernel of every case and appends the rows."""
    import jax_r2p
    from jax_r2p.bench import environment, measure, report

    variants = bundle.register(options.folder)
    counts = json.loads((options.folder / COUNTS_FILE).read_text("utf-8"))
    about = environment.describe(options.commit)
    print(f"jax_r2p from {jax_r2p.__path__[0]}", file=sys.stderr)
    todo = [case for case in cases() if options.cases is None or case.name in options.cases]
    with progress("samples", sum(len(c.kernels) for c in todo) * (options.rounds + 1)) as advance:
        for seed, case in enumerate(todo):
            w = case.workload
            least = 0 if case.in_l2 else 2 * measure.L2_BYTES
            inputs = measure.input_sets(w, seed, least_bytes=least)
            single = {name: function(w, variants[name]) for name in case.kernels}
            errors = {name: measure.relative_error(f, w, inputs[0]) for name, f in single.items()}
            calls, timed = 1, single
            if case.in_l2:  # the same keys and values for all calls of a program: nothing leaves the cache
                calls, inputs = CHAIN, [tuple(inputs[:1] * CHAIN)]
                timed = {name: measure.in_one_program(f, CHAIN) for name, f in single.items()}
            taken = measure.alternate(
                timed,
                inputs,
                rounds=options.rounds,
                sample_seconds=SAMPLE_SECONDS,
                calls_each=calls,
                advance=lambda now=case.name: advance(now),
            )
            rows = []
            for name in case.kernels:
                variant = variants[name]
                visited = visits(w, variant)
                row = report.timed_row(
                    w,
                    name,
                    taken[name].median(),
                    taken[name].total,
                    relative_error=errors[name],
                    calls=taken[name].calls,
                    host_bound=taken[name].host_bound(),
                    tile=[variant.tile_m, variant.tile_n, variant.min_blocks],
                    visits=visited,
                    instructions={part: counts[name][part][audit.TOTAL] for part in visited},
                    instructions_per_tile=round(instructions(visited, counts[name]), 1),
                    sha256=variant.sha256,
                )
                rows.append({**row, "case": case.name, **about})
            report.write_rows(options.out, rows)
    return 0


def function(w: Workload, variant: Variant) -> Callable[..., Any]:
    """A compiled call of one kernel."""
    import jax

    return jax.jit(bundle.call(w, variant))


def once(options: argparse.Namespace) -> int:
    """Runs kernels of one case, each twice, for a profiler."""
    import jax

    from jax_r2p.bench import measure

    variants = bundle.register(options.folder)
    [case] = [case for case in cases() if case.name == options.case]
    inputs = measure.input_sets(case.workload, 0)
    for name in options.kernels:
        f = function(case.workload, variants[name])
        for arrays in inputs[:2]:
            jax.block_until_ready(f(*arrays))
    return 0


COUNTERS = {
    "ms": ("gpu__time_duration.sum", 1e-6),
    "instructions": ("smsp__inst_executed.sum", 1.0),
    "issue_slots_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "memory_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "memory_bytes": ("dram__bytes.sum", 1.0),
}
"""Field of a row, name of the counter, and what a count is multiplied by."""

COUNTED_CASES = ("local64_d64_s8192", "local64_d128_s8192", "local256_d64_s8192", "causal_d64_s8192")


def counters(options: argparse.Namespace) -> int:
    """Counts what the GPU does in one call of the shipped kernel, with and without R2P, by Nsight Compute."""
    from jax_r2p.bench import environment, report

    about = environment.describe(options.commit)
    for case in cases():
        if case.name not in COUNTED_CASES:
            continue
        names = case.kernels[:2]
        metrics = ",".join(metric for metric, _ in COUNTERS.values())
        command = [options.ncu, "--clock-control", "none", "--csv", "--kernel-name", "regex:r2p_"]
        command += ["--metrics", metrics, sys.executable, __file__]
        command += ["once", str(options.folder), case.name, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        rows = csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"'))
        values: dict[str, dict[str, float]] = {}
        for row in rows:  # of the two calls of a kernel the second stays
            found = values.setdefault(row["Kernel Name"], {})
            found[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        for name in names:
            counted = values[entry_symbol(name)]
            fields = {field: counted[metric] * factor for field, (metric, factor) in COUNTERS.items()}
            report.write_rows(options.out, [{"case": case.name, "impl": name, **fields, **about}])
    return 0


# Showing ---------------------------------------------------------------------------------------------------

PUBLISHED = {
    "causal_d64_s8192": (2.463, 2.473),
    "causal_d128_s8192": (1.937, 1.944),
    "local64_d64_s8192": (0.394, 0.346),
    "local64_d128_s8192": (0.237, 0.222),
    "full_d128_s4096": (1.742, 1.728),
}
"""Milliseconds on an H100 without and with R2P, of the kernel that this comparison was first made with."""


def show(options: argparse.Namespace) -> int:
    """Prints the tables of recorded rows; puts them into a document, and draws the plot, if asked to."""
    from jax_r2p.bench import report

    table = report.by_case(report.read_rows(options.rows))
    sections = [lowering_section(table), blocks_section(table), tiles_section(table)]
    if options.counters:
        lines = options.counters.read_text("utf-8").splitlines()
        sections.append(counters_section(report.by_case(map(json.loads, lines))))
    for title, header, lines in sections:
        print_table(title, header, lines, left=2)
    if options.into:
        first = next(iter(next(iter(table.values())).values()))
        document = options.into.read_text("utf-8")
        options.into.write_text(report.insert_table(document, markdown(first, sections)), "utf-8")
    if options.plot:
        plot(table, options.plot)
    return 0


Table = dict[str, dict[str, dict[str, Any]]]
Section = tuple[str, list[str], list[list[str]]]


def gain(slow: dict[str, Any], fast: dict[str, Any]) -> tuple[float, float, float]:
    """How much faster `fast` is, as time over time less 1: median over the rounds, and the middle half."""
    import numpy as np

    ratios = np.array(slow["rounds_ms"]) / np.array(fast["rounds_ms"]) - 1
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return float(middle), float(low), float(high)


def _gain_cell(slow: dict[str, Any], fast: dict[str, Any]) -> str:
    middle, low, high = gain(slow, fast)
    return f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


def _base(line: dict[str, dict[str, Any]]) -> str:
    return min(line, key=len)


def _masked_share(row: dict[str, Any]) -> float:
    return 1 - row["visits"][audit.INTERIOR] / sum(row["visits"].values())


def lowering_section(table: Table) -> Section:
    """R2P against compare in the shipped kernels."""
    header = ["case", "tile", "masked blocks", "compare, ms", "R2P, ms", "gain (middle half)"]
    header += ["instructions saved", "published gain, H100"]
    lines = []
    for case, line in table.items():
        fast, slow = line[_base(line)], line[_base(line) + COMPARE]
        before, after = PUBLISHED.get(case, (None, None))
        lines.append(
            [
                case,
                _tile(fast),
                f"{_masked_share(fast):.0%}",
                _ms(slow),
                _ms(fast),
                _gain_cell(slow, fast),
                f"{1 - fast['instructions_per_tile'] / slow['instructions_per_tile']:.1%}",
                f"{before / after - 1:+.1%}" if before and after else "",
            ]
        )
    return "R2P against an integer compare an element, masks only where a bound crosses", header, lines


def blocks_section(table: Table) -> Section:
    """Masks where they are needed against masks everywhere."""
    header = ["case", "lowering", "every block masked, ms", "crossed blocks, ms", "gain (middle half)"]
    header += ["a masked block more, ns of an SM", "R2P gain, every block masked"]
    lines = []
    for case, line in table.items():
        base = _base(line)
        for name, suffix in (("R2P", ""), ("compare", COMPARE)):
            every, crossed = line[base + EVERY + suffix], line[base + suffix]
            lines.append(
                [
                    case,
                    name,
                    _ms(every),
                    _ms(crossed),
                    _gain_cell(every, crossed),
                    _cost_of_mask(case, every, crossed),
                    _gain_cell(line[base + EVERY + COMPARE], line[base + EVERY]) if not suffix else "",
                ]
            )
    return "Masks only where a bound crosses a block, against masks on every block", header, lines


SMS = 132
"""Of an H100 or H200."""


def _cost_of_mask(case: str, every: dict[str, Any], crossed: dict[str, Any]) -> str:
    """Time of one SM for one more masked block; empty where less than a tenth of the blocks are unmasked."""
    [w] = [c.workload for c in cases() if c.name == case]
    unmasked = crossed["visits"][audit.INTERIOR]
    if unmasked < 0.1 * sum(crossed["visits"].values()):
        return ""
    milliseconds = every["ms"] - crossed["ms"]
    return f"{milliseconds * 1e6 * SMS / (unmasked * w.batch * w.heads):.0f}"


def tiles_section(table: Table) -> Section:
    """What other tiles do to the share of masked blocks and to the time."""
    header = ["case", "tile", "masked blocks", "scores computed / visible", "R2P, ms", "compare, ms"]
    header += ["R2P gain (middle half)"]
    lines = []
    for case, line in table.items():
        [w] = [c.workload for c in cases() if c.name == case]
        names = [name for name in line if not name.endswith(COMPARE) and EVERY not in name]
        for name in names if len(names) > 1 else ():
            row, slow = line[name], line[name + COMPARE]
            computed = sum(row["visits"].values()) * row["tile"][0] * row["tile"][1]
            lines.append(
                [
                    case,
                    _tile(row) + (" shipped" if name == _base(line) else ""),
                    f"{_masked_share(row):.0%}",
                    f"{computed / w.pairs():.2f}",
                    _ms(row),
                    _ms(slow),
                    _gain_cell(slow, row),
                ]
            )
    return "Other tiles", header, lines


def counters_section(table: Table) -> Section:
    """What bounds the kernels: memory, L2 or instructions."""
    header = ["case", "lowering", "ms, one call alone", "million instructions", "issue slots used"]
    header += ["memory, of its peak", "L2, of its peak"]
    lines = []
    for case, line in table.items():
        for name, row in line.items():
            lines.append(
                [
                    case,
                    "compare" if name.endswith(COMPARE) else "R2P",
                    f"{row['ms']:.4f}",
                    f"{row['instructions'] / 1e6:.1f}",
                    *(f"{row[key]:.0f} %" for key in ("issue_slots_percent", "memory_percent", "l2_percent")),
                ]
            )
    return "Counters of one call, not at the power limit", header, lines


def _ms(row: dict[str, Any]) -> str:
    """Milliseconds, with a star where the host may have limited them."""
    return f"{row['ms']:.4f}" + ("*" if row["host_bound"] else "")


def _tile(row: dict[str, Any]) -> str:
    tile_m, tile_n, ctas = row["tile"]
    return f"{tile_m} x {tile_n}" + (f", {ctas} CTAs an SM" if ctas > 1 else "")


def markdown(first: dict[str, Any], sections: Sequence[Section]) -> str:
    """The tables, after a line that says what they were measured on."""
    parts = [
        f"{first['device']}, driver {first['driver']}, jax {first['jax']}, jax_r2p {first['jax_r2p']} at "
        f"commit {first['commit']}, {first['date'][:10]}. bf16; medians of {len(first['rounds_ms'])} rounds, "
        "the kernels of a case alternating. Where a time has a star the host may have limited it.\n"
    ]
    for title, header, lines in sections:
        align = ["---", "---"] + ["---:"] * (len(header) - 2)
        rows = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, align, *lines))
        parts.append(f"**{title}**\n\n{rows}\n")
    return "\n".join(parts)


def plot(table: Table, path: Path) -> None:
    """Instructions saved against time saved, both by R2P, for every pair of kernels of every case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9.5, 5.5), layout="constrained")
    kinds = {"causal": "o", "full": "s", "local": "^"}
    letters = dict(zip(table, "abcdefghijklmnopqrstuvwxyz", strict=False))
    for case, line in table.items():
        [marker] = [marker for kind, marker in kinds.items() if case.startswith(kind)]
        in_l2 = case.endswith("_in_l2")
        for name in line:
            if name.endswith(COMPARE):
                continue
            fast, slow = line[name], line[name + COMPARE]
            saved = 100 * (1 - fast["instructions_per_tile"] / slow["instructions_per_tile"])
            middle, low, high = (100 * x for x in gain(slow, fast))
            color = "tab:red" if in_l2 else "tab:orange" if EVERY in name else "tab:blue"
            shipped = name == _base(line)
            axes.errorbar(
                saved,
                middle,
                yerr=[[middle - low], [high - middle]],
                marker=marker,
                color=color,
                markersize=8 if shipped else 5,
                markerfacecolor=color if shipped else "white",
                elinewidth=0.8,
                linestyle="none",
            )
            if shipped:
                axes.annotate(
                    letters[case], (saved, middle), textcoords="offset points", xytext=(6, 5), fontsize=9
                )
    handles = [
        plt.Line2D([], [], marker="o", linestyle="none", color=color, label=text)
        for color, text in (
            ("tab:blue", "masks only where a bound crosses"),
            ("tab:orange", "every block masked, as published"),
            ("tab:red", "arrays in the L2 cache"),
        )
    ]
    handles += [
        plt.Line2D([], [], marker=marker, linestyle="none", color="gray", label=kind)
        for kind, marker in kinds.items()
    ]
    handles.append(
        plt.Line2D(
            [], [], marker="o", linestyle="none", color="gray", markerfacecolor="white", label="not shipped"
        )
    )
    handles += [
        plt.Line2D([], [], linestyle="none", label=f"{letter}  {case.replace('_', ' ')}")
        for case, letter in letters.items()
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside right upper")
    axes.axhline(0, color="gray", linewidth=0.8)
    limit = max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([0, limit], [0, limit], color="gray", linewidth=0.8, linestyle=":")
    axes.set_xlabel("instructions saved by R2P, % of those for key blocks (weighted by visits)")
    axes.set_ylabel("time gained by R2P, % (middle half of the rounds)")
    first = next(iter(next(iter(table.values())).values()))
    axes.set_title(f"{first['device']}, {first['date'][:10]}, commit {first['commit'][:12]}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build")
    command.add_argument("folder", type=Path)
    command.set_defaults(do=build)
    command = commands.add_parser("run")
    bundle.add_run_arguments(command, ROUNDS)
    command.add_argument("--cases", nargs="+", choices=[case.name for case in cases()], help="default: all")
    command.set_defaults(do=run)
    command = commands.add_parser("once")
    command.add_argument("folder", type=Path)
    command.add_argument("case", choices=[case.name for case in cases()])
    command.add_argument("kernels", nargs="+")
    command.set_defaults(do=once)
    command = commands.add_parser("counters")
    command.add_argument("folder", type=Path)
    command.add_argument("--out", type=Path, required=True, help="JSON lines, appended")
    command.add_argument("--commit", default="unknown", help="what the kernels were built from")
    command.add_argument("--ncu", default="ncu", help="Nsight Compute's command line")
    command.set_defaults(do=counters)
    command = commands.add_parser("show")
    command.add_argument("rows", type=Path)
    command.add_argument("--counters", type=Path, help="rows of `counters`, for a table of them")
    command.add_argument("--into", type=Path, help="replace the measured tables in this document")
    command.add_argument("--plot", type=Path, help="write the plot to this file")
    command.set_defaults(do=show)
    options = parser.parse_args(arguments)
    return options.do(options)


if __name__ == "__main__":
    sys.exit(main())

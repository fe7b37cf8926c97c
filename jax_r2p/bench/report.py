"""Rows of a run, and the tables and the plot made from them.

Rows are the only store: everything else is derived. A row has `case`, `impl` and `pass` (without one it is
"forward"), and then either `ms`, `tflops` and what else `timed_row` gives, or `status`, the reason why it was
not timed, or, of a cold start, `seconds`, one entry a process, and `median_s`. A table has rows of one pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from jax_r2p.bench.rivals import NO_KERNEL, NOT_INSTALLED, OURS, OWN
from jax_r2p.bench.workloads import (
    DENSE_PEAK_TFLOPS,
    MATMUL,
    MATMUL_WITH,
    PASSES,
    TABLE,
    Matmul,
    Pass,
    Workload,
)

Row = dict[str, Any]

COLD = "cold_"
"""What the case of a cold start begins with."""

LONG = 4096
"""Tokens from which on a query-key pair should take no longer than at the length before."""

GROWTH = 1.1
"""How many times as long as at the length before it may take all the same."""

TITLES: dict[Pass, str] = {"forward": "Forward", "training": "Forward and backward"}


def timed_row(
    w: Workload | Matmul, name: str, milliseconds: float, rounds: Sequence[float], **more: Any
) -> Row:
    """Returns the row of one implementation on one workload.

    Args:
      w: The workload, or the matmul that is the yardstick.
      name: The implementation.
      milliseconds: Median time of a call.
      rounds: Milliseconds a call, one entry a round.
      **more: Further fields of the row.
    """
    tflops = w.flops() / milliseconds / 1e9
    return {
        "case": w.name,
        "impl": name,
        "pass": w.pass_,
        "ms": round(milliseconds, 5),
        "rounds_ms": [round(x, 5) for x in rounds],
        "tflops": round(tflops, 2),
        "peak_share": round(tflops / DENSE_PEAK_TFLOPS, 4),
        "gb_per_s": round(w.bytes_moved() / milliseconds / 1e6, 1),
        **more,
    }


def add_ratios(rows: Sequence[Row]) -> None:
    """Sets `ratio_to_best_rival`, the time over that of the fastest rival of jax_r2p, in rows of one case."""
    rivals = {r["impl"]: r["ms"] for r in rows if "ms" in r and r["impl"] not in OWN}
    if not rivals:
        return
    best = min(rivals, key=rivals.__getitem__)
    for row in rows:
        if "ms" in row:
            row["best_rival"] = best
            row["ratio_to_best_rival"] = round(row["ms"] / rivals[best], 4)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows as JSON lines; makes the file and its folder where they are not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Returns the rows that `write_rows` wrote.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is not made of rows, or has none.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not _is_row(row):
            raise ValueError(f"line {number} is not a row of the benchmark: {line[:80]}")
        rows.append(row)
    if not rows:
        raise ValueError("it has no rows")
    return rows


def _is_row(value: Any) -> bool:
    """Whether it has what the tables and the plot take from a row."""

    def has(kind: type | tuple[type, ...], *names: str) -> bool:
        return all(isinstance(value.get(name), kind) for name in names)

    number = (int, float)
    if not isinstance(value, dict) or not has(str, "case", "impl"):
        return False
    if value.get("pass", "forward") not in PASSES or not isinstance(value.get("host_ms", 0), number):
        return False
    if "ratio_to_best_rival" in value and not (has(number, "ratio_to_best_rival") and has(str, "best_rival")):
        return False
    if has(str, "status"):
        return True
    if is_cold(value):
        return (
            has(number, "median_s")
            and has(list, "seconds")
            and all(isinstance(x, number) for x in value["seconds"])
        )
    return has(number, "ms", "tflops")


def is_cold(row: Row) -> bool:
    """Whether it is the row of a cold start."""
    return str(row["case"]).startswith(COLD)


def is_matmul(row: Row) -> bool:
    """Whether it is the row of the matmul."""
    return bool(row["case"] == MATMUL.name)


def by_pass(rows: Iterable[Row]) -> dict[Pass, list[Row]]:
    """Returns the rows of timed calls by their pass, in the order of the passes; cold starts are left out."""
    table: dict[Pass, list[Row]] = {name: [] for name in PASSES}
    for row in rows:
        if not is_cold(row):
            table[row.get("pass", "forward")].append(row)
    return {name: found for name, found in table.items() if found}


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Returns rows as {case: {implementation: row}}, in the order of the workloads.

    A later row of the same pair replaces an earlier one.
    """
    table: dict[str, dict[str, Row]] = {}
    for row in rows:
        table.setdefault(row["case"], {})[row["impl"]] = row
    order = {name: place for place, name in enumerate(TABLE)}
    return dict(sorted(table.items(), key=lambda item: order.get(item[0], len(order))))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "ms" in row:
        return f"{row['ms']:.3f}" + ("*" if row.get("host_bound") else "")
    status = str(row["status"])
    if status.startswith(NO_KERNEL):
        return "no kernel"
    return NOT_INSTALLED if status.startswith(NOT_INSTALLED) else "refused"


def _of_implementations(rows: Iterable[Row]) -> list[Row]:
    """All but the matmul's, which is no line of a table."""
    return [row for row in rows if not is_matmul(row)]


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns header and lines: milliseconds of each implementation, then TFLOP/s and ratio of jax_r2p.

    Below 1 in the last column jax_r2p is the faster one. `*` marks a time that the host may have limited.
    """
    rows = _of_implementations(rows)
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines = []
    for case, line in by_case(rows).items():
        ours = line.get(OURS, {})
        ratio = ours.get("ratio_to_best_rival")
        lines.append(
            [
                case,
                *(_cell(line.get(name)) for name in names),
                f"{ours['tflops']:.0f}" if "tflops" in ours else "",
                f"{ratio:.3f} ({ours['best_rival']})" if ratio is not None else "",
            ]
        )
    return ["case", *names, "TFLOP/s", "time / best rival"], lines


def fastest_cells(rows: Sequence[Row]) -> set[tuple[int, int]]:
    """Returns where in the lines of `table_cells` the fastest implementations stand, as (line, column)."""
    rows = _of_implementations(rows)
    header, _ = table_cells(rows)
    places = set()
    for number, line in enumerate(by_case(rows).values()):
        times = {name: row["ms"] for name, row in line.items() if "ms" in row}
        if times:
            places.add((number, header.index(min(times, key=times.__getitem__))))
    return places


def notes(rows: Sequence[Row]) -> list[str]:
    """Returns what the cells of a table leave out, a line each.

    That is why something was not timed, the `*`, lengths that are slower than shorter ones, and the matmul.
    """
    refused: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "status" in row and row["status"] != NOT_INSTALLED:
            refused.setdefault((row["impl"], row["status"]), []).append(row["case"])
    lines = [f"{name} {status} ({', '.join(cases)})" for (name, status), cases in refused.items()]
    if any(row.get("host_bound") for row in rows):
        lines.append("* the host may have limited this time")
    return lines + growth(rows) + _matmul_notes(rows)


def _matmul_notes(rows: Sequence[Row]) -> list[str]:
    timed = {(row["case"], row["impl"]): row for row in rows if "ms" in row}
    lines = []
    for (case, name), row in timed.items():
        if case != MATMUL.name:
            continue
        line = (
            f"{case} by {name}, in turn with {MATMUL_WITH}: {row['ms']:.3f} ms, {row['tflops']:.0f} TFLOP/s"
        )
        if ours := timed.get((MATMUL_WITH, OURS)):
            line += f"; {OURS} {ours['tflops']:.0f}, {ours['tflops'] / row['tflops']:.3f} of it"
        lines.append(line)
    return lines


def host_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns header and lines: microseconds that the host takes to queue a call of each implementation.

    Not of programs of several calls, which it queues as one.
    """
    rows = [row for row in _of_implementations(rows) if "host_ms" in row and row.get("calls_each", 1) == 1]
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [
        [case, *(f"{line[name]['host_ms'] * 1e3:.1f}" if name in line else "" for name in names)]
        for case, line in by_case(rows).items()
    ]
    return ["case", *names], lines


def cold_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns header and lines of cold starts: seconds from process start to first result."""
    lines = []
    for row in rows:
        every = ", ".join(f"{x:.2f}" for x in row.get("seconds", ()))
        median = f"{row['median_s']:.3f}" if "median_s" in row else row["status"]
        lines.append([row["case"].removeprefix(COLD), row["impl"], median, every])
    return ["case", "implementation", "median", "each process"], lines


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table of rows of one pass as Markdown, with a line above that says what it was measured on.

    The time of the matmul, if there is one, is a line below.
    """
    first = rows[0]
    device, driver, jax, package, commit, date = (
        str(first.get(key, "unknown")) for key in ("device", "driver", "jax", "jax_r2p", "commit", "date")
    )
    title = TITLES[first.get("pass", "forward")]
    about = (
        f"{title}, bf16, median milliseconds a call (lower is better). {device}, driver {driver}, jax {jax}, "
        f"jax_r2p {package} at commit {commit}, {date[:10]}. An empty cell was not run."
    )
    below = "".join(f"\n{line}.\n" for line in _matmul_notes(rows))
    return f"{about}\n\n{_markdown_table(*table_cells(rows))}{below}"


def host_markdown(rows: Sequence[Row]) -> str:
    """Returns the table of what calls cost the host as Markdown, with a line above that says what it is."""
    title = TITLES[rows[0].get("pass", "forward")]
    return f"{title}, microseconds of the host to queue a call.\n\n{_markdown_table(*host_cells(rows))}"


def _markdown_table(header: list[str], lines: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, align, *lines))


BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
MARKERS: dict[Pass, tuple[str, str]] = {
    "forward": (BEGIN, END),
    "training": ("<!-- measured training: begin -->", "<!-- measured training: end -->"),
}
"""The lines of a document between which a table goes."""


def insert_table(document: str, table: str, pass_: Pass = "forward") -> str:
    """Returns `document` with everything between the two markers of a pass replaced by the table.

    Raises:
      ValueError: The markers are not there, once each and in this order.
    """
    begin, end = MARKERS[pass_]
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        raise ValueError(f"it needs the lines {begin} and {end}, once each, in this order")
    head, rest = document.split(begin)
    return f"{head}{begin}\n{table}{end}{rest.split(end)[1]}"


def plot(rows: Sequence[Row], file: Path | IO[bytes], kind: str) -> None:
    """Draws bars of TFLOP/s, one group a case, one colour an implementation, and a line for the matmul.

    Args:
      rows: Those that were timed are drawn.
      file: What to write.
      kind: Its format, for example "png".

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    drawn = by_pass(row for row in rows if "ms" in row)
    matmuls = [row["tflops"] for of_pass in drawn.values() for row in of_pass if is_matmul(row)]
    cases = {
        case if pass_ == "forward" else f"{case}, {pass_}": line
        for pass_, of_pass in drawn.items()
        for case, line in by_case(_of_implementations(of_pass)).items()
    }
    names = list(dict.fromkeys(name for line in cases.values() for name in line))
    figure = Figure(figsize=(max(6.0, 0.9 * len(cases)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        places = [place + (i - (len(names) - 1) / 2) * width for place in range(len(cases))]
        heights = [line[name]["tflops"] if name in line else 0.0 for line in cases.values()]
        axes.bar(places, heights, width, label=name)
    if matmuls:
        axes.axhline(matmuls[-1], color="gray", linestyle=":", label=MATMUL.name)
    axes.set_xticks(range(len(cases)), list(cases), rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("TFLOP/s (visible pairs only)")
    if names:
        device, date, commit = (str(rows[0].get(key, "")) for key in ("device", "date", "commit"))
        axes.set_title(f"{device}, {date[:10]}, commit {commit[:12]}", fontsize=9)
        figure.legend(loc="outside upper center", ncols=len(names) + len(matmuls[-1:]), fontsize=8)
    figure.savefig(file, format=kind, dpi=150)


def over_lengths(rows: Iterable[Row]) -> dict[str, list[tuple[Workload, Row]]]:
    """Returns what jax_r2p took for calls that differ in length only, each with its row, the shortest first.

    Keys say what they have in common, for example "causal, d192v128". Cases of several calls in one program
    are left out, and such as are not in the tables of workloads.
    """
    lines: dict[str, list[tuple[Workload, Row]]] = {}
    for pass_, of_pass in by_pass(rows).items():
        for case, line in by_case(of_pass).items():
            w, row = TABLE.get(case), line.get(OURS, {})
            if w is not None and w.calls == 1 and "ms" in row:
                w = dataclasses.replace(w, training=pass_ == "training")
                lines.setdefault(_but_length(w), []).append((w, row))
    return {name: sorted(points, key=lambda point: point[0].length) for name, points in lines.items()}


def _but_length(w: Workload) -> str:
    parts = [w.mask, _heads(w)]
    return ", ".join([*parts, "training"] if w.training else parts)


def _heads(w: Workload) -> str:
    value = f"v{w.value_head_dim}" if w.value_head_dim != w.head_dim else ""
    group = f", {w.heads // w.kv_heads} heads a key head" if w.heads != w.kv_heads else ""
    return f"d{w.head_dim}{value}{group}"


def growth(rows: Iterable[Row]) -> list[str]:
    """Returns a line for each long call of jax_r2p whose time does not follow the arithmetic.

    That is one of `LONG` tokens or more where a query-key pair takes over `GROWTH` times what it does at the
    length before. As operations a pair do not change with the length, that is what TFLOP/s fall by.
    """
    return [
        f"{OURS} {_but_length(long)}: at {long.length} tokens a query-key pair takes {factor:.2f} times what "
        f"it does at {short.length}"
        for points in over_lengths(rows).values()
        for (short, before), (long, row) in itertools.pairwise(points)
        if long.length >= LONG and (factor := before["tflops"] / row["tflops"]) > GROWTH
    ]


def plot_lengths(rows: Sequence[Row], file: Path | IO[bytes], kind: str) -> None:
    """Draws TFLOP/s of jax_r2p over the length, by mask and heads, and windows over their byte floor.

    Args:
      rows: Those of jax_r2p that were timed are drawn.
      file: What to write.
      kind: Its format, for example "png".

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    lines = sorted(
        over_lengths(rows).items(), key=lambda line: (line[1][0][0].mask, line[1][0][0].head_dim, line[0])
    )
    figure = Figure(figsize=(13, 6), layout="constrained")
    speed, floor = figure.subplots(1, 2)
    first = [points[0][0] for _, points in lines]
    colors = {mask: f"C{i}" for i, mask in enumerate(dict.fromkeys(w.mask for w in first))}
    markers = dict(zip(dict.fromkeys(_heads(w) for w in first), itertools.cycle("osv^D*PX"), strict=False))
    for (name, points), w in zip(lines, first, strict=True):
        panels = [(speed, [row["tflops"] for _, row in points])]
        if w.window is not None:
            panels.append((floor, [w.byte_floor_ms() / row["ms"] for w, row in points]))
        for axes, heights in panels:
            axes.plot(
                [w.length for w, _ in points],
                heights,
                label=name,
                color=colors[w.mask],
                linestyle="--" if w.training else "-",
                marker=markers[_heads(w)],
                markersize=5,
            )
    for axes, label in ((speed, "TFLOP/s (visible pairs only)"), (floor, "byte floor / time")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("length, tokens")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    if lines:
        figure.legend(*speed.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    floor.set_ylim(0, 1)
    if rows:
        device, date, commit = (str(rows[0].get(key, "")) for key in ("device", "date", "commit"))
        figure.suptitle(f"{device}, {date[:10]}, commit {commit[:12]}", fontsize=9)
    figure.savefig(file, format=kind, dpi=150)

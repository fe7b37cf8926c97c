"""Rows of a run, and the tables and the plot made from them.

Rows are the only store: everything else is derived. A row has `case` and `impl`, and then either `ms`,
`tflops` and what else `timed_row` gives, or `status`, the reason why it was not timed, or, of a cold start,
`seconds`, one entry a process, and `median_s`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from jax_r2p.bench.rivals import NOT_INSTALLED, OURS
from jax_r2p.bench.workloads import DENSE_PEAK_TFLOPS, LENGTHS, WORKLOADS, Workload, select

Row = dict[str, Any]

COLD = "cold_"
"""What the case of a cold start begins with."""


def timed_row(w: Workload, name: str, milliseconds: float, rounds: Sequence[float], **more: Any) -> Row:
    """Returns the row of one implementation on one workload.

    Args:
      w: The workload.
      name: The implementation.
      milliseconds: Median time of a call.
      rounds: Milliseconds a call, one entry a round.
      **more: Further fields of the row.
    """
    tflops = w.flops() / milliseconds / 1e9
    return {
        "case": w.name,
        "impl": name,
        "ms": round(milliseconds, 5),
        "rounds_ms": [round(x, 5) for x in rounds],
        "tflops": round(tflops, 2),
        "peak_share": round(tflops / DENSE_PEAK_TFLOPS, 4),
        "gb_per_s": round(w.bytes_moved() / milliseconds / 1e6, 1),
        **more,
    }


def add_ratios(rows: Sequence[Row]) -> None:
    """Sets `ratio_to_best_rival`, the time over that of the fastest rival of jax_r2p, in rows of one case."""
    rivals = {r["impl"]: r["ms"] for r in rows if "ms" in r and r["impl"] not in (OURS, "reference")}
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


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Returns rows as {case: {implementation: row}}, in the order of the workloads.

    A later row of the same pair replaces an earlier one.
    """
    table: dict[str, dict[str, Row]] = {}
    for row in rows:
        table.setdefault(row["case"], {})[row["impl"]] = row
    names = dict.fromkeys(w.name for w in (*WORKLOADS, *LENGTHS))
    order = {name: place for place, name in enumerate(names)}
    return dict(sorted(table.items(), key=lambda item: order.get(item[0], len(order))))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "ms" in row:
        return f"{row['ms']:.3f}" + ("*" if row.get("host_bound") else "")
    return NOT_INSTALLED if str(row["status"]).startswith(NOT_INSTALLED) else "refused"


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns header and lines: milliseconds of each implementation, then TFLOP/s and ratio of jax_r2p.

    Below 1 in the last column jax_r2p is the faster one. `*` marks a time that the host may have limited.
    """
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
    header, _ = table_cells(rows)
    places = set()
    for number, line in enumerate(by_case(rows).values()):
        times = {name: row["ms"] for name, row in line.items() if "ms" in row}
        if times:
            places.add((number, header.index(min(times, key=times.__getitem__))))
    return places


def notes(rows: Sequence[Row]) -> list[str]:
    """Returns what the cells of a table leave out, a line each: why something was not timed, and the `*`."""
    refused: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "status" in row and row["status"] != NOT_INSTALLED:
            refused.setdefault((row["impl"], row["status"]), []).append(row["case"])
    lines = [f"{name} {status} ({', '.join(cases)})" for (name, status), cases in refused.items()]
    if any(row.get("host_bound") for row in rows):
        lines.append("* the host may have limited this time")
    return lines


def cold_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns header and lines of cold starts: seconds from process start to first result."""
    lines = []
    for row in rows:
        every = ", ".join(f"{x:.2f}" for x in row.get("seconds", ()))
        median = f"{row['median_s']:.3f}" if "median_s" in row else row["status"]
        lines.append([row["case"].removeprefix(COLD), row["impl"], median, every])
    return ["case", "implementation", "median", "each process"], lines


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table as Markdown, with a line above that says what it was measured on."""
    header, lines = table_cells(rows)
    first = rows[0]
    device, driver, jax, package, commit, date = (
        str(first.get(key, "unknown")) for key in ("device", "driver", "jax", "jax_r2p", "commit", "date")
    )
    about = (
        f"Forward, bf16, median milliseconds a call (lower is better). {device}, driver {driver}, jax {jax}, "
        f"jax_r2p {package} at commit {commit}, {date[:10]}. An empty cell was not run."
    )
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join([about, "", *(f"| {' | '.join(cells)} |" for cells in (header, align, *lines))]) + "\n"


BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def insert_table(document: str, table: str) -> str:
    """Returns `document` with everything between the two markers replaced by the table.

    Raises:
      ValueError: The markers are not there, once each and in this order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(f"it needs the lines {BEGIN} and {END}, once each, in this order")
    head, rest = document.split(BEGIN)
    return f"{head}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def plot(rows: Sequence[Row], file: Path | IO[bytes], kind: str) -> None:
    """Draws bars of TFLOP/s, one group a case, one colour an implementation.

    Args:
      rows: Those that were timed are drawn.
      file: What to write.
      kind: Its format, for example "png".

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    cases = by_case(row for row in rows if "ms" in row)
    names = list(dict.fromkeys(row["impl"] for row in rows if "ms" in row))
    figure = Figure(figsize=(max(6.0, 0.9 * len(cases)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        places = [place + (i - (len(names) - 1) / 2) * width for place in range(len(cases))]
        heights = [line[name]["tflops"] if name in line else 0.0 for line in cases.values()]
        axes.bar(places, heights, width, label=name)
    axes.set_xticks(range(len(cases)), list(cases), rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("TFLOP/s (visible pairs only)")
    if names:
        device, date, commit = (str(rows[0].get(key, "")) for key in ("device", "date", "commit"))
        axes.set_title(f"{device}, {date[:10]}, commit {commit[:12]}", fontsize=9)
        figure.legend(loc="outside upper center", ncols=len(names), fontsize=8)
    figure.savefig(file, format=kind, dpi=150)


def plot_lengths(rows: Sequence[Row], file: Path | IO[bytes], kind: str) -> None:
    """Draws TFLOP/s of jax_r2p over the length, by mask and head dim, and windows over their byte floor.

    Args:
      rows: Those of jax_r2p that were timed are drawn.
      file: What to write.
      kind: Its format, for example "png".

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: matplotlib knows no such format, or a case is not in the tables of workloads.
    """
    from matplotlib.figure import Figure

    lines: dict[tuple[str, int], list[tuple[Workload, Row]]] = {}
    for row in rows:
        if row["impl"] == OURS and "ms" in row:
            [w] = select(row["case"])
            lines.setdefault((w.name.partition("_")[0], w.head_dim), []).append((w, row))
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    speed, floor = figure.subplots(1, 2)
    styles = {64: ":", 128: "-", 256: "--"}
    colors = {mask: f"C{i}" for i, mask in enumerate(dict.fromkeys(mask for mask, _ in lines))}
    for (mask, head_dim), points in sorted(lines.items()):
        points = sorted(points, key=lambda point: point[0].length)
        lengths = [w.length for w, _ in points]
        panels = [(speed, [row["tflops"] for _, row in points])]
        if mask.startswith("local"):
            panels.append((floor, [w.byte_floor_ms() / row["ms"] for w, row in points]))
        for axes, heights in panels:
            axes.plot(
                lengths,
                heights,
                label=f"{mask}, d{head_dim}",
                color=colors[mask],
                linestyle=styles.get(head_dim, "-."),
                marker="o",
                markersize=4,
            )
    for axes, label in ((speed, "TFLOP/s (visible pairs only)"), (floor, "byte floor / time")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("length, tokens")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        if axes.get_lines():
            axes.legend(fontsize=8)
    floor.set_ylim(0, 1)
    if rows:
        device, date, commit = (str(rows[0].get(key, "")) for key in ("device", "date", "commit"))
        figure.suptitle(f"{device}, {date[:10]}, commit {commit[:12]}", fontsize=9)
    figure.savefig(file, format=kind, dpi=150)

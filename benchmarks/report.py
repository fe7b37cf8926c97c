"""Rows of a run, and the tables and the plot made from them. Rows are the only store: everything else is
derived.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rivals import OURS
from workloads import DENSE_PEAK_TFLOPS, WORKLOADS, Workload

Row = dict[str, Any]


def timed_row(w: Workload, name: str, milliseconds: float, rounds: Sequence[float], **more: Any) -> Row:
    """The row of one implementation on one workload: median, rounds, TFLOP/s and its share of the peak."""
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


def add_ratios(rows: Iterable[Row]) -> None:
    """Sets `ratio_to_best_rival` (time over the time of the fastest rival of jax_r2p) in rows of one case."""
    rows = list(rows)
    rivals = {r["impl"]: r["ms"] for r in rows if "ms" in r and r["impl"] not in (OURS, "reference")}
    if not rivals:
        return
    best = min(rivals, key=rivals.__getitem__)
    for row in rows:
        if "ms" in row:
            row["best_rival"] = best
            row["ratio_to_best_rival"] = round(row["ms"] / rivals[best], 4)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Rows as {case: {implementation: row}}, in the order of the workloads.

    A later row of the same pair replaces an earlier one.
    """
    table: dict[str, dict[str, Row]] = {}
    for row in rows:
        table.setdefault(row["case"], {})[row["impl"]] = row
    order = {w.name: place for place, w in enumerate(WORKLOADS)}
    return dict(sorted(table.items(), key=lambda item: order.get(item[0], len(order))))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "ms" in row:
        return f"{row['ms']:.3f}" + ("*" if row.get("host_bound") else "")
    return "not installed" if str(row.get("status", "")).startswith("not installed") else "refused"


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: the milliseconds of each implementation, then TFLOP/s of jax_r2p and time over the
    best rival.

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


def markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown, with a line above that says what it was measured on."""
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
    """`document` with everything between the two markers replaced by the table.

    Raises:
      ValueError: the markers are not there, once each and in this order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(f"the document needs {BEGIN} and {END}, once each, in this order")
    head, rest = document.split(BEGIN)
    return f"{head}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def print_table(rows: Sequence[Row]) -> None:
    """Print the table to the terminal, the fastest implementation of each case in bold."""
    from rich.console import Console
    from rich.table import Table

    header, lines = table_cells(rows)
    table = Table(title="milliseconds a call, median over rounds")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
    cases = by_case(rows)
    for cells in lines:
        times = {name: row["ms"] for name, row in cases[cells[0]].items() if "ms" in row}
        fastest = min(times, key=times.__getitem__, default=None)
        bold = [f"[bold green]{c}[/]" if n == fastest else c for n, c in zip(header, cells, strict=True)]
        table.add_row(*bold)
    Console(width=None if Console().is_terminal else 160).print(table)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of TFLOP/s, one group a case, one colour an implementation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    cases = by_case(row for row in rows if "ms" in row)
    names = list(dict.fromkeys(row["impl"] for row in rows if "ms" in row))
    places = np.arange(len(cases))
    figure, axes = plt.subplots(figsize=(max(6.0, 0.9 * len(cases)), 4.5), layout="constrained")
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        heights = [line[name]["tflops"] if name in line else 0.0 for line in cases.values()]
        axes.bar(places + (i - (len(names) - 1) / 2) * width, heights, width, label=name)
    axes.set_xticks(places, list(cases), rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("TFLOP/s (visible pairs only)")
    if rows:
        device, date, commit = (str(rows[0].get(key, "")) for key in ("device", "date", "commit"))
        axes.set_title(f"{device}, {date[:10]}, commit {commit[:12]}", fontsize=9)
    figure.legend(loc="outside upper center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)

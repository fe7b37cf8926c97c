"""What the subcommands share: how they print, how they fail, and their exit statuses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

EXIT_FAILED = 1
"""The command did what it was asked, and the answer is no; or it could not."""

EXIT_USAGE = 2
"""The arguments are wrong. Nothing was done."""

_WIDTH = 10_000
"""Columns that a table may take, whatever the terminal has: a line that it breaks loses nothing, a cell that
rich cuts off does.
"""


class UsageError(Exception):
    """An argument is wrong: the text names it, the rule and what was got."""


class CommandError(Exception):
    """The arguments are right, but the command cannot do it here: the text says why and what would help."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def print_json(value: Any) -> None:
    """Prints one JSON document on standard output, where nothing else is printed with it."""
    print(json.dumps(value, indent=2))


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    bold: Collection[tuple[int, int]] = (),
) -> None:
    """Prints a table.

    Args:
      title: A line above it.
      header: Names of the columns.
      rows: A text for each column.
      left: How many columns, from the first, are words; the others are numbers.
      bold: (row, column) of what a terminal shows in bold.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(header):
        table.add_column(Text(name), justify="left" if place < left else "right", no_wrap=True)
    for number, row in enumerate(rows):
        styles = ("bold" if (number, place) in bold else "" for place in range(len(row)))
        table.add_row(*map(Text, row, styles))
    console = Console(width=_WIDTH, highlight=False)
    console.print(Text(title), soft_wrap=True)  # a table's own title would be broken at the table's width
    console.print(table)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Shows a bar on standard error while a long step runs, if that is a terminal.

    Yields:
      A function to call after each of the `total` parts, with the name of what has been done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[done]}"),
    )
    console = Console(stderr=True)
    # Elsewhere than on a terminal it would leave empty lines.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, done="")

        def advance(done: str) -> None:
            bar.update(task, advance=1, done=done)

        yield advance

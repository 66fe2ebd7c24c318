"""Rows of a rich table that show their text as it is: `[x]` is no markup, and nothing long is cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is loaded only where something is printed
    from rich.console import Console
    from rich.table import Table

_FILE_COLUMNS = 120  # where the output is a file. Not tuned.


def wide_console() -> Console:
    """Return the console of standard output; in a file or a pipe nothing has to be cut to a terminal's width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain texts; `style` is for the first of them."""
    from rich.text import Text

    first, *rest = cells
    table.add_row(Text(first, style=style, overflow="fold"), *(Text(cell, overflow="fold") for cell in rest))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    title_left: bool = False,
    unbroken: int = 0,
    numbers: bool = False,
) -> None:
    """Print rows of plain texts below the names of their columns, where these have any. The first `unbroken` columns
    are never folded. `numbers`: all but the first column are of numbers."""
    from rich.table import Column, Table

    named = (
        Column(name, justify="right" if numbers and at else "left", no_wrap=at < unbroken)
        for at, name in enumerate(columns)
    )
    table = Table(*named, title=title or None, show_header=bool(columns))
    table.title_justify = "left" if title_left else "center"
    for row in rows:
        add_row(table, *row)
    wide_console().print(table)


def print_lines(*lines: str, wraps: bool = True) -> None:
    """Print lines as they are. One that does not wrap is cut by the terminal alone: a copy of it has no breaks."""
    console = wide_console()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=not wraps)

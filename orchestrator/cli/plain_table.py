"""Rows of a rich table that show their text as it is: `[x]` is no markup, and nothing long is cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is loaded only where something is printed
    from rich.table import Table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain texts; `style` is for the first of them."""
    from rich.text import Text

    first, *rest = cells
    table.add_row(Text(first, style=style, overflow="fold"), *(Text(cell, overflow="fold") for cell in rest))

"""How `outrider bench headlines` shows its result to people."""

from __future__ import annotations

from typing import Any

from orchestrator.plain_table import add_row, wide_console


def print_headlines(result: dict[str, Any]) -> None:
    """Print a row for each claim, what stands for what, and how long it took."""
    from rich.table import Table

    console = wide_console()
    table = Table(title=f"claims and what {result['environment']['processor']} gives")
    for name in ("claim", "wanted", "measured", "shown"):
        table.add_column(name)
    for row in result["summary"]:
        add_row(table, row["claim"], row["wanted"], row["measured"] or "-", describe_shown(row))
    console.print(table)
    for row in result["summary"]:
        note = f"; {row['note']}" if row["note"] else ""
        console.print(f"{row['claim']}: {row['command']}{note}", markup=False, highlight=False)
    same = "yes" if result["identical"] else "NO"
    console.print(f"identical output: {same}; all of it took {result['took_s']:.0f} s", markup=False, highlight=False)


def describe_shown(row: dict[str, Any]) -> str:
    """Return whether a claim is shown, and where it is not, why, or by how much it misses."""
    if row["shown"] is True:
        return "yes"
    if row["shown"] is False:
        return f"no, misses by {row['misses_by']:.2f}"
    return f"not here: {row['shown']}"

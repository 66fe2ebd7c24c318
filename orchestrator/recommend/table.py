"""How `outrider drafts recommend` shows its result to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.plain_table import add_row, wide_console
from orchestrator.recommend.figures import NONE, PLAIN_BAR, ROUTER_BAR

if TYPE_CHECKING:  # rich is loaded only where something is printed
    from rich.table import Table


def print_recommendation(result: dict[str, Any]) -> None:
    """Print every candidate, every category, the formulas, and what to paste."""
    console = wide_console()
    console.print(_build_candidates(result))
    for row in result["candidates"]:
        if row["failed"]:
            console.print(f"left out: {row['name']}: {row['failed']}", markup=False, highlight=False)
    console.print(_build_categories(result["categories"]))
    for name, formula in result["formulas"].items():
        console.print(f"[dim]{name} = {formula}[/dim]", highlight=False)
    for line in describe_recommendation(result["summary"]):
        console.print(line, markup=False, highlight=False)


def describe_recommendation(summary: dict[str, Any]) -> list[str]:
    """Return in lines what to configure, what to expect of it, and the text to paste."""
    if summary["recommended"] == NONE:
        lines = ["none of the drafts pays on these prompts: no interval of a speed-up is above 1"]
    else:
        low, high = summary["interval"]
        lines = [
            f"recommended: {summary['recommended']}, {summary['speed_up']:.2f} times plain decoding "
            f"({low:.2f} to {high:.2f} with 95 %)"
        ]
    if summary["alike"]:
        lines.append(f"not told apart from it by these prompts: {', '.join(summary['alike'])}")
    if (share := summary["worst_router_share"]) is not None:
        lines.append(
            f"the chain in its worst category: {share:.2f} of the best single draft (bar {ROUTER_BAR}), "
            f"{summary['worst_chain_vs_plain']:.2f} of plain decoding (bar {PLAIN_BAR})"
        )
    if (spread := summary["control_interval"]) is not None:
        lines.append(
            f"plain decoding once more: {spread[0]:.2f} to {spread[1]:.2f}: the machine's own part of an interval"
        )
    return [*lines, f"identical output: {'yes' if summary['identical'] else 'NO'}", "", summary["yaml"]]


def _build_candidates(result: dict[str, Any]) -> Table:
    from rich.table import Table

    environment = result["environment"]
    title = f"drafts for {environment['model']} on {environment['adapter']} {environment['device']}, "
    table = Table(title=title + f"{environment['prompts']} prompts, in turn")
    table.add_column("drafts", min_width=16)
    for name in ("TPOT ms", "speed-up", "95 %", "acceptance", "tokens a step", "same"):
        table.add_column(name, justify="right")
    for row in result["candidates"]:
        if not row["failed"]:
            cells = (
                f"{row['tpot_ms']:.2f}",
                f"{row['speed_up']:.2f}x",
                _format_interval(row["interval"]),
                f"{row['acceptance_rate']:.2f}",
                f"{row['mean_acceptance_length']:.2f}",
                "yes" if row["identical"] else "NO",
            )
            add_row(table, row["name"], *cells)
    return table


def _format_interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _build_categories(categories: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="by category: speed-up of each, and the chain beside the best single draft")
    table.add_column("category")
    names = [name for name in categories[0]["ways"] if name != NONE]
    for name in ("prompts", *names, "best single", "chain / best", "by length", "chain / plain"):
        table.add_column(name, justify="right")
    for row in categories:
        speeds = (
            f"{row['ways'][name]['speed_up']:.2f} ({_format_interval(row['ways'][name]['interval'])})" for name in names
        )
        ends = (_format_share(row[name]) for name in ("router_share", "length_share", "chain_vs_plain"))
        add_row(table, row["category"], str(row["prompts"]), *speeds, row["best_single"], *ends)
    return table


def _format_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"

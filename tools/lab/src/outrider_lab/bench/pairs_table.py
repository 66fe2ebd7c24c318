"""How `outrider bench pairs` shows its result to people."""

from __future__ import annotations

from typing import Any

from orchestrator.plain_table import add_row, wide_console

_COLUMNS = (
    "sampling",
    "same",
    "acceptance",
    "length",
    "plain ms",
    "spec ms",
    "speed-up",
    "control",
    "drafted",
    "rounds",
    "draft ms",
    "RSS MiB",
)


def print_pairs(result: dict[str, Any]) -> None:
    """Print a row for each pair and sampling, what failed, the totals and the formulas."""
    from rich.table import Table

    console = wide_console()
    table = Table(title=f"drafts -> target, {result['environment']['model']}")
    table.add_column("pair", min_width=30)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in result["runs"]:
        for sampling in ("greedy", "sampled", "rejection"):
            if row.get(sampling):
                add_row(table, row["pair"], sampling, *_cells(row, sampling))
    console.print(table)
    for row in result["runs"]:
        if row["failed"]:
            console.print(f"FAILED {row['pair']}: {row['failed']}", markup=False)
    for reason in result["skipped"]:
        console.print(f"left out: {reason}", markup=False)
    for name, formula in result["formulas"].items():
        console.print(f"[dim]{name} = {formula}[/dim]", highlight=False)
    summary = result["summary"]
    console.print(", ".join(f"{name} {_format_value(value)}" for name, value in summary.items()), highlight=False)


def _cells(row: dict[str, Any], sampling: str) -> list[str]:
    figures = row[sampling]
    same = "yes" if figures["identical"] else f"NO ({figures['mismatches']})"
    if sampling == "rejection":
        same = "-"
    return [
        same,
        f"{figures['acceptance_rate']:.2f}",
        f"{figures['mean_acceptance_length']:.2f}",
        f"{figures['plain_tpot_ms']:.2f}",
        f"{figures['spec_tpot_ms']:.2f}",
        f"{figures['tpot_speed_up']:.3f}x",
        f"{figures['control_ratio']:.3f}x",
        str(figures["drafted"]),
        str(figures["draft_rounds"]),
        f"{figures['draft_ms']:.0f}",
        f"{row['rss_mib']:.0f}",
    ]


def _format_value(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

"""How `outrider bench pairs` shows its result to people."""

from __future__ import annotations

from typing import Any

from orchestrator.plain_table import print_lines
from outrider_lab.bench.result import print_formulas, print_rows

_COLUMNS = {
    "pair": "{pair}",
    "sampling": "{sampling}",
    "same": "{same}",
    "acceptance": "{acceptance_rate:.2f}",
    "length": "{mean_acceptance_length:.2f}",
    "plain ms": "{plain_tpot_ms:.2f}",
    "spec ms": "{spec_tpot_ms:.2f}",
    "speed-up": "{tpot_speed_up:.3f}x",
    "control": "{control_ratio:.3f}x",
    "drafted": "{drafted}",
    "rounds": "{draft_rounds}",
    "draft ms": "{draft_ms:.0f}",
    "RSS MiB": "{rss_mib:.0f}",
}


def print_pairs(result: dict[str, Any]) -> None:
    """Print a row for each pair and sampling, what failed, the totals and the formulas."""
    rows = [
        {**row, **row[sampling], "sampling": sampling, "same": _compare(row[sampling], sampling)}
        for row in result["runs"]
        for sampling in ("greedy", "sampled", "rejection")
        if row.get(sampling)
    ]
    print_rows(f"drafts -> target, {result['environment']['model']}", _COLUMNS, rows)
    print_lines(*(f"FAILED {row['pair']}: {row['failed']}" for row in result["runs"] if row["failed"]))
    print_lines(*(f"left out: {reason}" for reason in result["skipped"]))
    print_formulas(result["formulas"])
    print_lines(", ".join(f"{name} {_format_value(value)}" for name, value in result["summary"].items()))


def _compare(figures: dict[str, Any], sampling: str) -> str:
    if sampling == "rejection":
        return "-"
    return "yes" if figures["identical"] else f"NO ({figures['mismatches']})"


def _format_value(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

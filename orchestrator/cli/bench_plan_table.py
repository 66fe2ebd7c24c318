"""How `outrider bench plan` shows its result to people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from orchestrator.cli.plain_table import wide_console

_SHARES = ("median_error", "worst_error", "chosen_vs_best", "gap_to_exact")


def print_comparison(result: dict[str, Any]) -> None:
    """Print each configuration, each load's choice, and the summary with bars and formulas."""
    console = wide_console()
    table = Table(title="predicted and measured tokens/s")
    for name in ("runtime", "depth"):
        table.add_column(name)
    for name in ("at once", "prompt", "predicted", "measured", "error", "tokens a round", "drafts", "round ms"):
        table.add_column(name, justify="right")
    for row in result["configurations"]:
        table.add_row(
            row["runtime"],
            row["depth"],
            str(row["concurrency"]),
            row["prompt"],
            f"{row['predicted_tokens_per_s']:.1f}",
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['error']:+.1%}",
            f"{row['predicted_tokens_per_round']:.2f} / {row['measured_tokens_per_round']:.2f}",
            f"{row['measured_drafts_per_round']:.2f}",
            f"{row['predicted_round_ms']:.1f} / {row['measured_round_ms']:.1f}",
        )
    console.print(table)
    for row in result["workloads"]:
        share = "not run" if row["chosen_vs_best"] is None else f"{row['chosen_vs_best']:.1%} of the best"
        console.print(f"{row['load']}: the plan takes {row['chosen']}: {share} ({row['best']})", highlight=False)
    for name, value in result["summary"].items():
        console.print(f"{name}: {_shown(name, value)} (bar {result['bars'][name]})", highlight=False)
    for name, formula in result["formulas"].items():
        console.print(f"[dim]{name} = {formula}[/dim]", highlight=False)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "not measured"
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:.2f} s" if name.endswith("_seconds") else f"{value}"

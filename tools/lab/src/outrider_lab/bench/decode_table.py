"""How `outrider bench decode` shows its result to people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from orchestrator.plain_table import wide_console


def print_decode(result: dict[str, Any]) -> None:
    """Print the table by category, the totals, the formulas, and whether outputs were identical."""
    console = wide_console()
    summary, environment = result["summary"], result["environment"]
    table = Table(
        title=f"{environment['model']} on {environment['adapter']} {environment['device']}, "
        f"{environment['activations']}, exactness {environment['exactness']}, "
        f"concurrency {environment['concurrency']}"
    )
    table.add_column("category")
    for name in (
        "prompts",
        "TTFT ms",
        "plain TPOT ms",
        "spec TPOT ms",
        "speed-up",
        "acceptance",
        "mean length",
    ):
        table.add_column(name, justify="right")
    for name, row in [*summary["categories"].items(), ("all", summary)]:
        table.add_row(
            name,
            str(row["prompts"]),
            f"{row['spec_ttft_ms']:.0f}",
            f"{row['plain_tpot_ms']:.2f}",
            f"{row['spec_tpot_ms']:.2f}",
            f"{row['tpot_speed_up']:.2f}x",
            f"{row['acceptance_rate']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
        )
    console.print(table)
    console.print(
        f"tokens/s, prefill included: plain {summary['plain_tok_s']:.1f}, "
        f"speculative {summary['spec_tok_s']:.1f} ({summary['speed_up']:.2f}x); "
        f"orchestration {summary['overhead_share']:.1%} of a speculative round, "
        f"{summary['plain_overhead_share']:.1%} of a plain one"
    )
    for name, formula in result["formulas"].items():
        console.print(f"[dim]{name} = {formula}[/dim]", highlight=False)
    same = summary["identical"]
    console.print(f"identical output: {'yes' if same else 'NO'} ({summary['prompts']} prompts, token for token)")

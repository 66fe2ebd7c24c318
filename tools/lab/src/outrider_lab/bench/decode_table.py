"""How `outrider bench decode` shows its result to people."""

from __future__ import annotations

from typing import Any

from orchestrator.plain_table import print_lines
from outrider_lab.bench.result import print_formulas, print_rows

_COLUMNS = {
    "category": "{category}",
    "prompts": "{prompts}",
    "TTFT ms": "{spec_ttft_ms:.0f}",
    "plain TPOT ms": "{plain_tpot_ms:.2f}",
    "spec TPOT ms": "{spec_tpot_ms:.2f}",
    "speed-up": "{tpot_speed_up:.2f}x",
    "acceptance": "{acceptance_rate:.2f}",
    "mean length": "{mean_acceptance_length:.2f}",
}


def print_decode(result: dict[str, Any]) -> None:
    """Print the table by category, the totals, the formulas, and whether outputs were identical."""
    summary, environment = result["summary"], result["environment"]
    title = (
        f"{environment['model']} on {environment['adapter']} {environment['device']}, "
        f"{environment['activations']}, exactness {environment['exactness']}, "
        f"concurrency {environment['concurrency']}"
    )
    categories = [*summary["categories"].items(), ("all", summary)]
    print_rows(title, _COLUMNS, ({**row, "category": name} for name, row in categories))
    print_lines(
        f"tokens/s, prefill included: plain {summary['plain_tok_s']:.1f}, "
        f"speculative {summary['spec_tok_s']:.1f} ({summary['speed_up']:.2f}x); "
        f"orchestration {summary['overhead_share']:.1%} of a speculative round, "
        f"{summary['plain_overhead_share']:.1%} of a plain one"
    )
    print_formulas(result["formulas"])
    same = "yes" if summary["identical"] else "NO"
    print_lines(f"identical output: {same} ({summary['prompts']} prompts, token for token)")

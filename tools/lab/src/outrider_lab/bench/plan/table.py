"""How `outrider bench plan` shows its result to people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from orchestrator.plain_table import wide_console

_SHARES = (
    "median_error",
    "worst_error",
    "median_error_as_profiled",
    "worst_error_as_profiled",
    "chosen_vs_best",
)
_COMPONENTS = (
    ("tokens_per_round", "tokens a round"),
    ("drafts_per_round", "drafts"),
    ("round_ms", "round ms"),
    ("prefill_ms", "prefill ms"),
)
"""Of which predicted and measured are shown side by side."""


def print_comparison(result: dict[str, Any]) -> None:
    """Print each configuration, each load's choice, and the summary with bars and formulas."""
    console = wide_console()
    table = Table(title="predicted and measured tokens/s")
    for name in ("runtime", "depth"):
        table.add_column(name)
    priced = any(row["price_per_hour"] for row in result["configurations"])
    for name in (
        "at once",
        "prompt",
        "as profiled",
        "predicted",
        "measured",
        "error",
        *(title for _, title in _COMPONENTS),
        *(["cost of a million"] if priced else []),
    ):
        table.add_column(name, justify="right")
    for row in result["configurations"]:
        table.add_row(
            row["runtime"],
            row["depth"],
            str(row["concurrency"]),
            row["prompt"],
            f"{row['predicted_as_profiled_tokens_per_s']:.1f}",
            f"{row['predicted_tokens_per_s']:.1f}",
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['error']:+.1%}",
            *(_pair(row["components"][name]) for name, _ in _COMPONENTS),
            *([_costs_of(row)] if priced else []),
        )
    console.print(table)
    for row in result["workloads"]:
        share = "not run" if row["chosen_vs_best"] is None else f"{row['chosen_vs_best']:.1%} of the best"
        console.print(f"{row['load']}: the plan takes {row['chosen']}: {share} ({row['best']})", highlight=False)
    for name, value in result["summary"].items():
        bar = f" (bar {result['bars'][name]})" if name in result["bars"] else ""
        console.print(f"{name}: {_format_value(name, value)}{bar}", highlight=False)
    for runtime, pace in result["pace"].items():
        console.print(f"pace of {runtime}: {pace:.3f}", highlight=False)
    for name, formula in result["formulas"].items():
        console.print(f"[dim]{name} = {formula}[/dim]", highlight=False)


def _costs_of(row: dict[str, Any]) -> str:
    known = (row["predicted_cost_per_million_tokens"], row["measured_cost_per_million_tokens"])
    return " / ".join("-" if value is None else f"{value:.3g}" for value in known)


def _pair(values: dict[str, float]) -> str:
    digits = 2 if max(values.values()) < 10.0 else 1
    return f"{values['predicted']:.{digits}f} / {values['measured']:.{digits}f}"


def _format_value(name: str, value: float | None) -> str:
    if value is None:
        return "not measured"
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:.2f} s" if name.endswith("_seconds") else f"{value}"

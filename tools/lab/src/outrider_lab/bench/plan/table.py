"""How `outrider bench plan` shows its result to people."""

from __future__ import annotations

from typing import Any

from orchestrator.plain_table import wide_console
from outrider_lab.bench.result import print_formulas, print_rows

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
    columns = {
        "runtime": "{runtime}",
        "depth": "{depth}",
        "at once": "{concurrency}",
        "prompt": "{prompt}",
        "as profiled": "{predicted_as_profiled_tokens_per_s:.1f}",
        "predicted": "{predicted_tokens_per_s:.1f}",
        "measured": "{measured_tokens_per_s:.1f}",
        "error": "{error:+.1%}",
        **{title: f"{{{name}}}" for name, title in _COMPONENTS},
    }
    if any(row["price_per_hour"] for row in result["configurations"]):
        columns["cost of a million"] = "{costs}"
    rows = (
        {**row, "costs": _costs_of(row), **{name: _pair(row["components"][name]) for name, _ in _COMPONENTS}}
        for row in result["configurations"]
    )
    print_rows("predicted and measured tokens/s", columns, rows)
    console = wide_console()
    for row in result["workloads"]:
        share = "not run" if row["chosen_vs_best"] is None else f"{row['chosen_vs_best']:.1%} of the best"
        console.print(f"{row['load']}: the plan takes {row['chosen']}: {share} ({row['best']})", highlight=False)
    for name, value in result["summary"].items():
        bar = f" (bar {result['bars'][name]})" if name in result["bars"] else ""
        console.print(f"{name}: {_format_value(name, value)}{bar}", highlight=False)
    for runtime, pace in result["pace"].items():
        console.print(f"pace of {runtime}: {pace:.3f}", highlight=False)
    print_formulas(result["formulas"])


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

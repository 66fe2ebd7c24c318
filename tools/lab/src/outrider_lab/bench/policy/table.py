"""How `outrider bench policy` shows its result to people."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from orchestrator.plain_table import print_table, wide_console
from outrider_lab.bench.policy.drafters import KINDS
from outrider_lab.bench.result import print_formulas, print_rows

_RATIOS = ("worst_vs_plain", "vs_hindsight")
_WORST = 8


def print_policies(result: dict[str, Any]) -> None:
    """Print what was run and what was replayed, the summary with bars, and the formulas."""
    console = wide_console()
    for line in result["scope"]:
        console.print(line, highlight=False)
    if result["cells"]:
        _print_cells(console, result["cells"])
        _print_real(console, result)
    _print_replays(console, result)
    for name, value in result["summary"].items():
        console.print(f"{name}: {_format_value(name, value)} (bar {result['bars'][name]})", highlight=False)
    print_formulas(result["formulas"])


def _print_cells(console: Console, rows: list[dict[str, Any]]) -> None:
    """The least ratio of each category or concurrency is what the bar is about; of all cells the worst are listed."""
    loads = sorted({row["concurrency"] for row in rows})
    heads = [_at_once(load) for load in loads]
    categories = dict.fromkeys(row["category"] for row in rows)
    least = ([category, *(_least(rows, category, load) for load in loads)] for category in categories)
    title = "adaptive / plain tokens/s, real runs: least over good, bad and alternating drafts"
    print_table(["category", *heads], least, title=title, numbers=True)
    by_kind = (
        [kind, *(_by_kind([r for r in rows if (r["drafter"], r["concurrency"]) == (kind, n)]) for n in loads)]
        for kind in KINDS
    )
    title = "the same by drafter: mean, least (replayed least)"
    print_table(["drafter", *heads], by_kind, title=title, numbers=True)
    for row in sorted(rows, key=lambda row: float(row["ratio"]))[:_WORST]:
        seen = ", ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        console.print(
            f"{row['category']}, {row['concurrency']} at once, {row['drafter']}: {row['ratio']:.3f} (of {seen}; "
            f"replayed {row['replayed_ratio']:.3f})",
            highlight=False,
        )


def _least(rows: list[dict[str, Any]], category: str, load: int) -> str:
    ratios = [row["ratio"] for row in rows if (row["category"], row["concurrency"]) == (category, load)]
    return f"{min(ratios):.2f}" if ratios else "-"


def _by_kind(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    ratios = [row["ratio"] for row in rows]
    replayed = min(row["replayed_ratio"] for row in rows)
    return f"{sum(ratios) / len(ratios):.2f}, {min(ratios):.2f} ({replayed:.2f})"


def _print_real(console: Console, result: dict[str, Any]) -> None:
    control = sorted(result["control"])
    if control:
        console.print(
            f"plain against plain, {len(control)} times: {control[0]:.3f} to {control[-1]:.3f}, "
            f"median {control[len(control) // 2]:.3f}: what lies within is the machine's noise",
            highlight=False,
        )
    rows = [{**row, "vs_plain": row["ratio"]} for row in result["sample"]]
    _print_policies(rows, "real runs over the mix, good drafts: tokens/s / plain's")


def _print_policies(rows: list[dict[str, Any]], title: str) -> None:
    loads = list(dict.fromkeys(row["concurrency"] for row in rows))
    known = {(row["policy"], row["concurrency"]): f"{row['vs_plain']:.2f}" for row in rows}
    policies = dict.fromkeys(row["policy"] for row in rows)
    cells = ([policy, *(known.get((policy, load), "") for load in loads)] for policy in policies)
    print_table(["policy", *map(_at_once, loads)], cells, title=title, numbers=True)


def _print_replays(console: Console, result: dict[str, Any]) -> None:
    rows = result["replay"]["mix"]
    for kind in dict.fromkeys(row["drafter"] for row in rows):
        mine = [row for row in rows if row["drafter"] == kind]
        _print_policies(mine, f"replayed over the mix, {kind} drafts: tokens/s / plain's")
    by_load = ({**row, "load": _at_once(row["concurrency"])} for row in result["replay"]["loads"])
    columns = {"load": "{load}", "plain": "{vs_plain:.3f}", "hindsight": "{vs_hindsight:.3f}"}
    print_rows("replayed, all kinds of drafts: adaptive against the others", columns, by_load)
    console.print(f"worst_vs_plain, replayed: {result['replay']['worst_vs_plain']:.3f}", highlight=False)


def _at_once(load: int | str) -> str:
    return f"{load} at once" if isinstance(load, int) else f"load {load}"


def _format_value(name: str, value: float | bool | None) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3f}" if name in _RATIOS else f"{value:.1f}"

"""How `outrider simulate` shows its result to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from orchestrator.plain_table import add_row, print_lines, wide_console

if TYPE_CHECKING:
    from outrider_lab.simulation.questions.answer import Answer

_LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "e2e": "e2e_ms", "pause behind a loss": "pause_ms"}
_PARTS = ("mean", "p50", "p90", "p95", "p99")


def print_simulation(result: dict[str, Any]) -> None:
    """Print latencies, totals, what each kind of replica did, and what was assumed."""
    console = wide_console()
    summary = result["summary"]
    table = Table()
    table.add_column("ms")
    for part in _PARTS:
        table.add_column(part, justify="right")
    for name, key in _LATENCIES.items():
        if summary[key] is not None:
            add_row(table, name, *(f"{summary[key][part]:,.1f}" for part in _PARTS))
    console.print(table)
    totals = Table(show_header=False)
    for label, key, form in _ROWS:
        if summary.get(key) is not None and (summary[key] or key != "unfinished"):
            add_row(totals, label, form.format(summary[key]))
    console.print(totals)
    if "classes" in summary:
        console.print(_build_class_table(summary["classes"]))
    kinds = Table()
    for name in ("replicas of a kind", "count", "busy", "sequences", "tokens a round"):
        kinds.add_column(name, justify="left" if name.startswith("replicas") else "right")
    for name, one in result["kinds"].items():
        shown = (f"{one['replicas']:,}", f"{one['utilisation']:.0%}", f"{one['mean_sequences']:.1f}")
        add_row(kinds, name, *shown, f"{one['tokens_a_round']:.2f}")
    console.print(kinds)
    for kind, count in summary["errors"].items():
        console.print(f"{count:,} requests were refused or ended: {kind}", style="yellow", highlight=False)
    if result["not_validated"]:
        told = "; ".join(result["not_validated"])
        console.print(f"not validated beside real runs: {told}", style="yellow", highlight=False, markup=False)
    for line in [*result["assumed"], *result["log"]["lines"][:10]]:
        console.print(line, highlight=False, markup=False)


def print_answer(answer: Answer) -> None:
    console = wide_console()
    console.print(answer.question, highlight=False)
    table = Table()
    for name in answer.columns:
        table.add_column(_WORDS.get(name, name), justify="right")
    for row in answer.rows:
        cells = [form.format(row[key]) if row.get(key) is not None else "-" for key, form in answer.columns.items()]
        add_row(table, *cells)
    console.print(table)
    print_lines(*answer.assumed)


_WORDS = {
    "output_tok_s": "tokens/s",
    "tpot_ms": "TPOT p50, ms",
    "ttft_ms": "TTFT p95, ms",
    "draft_models": "draft models",
    "rate": "requests/s",
    "alike_replicas": "alike: targets",
    "alike_attainment": "alike: meet the objectives",
    "alike_cost": "alike: cost",
    "attainment": "meet the objectives",
    "price_per_hour": "price an hour",
    "cost_per_million_tokens": "cost of a million tokens",
}


def _build_class_table(classes: dict[str, Any]) -> Table:
    """Return what users of each class saw."""
    table = Table()
    table.add_column("users")
    for name in ("requests", "completed", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "meet the objectives"):
        table.add_column(name, justify="right")
    for name, one in classes.items():
        shown = [f"{one[key][part]:,.1f}" if one[key] else "" for key in _SHOWN for part in ("p50", "p95")]
        met = f"{one['slo_attainment']:.1%}" if one["slo_attainment"] is not None else ""
        add_row(table, name or "others", f"{one['requests']:,}", f"{one['completed']:,}", *shown, met)
    return table


_SHOWN = ("ttft_ms", "tpot_ms")
_ROWS = (
    ("requests", "requests", "{:,}"),
    ("completed", "completed", "{:,}"),
    ("unfinished", "unfinished", "{:,}"),
    ("simulated", "duration_s", "{:,.1f} s"),
    ("requests/s", "requests_per_s", "{:,.2f}"),
    ("output tokens/s", "output_tok_s", "{:,.1f}"),
    ("meet the objectives", "slo_attainment", "{:.1%}"),
    ("goodput", "goodput_per_s", "{:,.2f} requests/s"),
    ("cost of a million tokens", "cost_per_million_tokens", "{:,.2f}"),
    ("energy of a token", "joules_per_token", "{:,.2f} J"),
    ("replicas", "replicas", "{:,}"),
    ("devices", "devices", "{:,}"),
    ("groups of equal bits", "groups", "{:,}"),
    ("went on with other bits", "changed_group", "{:,}"),
    ("took", "wall_s", "{:,.1f} s"),
    ("simulated requests a second", "simulated_requests_per_s", "{:,.0f}"),
)

"""How `outrider simulate` shows its result to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from orchestrator.plain_table import add_row, print_lines, print_table, wide_console
from outrider_lab.bench.result import print_rows

if TYPE_CHECKING:
    from outrider_lab.simulation.questions.asked import Answer

_LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "e2e": "e2e_ms", "pause behind a loss": "pause_ms"}
_PARTS = ("mean", "p50", "p90", "p95", "p99")


def print_simulation(result: dict[str, Any]) -> None:
    """Print latencies, totals, what each kind of replica did, and what was assumed."""
    console = wide_console()
    summary = result["summary"]
    latencies = (
        [name, *(f"{summary[key][part]:,.1f}" for part in _PARTS)]
        for name, key in _LATENCIES.items()
        if summary[key] is not None
    )
    print_table(["ms", *_PARTS], latencies, numbers=True)
    totals = (
        (label, form.format(summary[key]))
        for label, key, form in _ROWS
        if summary.get(key) is not None and (summary[key] or key != "unfinished")
    )
    print_table((), totals)
    if "classes" in summary:
        _print_classes(summary["classes"])
    columns = {
        "replicas of a kind": "{name}",
        "count": "{replicas:,}",
        "busy": "{utilisation:.0%}",
        "sequences": "{mean_sequences:.1f}",
        "tokens a round": "{tokens_a_round:.2f}",
    }
    print_rows("", columns, ({"name": name, **one} for name, one in result["kinds"].items()))
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


def _print_classes(classes: dict[str, Any]) -> None:
    heads = ("users", "requests", "completed", *_CLASS_LATENCIES, "meet the objectives")
    rows = []
    for name, one in classes.items():
        shown = [f"{one[key][part]:,.1f}" if one[key] else "" for key, part in _CLASS_LATENCIES.values()]
        met = f"{one['slo_attainment']:.1%}" if one["slo_attainment"] is not None else ""
        rows.append((name or "others", f"{one['requests']:,}", f"{one['completed']:,}", *shown, met))
    print_table(heads, rows, numbers=True)


_CLASS_LATENCIES = {
    f"{figure} {part}": (f"{figure.lower()}_ms", part) for figure in ("TTFT", "TPOT") for part in ("p50", "p95")
}
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

"""How `outrider bench serve` shows its result to people."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from orchestrator.plain_table import add_row, print_table, wide_console
from outrider_lab.bench.result import print_formulas

LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "e2e": "e2e_ms", "send lag": "send_lag_ms"}
PARTS = ("mean", "median", "p90", "p95", "p99")
BUSY_GENERATOR = 0.8
LATE_MS = 10.0


def print_serve(result: dict[str, Any]) -> None:
    """Print latencies, the other figures, what to be careful with, and the formulas."""
    console = wide_console()
    summary = result["summary"]
    summaries = [summary, summary["compare"]] if "compare" in summary else [summary]
    names = [run["label"] for run in result["runs"]]
    labels = [""] if len(summaries) == 1 else ["--url", "compared"]
    console.print(_title(result["environment"]), highlight=False)
    rows = (
        [f"{name} {label}".strip(), *(f"{one[key][part]:.2f}" for part in PARTS)]
        for name, key in LATENCIES.items()
        for label, one in zip(labels, summaries, strict=True)
        if one[key] is not None
    )
    print_table(["ms", *PARTS], rows, numbers=True)
    console.print(_totals(names, summaries, summary.get("ratios", {}), result["environment"]))
    if "same_text" in summary:
        console.print(f"same text: {summary['same_text']} of {summary['same_text_of']} requests that both completed")
    for label, one in zip(labels, summaries, strict=True):
        for line in _cautions(one, result["environment"]):
            console.print(f"{label} {line}".strip(), style="yellow", highlight=False, markup=False)
    print_formulas(result["formulas"])


def _title(environment: dict[str, Any]) -> str:
    loop = (
        f"closed loop, concurrency {environment['concurrency']}"
        if environment["loop"] == "closed"
        else f"open loop, {environment['rate_per_s']:g} requests/s, {environment['arrival']}"
    )
    return f"{environment['endpoint']}, {loop}, temperature {environment['temperature']:g}"


def _totals(
    names: list[str], summaries: list[dict[str, Any]], ratios: dict[str, float | None], environment: dict[str, Any]
) -> Table:
    table = Table()
    table.add_column("")
    for name in names:
        table.add_column(Text(name, overflow="fold"), justify="right")
    if ratios:
        table.add_column("ratio", justify="right")
    for label, key, form in _rows(environment):
        values = [summary[key] for summary in summaries]
        if any(value is not None for value in values):
            cells = ["-" if value is None else form.format(value) for value in values]
            ratio = ratios.get(key)
            add_row(table, label, *cells, *([f"{ratio:.2f}x" if ratio else ""] if ratios else []))
    return table


def _rows(environment: dict[str, Any]) -> list[tuple[str, str, str]]:
    objectives = ", ".join(f"{name} {value:g} ms" for name, value in environment["slo_ms"].items())
    return [
        ("requests", "requests", "{}"),
        ("completed", "completed", "{}"),
        ("failed", "failed", "{}"),
        ("duration s", "duration_s", "{:.2f}"),
        ("asked rate, requests/s", "asked_rate_per_s", "{:.2f}"),
        ("achieved rate, requests/s", "achieved_rate_per_s", "{:.2f}"),
        ("throughput, requests/s", "requests_per_s", "{:.2f}"),
        ("throughput, output tokens/s", "output_tok_s", "{:.1f}"),
        (f"goodput, requests/s ({objectives})", "goodput_per_s", "{:.2f}"),
        ("SLO attainment", "slo_attainment", "{:.1%}"),
        ("running requests, mean", "mean_running", "{:.1f}"),
        ("running requests, most", "max_running", "{}"),
        ("prompt tokens", "prompt_tokens", "{}"),
        ("output tokens", "output_tokens", "{}"),
        ("price an hour", "price_per_hour", "{:.4g}"),
        ("cost of a million output tokens", "cost_per_million_tokens", "{:.4g}"),
        ("currency of prices", "currency", "{}"),
        ("output tokens per event", "tokens_per_event", "{:.2f}"),
        ("acceptance rate", "acceptance_rate", "{:.2f}"),
        ("mean acceptance length", "mean_acceptance_length", "{:.2f}"),
        ("generator's CPU share", "generator_cpu_share", "{:.1%}"),
    ]


def _cautions(summary: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    """Return what a reader of the figures must know."""
    found = [
        f"{count} x {kind}: {summary['error_examples'][kind] or 'no message'}"
        for kind, count in summary["errors"].items()
    ]
    if summary["interrupted"]:
        found.append(f"interrupted: {summary['interrupted']} of {summary['requests']} requests did not end")
    if missing := summary["without_token_count"]:
        found.append(
            f"token counts are missing: {missing} of {summary['completed']} streams had no usage, so there are no "
            "output tokens/s, and no TPOT for them; events are not counted as tokens"
        )
        if "tpot" in environment["slo_ms"]:
            found.append("goodput is unknown: whether a request without a token count met its TPOT cannot be told")
    if (uses := summary["requests"] / environment["prompts"]) > 1.0:
        found.append(
            f"each prompt was used {uses:.1f} times: prefix caches and drafts from earlier outputs flatter the server"
        )
    if summary["without_text"]:
        found.append(f"{summary['without_text']} streams had no text: they have no TTFT")
    if (summary["generator_cpu_share"] or 0.0) > BUSY_GENERATOR:
        found.append("this generator was near a whole core: part of what was measured is the generator itself")
    if summary["send_lag_ms"] and summary["send_lag_ms"]["p99"] > LATE_MS:
        found.append("the generator was late (send lag): its lateness is part of every latency")
    return found

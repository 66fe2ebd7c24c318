"""The report of a run: as JSON, and as tables for people."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from orchestrator.plain_table import print_table, wide_console
from outrider_lab.chaos.records import LOSSES, StreamRecord, is_whole, list_activity, measure_silence

MOST_EXAMPLES = 12
MOST_LOG_LINES = 400
_DIGITS = 3
_COLUMNS = {
    "faults": "faults",
    "streams_met": "met",
    "client_errors": "errors",
    "wrong_tokens": "wrong",
    "lost_tokens": "lost",
    "doubled_tokens": "double",
    "recovery_p50_s": "p50 s",
    "recovery_max_s": "max s",
    "longest_silence_s": "silence s",
    "ready_max_s": "ready s",
    "never_ready": "never",
}


def stream_row(stream: StreamRecord, met: list[str]) -> dict[str, Any]:
    return {
        "number": stream.number,
        "client": stream.lane,
        "case": stream.case,
        "streamed": stream.streamed,
        "began_s": round(stream.began_s, _DIGITS),
        "ended_s": round(stream.ended_s, _DIGITS) if math.isfinite(stream.ended_s) else None,
        "tokens": stream.tokens,
        "error": stream.error,
        **{f"{name}_tokens": count for name, count in asdict(stream.difference).items()},
        "unfinished_tokens": stream.unfinished_tokens,
        "first_difference": stream.first_difference,
        "longest_silence_s": round(measure_silence(stream), _DIGITS),
        "resumes": stream.resumes,
        "faults_met": met,
        "active_s": [[round(start, 2), round(end, 2)] for start, end in list_activity(stream.times_s)],
    }


def read_warnings(log: Path) -> list[dict[str, Any]]:
    """Return the last warnings and errors of the daemon's log; lines that are no JSON are told as they stand."""
    found: list[dict[str, Any]] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {"level": "error", "event": line}
        if isinstance(entry, dict) and entry.get("level") in ("warning", "error", "critical"):
            found.append(entry)
    return found[-MOST_LOG_LINES:]


def show_report(report: dict[str, Any]) -> None:
    """Print the summary, the kinds, and examples of what was lost."""
    console, summary, environment = wide_console(), report["summary"], report["environment"]
    title = f"chaos, seed {environment['seed']}, {environment['duration_s']:.0f} s, {environment['processor']}"
    table = Table("", Column("value", justify="right"), title=title)
    for name, value in summary.items():
        if name != "fault_kinds":
            bad = name in LOSSES and value
            table.add_row(name, f"[red]{value}[/red]" if bad else ("-" if value is None else str(value)))
    console.print(table)
    kinds = ([kind, *(_format_cell(row[name]) for name in _COLUMNS)] for kind, row in report["kinds"].items())
    title = "by kind; a stream counts under every kind that it met"
    print_table(("kind", *_COLUMNS.values()), kinds, title=title, unbroken=1, numbers=True)
    for kind, reason in report["skipped"].items():
        console.print(f"not used: {kind}: {reason}", markup=False)
    _show_losses(report, console)
    console.print("[green]nothing was lost[/green]" if is_whole(summary) else "[red]something was lost[/red]")


def _format_cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _show_losses(report: dict[str, Any], console: Console) -> None:
    errors = Counter(stream["error"] for stream in report["streams"] if stream["error"])
    for text, count in errors.most_common(MOST_EXAMPLES):
        console.print(f"client error, {count} times: {text}", markup=False, highlight=False)
    different = [stream for stream in report["streams"] if stream["first_difference"]]
    for stream in different[:MOST_EXAMPLES]:
        met = ", ".join(stream["faults_met"])
        console.print(f"stream {stream['number']} ({met}): {stream['first_difference']}", markup=False, highlight=False)
    for alarm in report["false_alarms"][:MOST_EXAMPLES]:
        console.print(f"false alarm at {alarm['at_s']} s: {alarm['worker']}: {alarm['detail']}", markup=False)
    for fault in report["faults"]:
        if fault["skipped"]:
            console.print(f"fault {fault['number']} ({fault['kind']}) not made: {fault['skipped']}", markup=False)

"""How far simulated figures are from real ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider_lab.bench.validation.real import RunFigures, average_figures
from outrider_lab.bench.validation.runs import ValidationRun

COMPARED = ("output_tok_s", "tpot_ms", "e2e_ms")
"""Whose errors count in `median_error` and `worst_error`."""
BARS = {"median_error": 0.08, "worst_error": 0.20, "ttft_error": 0.15, "pause_error": 0.25}
FORMULAS = {
    "error": "simulated / real - 1",
    "median_error": f"median of |error| of {', '.join(COMPARED)} (medians of latencies) over all runs",
    "worst_error": "the largest of them",
    "ttft_error": "median of |error| of ttft_ms (median TTFT) over all runs",
    "pause_error": "median of |error| of pause_ms over the runs in which a worker was lost",
}


def compare_run(run: ValidationRun, turns: Sequence[tuple[RunFigures, RunFigures]]) -> dict[str, Any]:
    """Return the real and the simulated figures of a run and their errors, on the mean of the times that it was
    made."""
    real, simulated = (average_figures(figures) for figures in zip(*turns, strict=True))
    errors = {
        name: getattr(simulated, name) / value - 1.0
        for name, value in asdict(real).items()
        if value and getattr(simulated, name) is not None
    }
    return {
        "name": run.name,
        "place": run.place,
        "speculates": run.speculates,
        "fault": run.fault,
        "requests": run.requests,
        "turns": len(turns),
        "real": asdict(real),
        "simulated": asdict(simulated),
        "errors": errors,
    }


def summarise_runs(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures by name, with which figure of which run was worst."""
    errors = [(abs(row["errors"][name]), f"{row['name']}: {name}") for row in rows for name in COMPARED]
    ttft = [abs(row["errors"]["ttft_ms"]) for row in rows if "ttft_ms" in row["errors"]]
    pauses = [abs(row["errors"]["pause_ms"]) for row in rows if "pause_ms" in row["errors"]]
    worst = max(errors, default=(0.0, ""))
    return {
        "runs": len(rows),
        "median_error": statistics.median([error for error, _ in errors]) if errors else 0.0,
        "worst_error": worst[0],
        "worst": worst[1],
        "ttft_error": statistics.median(ttft) if ttft else 0.0,
        "pause_error": statistics.median(pauses) if pauses else None,
        "goodput_error": statistics.median([abs(row["errors"].get("goodput_per_s", 0.0)) for row in rows] or [0.0]),
    }

"""The figures of `outrider bench plan`, and how each of them comes about."""

from __future__ import annotations

import statistics
from typing import Any

from device_profiles.units import compute_cost_per_million
from outrider_lab.bench.plan.predicted import Predicted
from outrider_lab.bench.plan.runs import Configuration, RunMeasurement

FORMULAS = {
    "tokens_per_s": "tokens of all sequences / seconds, while as many requests run as the configuration says; "
    "predicted: C E(k) / (round + C E(k) / output tokens x prefill of a prompt), from stored profiles by "
    "policies/planning/throughput.py",
    "pace": "of a runtime: mean time of one forward (2 rows behind 64 positions), repeated between the parts of the "
    "runs / the time predicted for it: how many times as slow as when it was profiled the machine was",
    "error": "(predicted / pace - measured) / measured tokens/s",
    "error_as_profiled": "(predicted - measured) / measured tokens/s",
    "median_error": "median of |error| over all configurations",
    "worst_error": "largest |error| of all configurations",
    "median_error_as_profiled": "median of |error_as_profiled|",
    "worst_error_as_profiled": "largest |error_as_profiled|",
    "chosen_vs_best": "measured tokens/s of what the plan chooses for a load / of the best that was run; worst load",
    "cost_per_million_tokens": "of a configuration: `devices.price_per_hour` / 3600 / tokens_per_s x 1,000,000",
    "profile_seconds": "seconds that measuring the target on all runtimes took, loading included",
}
BARS = {
    "configurations": ">= 12",
    "median_error": "<= 10 %",
    "worst_error": "<= 25 %",
    "chosen_vs_best": ">= 95 %",
    "profile_seconds": "<= 60 s",
}


def row_of(
    one: Configuration, predicted: Predicted, measured: RunMeasurement, pace: float, price_per_hour: float = 0.0
) -> dict[str, Any]:
    """Return what is told of a configuration. `pace`: of its runtime (see FORMULAS); `price_per_hour`: of what runs it,
    0 where not known."""
    rate, goodput = measured.tokens_per_s, predicted.whole.goodput_tokens_per_s
    parts, real = predicted.components, measured.components
    return {
        "configuration": one.name,
        "runtime": one.runtime,
        "depth": one.depth,
        "concurrency": one.load.concurrency,
        "prompt": "long" if one.load.long else "short",
        "predicted_tokens_per_s": goodput / pace,
        "predicted_as_profiled_tokens_per_s": goodput,
        "measured_tokens_per_s": rate,
        "price_per_hour": price_per_hour or None,
        "predicted_cost_per_million_tokens": _cost(price_per_hour, goodput / pace),
        "measured_cost_per_million_tokens": _cost(price_per_hour, rate),
        "error": (goodput / pace - rate) / rate,
        "error_as_profiled": (goodput - rate) / rate,
        "components": {name: {"predicted": parts[name], "measured": real[name]} for name in parts},
        "measured_seconds": measured.seconds,
        "measured_tokens": measured.tokens,
        "measured_rounds": len(measured.rounds),
    }


def _cost(price_per_hour: float, tokens_per_s: float) -> float | None:
    return compute_cost_per_million(price_per_hour, tokens_per_s) if price_per_hour else None


def summarise_plan_comparison(result: dict[str, Any], profile_seconds: float) -> dict[str, Any]:
    """Return the summary; a figure that nothing was measured for is None."""
    errors = [abs(row["error"]) for row in result["configurations"]]
    raw = [abs(row["error_as_profiled"]) for row in result["configurations"]]
    shares = [row["chosen_vs_best"] for row in result["workloads"]]
    known = [share for share in shares if share is not None]
    return {
        "configurations": len(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "median_error_as_profiled": statistics.median(raw),
        "worst_error_as_profiled": max(raw),
        "chosen_vs_best": min(known) if known else None,
        "profile_seconds": profile_seconds,
    }

"""The figures of `outrider bench plan`, and how each of them comes about."""

from __future__ import annotations

import statistics
from typing import Any

from orchestrator.cli.plan_bench.runs import Configuration, Measured
from policies.plan import Prediction

FORMULAS = {
    "tokens_per_s": "tokens of all sequences / seconds, while as many requests run as the configuration says; "
    "predicted: C E(k) / (round + C E(k) / output tokens x prefill of a prompt), from stored profiles by "
    "policies/pairing.py",
    "error": "(predicted - measured) / measured tokens/s",
    "median_error": "median of |error| over all configurations",
    "worst_error": "largest |error| of all configurations",
    "chosen_vs_best": "measured tokens/s of what the plan chooses for a load / of the best that was run; worst load",
    "profile_seconds": "seconds that measuring the target on all runtimes took, loading included",
    "plan_1k_seconds": "slowest plan for 1,000 devices in 20 zones, the target in 8 layer shards",
    "plan_10k_seconds": "the same for 10,000 devices",
    "gap_to_exact": "largest (exact - plan) / exact of predicted tokens/s on small clusters; exact: a mixed-integer "
    "program",
}
BARS = {
    "configurations": ">= 12",
    "median_error": "<= 10 %",
    "worst_error": "<= 25 %",
    "chosen_vs_best": ">= 95 %",
    "profile_seconds": "<= 60 s",
    "plan_1k_seconds": "< 1 s",
    "plan_10k_seconds": "< 10 s",
    "gap_to_exact": "<= 3 %",
}


def row_of(one: Configuration, predicted: Prediction, measured: Measured) -> dict[str, Any]:
    """Return what is told of a configuration."""
    rate = measured.tokens_per_s
    return {
        "configuration": one.name,
        "runtime": one.runtime,
        "depth": one.depth,
        "concurrency": one.load.concurrency,
        "prompt": "long" if one.load.long else "short",
        "predicted_tokens_per_s": predicted.goodput_tokens_per_s,
        "measured_tokens_per_s": rate,
        "error": (predicted.goodput_tokens_per_s - rate) / rate,
        "predicted_tokens_per_round": predicted.tokens_per_round,
        "measured_tokens_per_round": measured.tokens / max(1, measured.turns),
        "predicted_round_ms": predicted.round_ms,
        "predicted_prefill_ms": predicted.prefill_ms,
        "measured_round_ms": 1000.0 * measured.seconds / max(1, measured.rounds),
        "measured_drafts_per_round": measured.drafted / max(1, measured.turns),
        "measured_seconds": measured.seconds,
        "measured_tokens": measured.tokens,
    }


def summarise(result: dict[str, Any], profile_seconds: float) -> dict[str, Any]:
    """Return the summary; a figure that nothing was measured for is None."""
    errors = [abs(row["error"]) for row in result["configurations"]]
    planning, shares = result["planning"], [row["chosen_vs_best"] for row in result["workloads"]]
    known = [share for share in shares if share is not None]
    return {
        "configurations": len(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "chosen_vs_best": min(known) if known else None,
        "profile_seconds": profile_seconds,
        "plan_1k_seconds": planning["summary"]["plan_1k_seconds"] if planning["speed"] else None,
        "plan_10k_seconds": planning["summary"]["plan_10k_seconds"] if planning["speed"] else None,
        "gap_to_exact": planning["summary"]["gap_to_exact"] if planning["gaps"] else None,
    }

"""Recorded series for each alert: made so that it fires and clears, and that it stays silent below its floor."""

from __future__ import annotations

from typing import NamedTuple

STEP_S = 15
Values = list[float | None]
"""Of one series, 15 s apart; None: it is not there."""


class Recorded(NamedTuple):
    """What an alert is judged by. It fires at `fires_s` and does not at `before_s` and `clears_s`. `below`: the same
    beneath its traffic floor; None: it has none."""

    series: dict[str, Values]
    before_s: int
    fires_s: int
    clears_s: int
    labels: dict[str, str]
    below: dict[str, Values] | None = None


def hold(value: float, minutes: float) -> Values:
    """A gauge that stays."""
    return [value] * int(minutes * 60 / STEP_S)


def leave_out(minutes: float) -> Values:
    """No series."""
    return [None] * int(minutes * 60 / STEP_S)


def grow(*parts: tuple[float, float], first: float = 0.0) -> Values:
    """A counter that grows so much a step, for so many minutes, part after part."""
    values: Values = [first]
    last = first
    for a_step, minutes in parts:
        for _ in range(int(minutes * 60 / STEP_S)):
            last += a_step
            values.append(last)
    return values


def name(metric: str, **more: str) -> str:
    """A series as promtool's tests write it."""
    labels = {"model_name": "toy", "engine": "0", **more}
    told = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return f"outrider_{metric}{{{told}}}"


def _acceptance(a_step: float) -> dict[str, Values]:
    """A drafter accepts 0.9 for 20 minutes, then 0.3 for 20, then 0.9 again."""
    of = {"drafter": "model"}
    return {
        name("drafter_draft_tokens_total", **of): grow((a_step, 80)),
        name("drafter_accepted_tokens_total", **of): grow((0.9 * a_step, 20), (0.3 * a_step, 20), (0.9 * a_step, 40)),
        name("drafter_usual_acceptance_rate", **of): hold(0.9, 80),
    }


def _ratio(over: str, under: str, worse: float, a_step: float, **of: str) -> dict[str, Values]:
    return {
        name(over, **of): grow((0.5 * a_step, 20), (worse * a_step, 20), (0.5 * a_step, 40)),
        name(under, **of): grow((a_step, 80)),
    }


def _event(metric: str, **of: str) -> dict[str, Values]:
    """A counter that grows once, after 20 minutes."""
    return {name(metric, **of): grow((0, 20), (1, 0.25), (0, 40))}


def _slo(a_step: float) -> dict[str, Values]:
    of = {"objective": "ttft"}
    return {
        name("slo_requests_judged_total", **of): grow((a_step, 120)),
        name("slo_requests_missed_total", **of): grow((0, 40), (0.5 * a_step, 40), (0, 40)),
        name("slo_error_budget", **of): hold(0.05, 120),
    }


def _drift(a_step: float) -> dict[str, Values]:
    return {
        name("plan_misprediction_factor"): hold(1.1, 10) + hold(1.6, 30) + hold(1.1, 30),
        name("generation_tokens_total"): grow((a_step, 70)),
    }


_MIN = 60
RECORDED = {
    "OutriderAbsent": Recorded(
        {name("num_requests_running"): hold(0, 10) + leave_out(20) + hold(0, 10)}, 9 * _MIN, 20 * _MIN, 32 * _MIN, {}
    ),
    "OutriderAcceptanceFell": Recorded(
        _acceptance(150), 22 * _MIN, 35 * _MIN, 50 * _MIN, {"model_name": "toy", "drafter": "model"}, _acceptance(1)
    ),
    "OutriderAcceptanceLow": Recorded(
        _acceptance(150), 22 * _MIN, 38 * _MIN, 50 * _MIN, {"model_name": "toy", "drafter": "model"}, _acceptance(1)
    ),
    "OutriderSpeculationSlower": Recorded(
        _ratio("speculation_seconds_total", "speculation_plain_seconds_total", 2.0, 10),
        22 * _MIN,
        38 * _MIN,
        50 * _MIN,
        {"model_name": "toy"},
        _ratio("speculation_seconds_total", "speculation_plain_seconds_total", 2.0, 0.1),
    ),
    "OutriderDraftingCostsMore": Recorded(
        _ratio("drafter_seconds_total", "drafter_saved_seconds_total", 2.0, 10, drafter="model"),
        22 * _MIN,
        38 * _MIN,
        50 * _MIN,
        {"model_name": "toy", "drafter": "model"},
        _ratio("drafter_seconds_total", "drafter_saved_seconds_total", 2.0, 0.1, drafter="model"),
    ),
    "OutriderClassChanged": Recorded(
        _event("class_changes_total"), 19 * _MIN, 25 * _MIN, 35 * _MIN, {"model_name": "toy"}
    ),
    "OutriderNotAsConfigured": Recorded(
        {
            name("effective_state_differs", what="drafter"): hold(0, 10) + hold(1, 20) + hold(0, 20),
            name("effective_state_differs", what="override"): hold(0, 50),
        },
        12 * _MIN,
        20 * _MIN,
        32 * _MIN,
        {"model_name": "toy", "what": "drafter"},
    ),
    "OutriderReplicaFailed": Recorded(
        {
            name("replicas_failed", reason="restarts"): hold(0, 10) + hold(1, 20) + hold(0, 20),
            name("replicas_failed", reason="slow"): hold(0, 50),
        },
        9 * _MIN,
        12 * _MIN,
        32 * _MIN,
        {"model_name": "toy", "reason": "restarts"},
    ),
    "OutriderFailover": Recorded(
        _event("worker_losses_total", kind="killed"),
        19 * _MIN,
        25 * _MIN,
        35 * _MIN,
        {"model_name": "toy", "kind": "killed"},
    ),
    "OutriderWorkerHung": Recorded(
        _event("worker_losses_total", kind="hung") | {name("worker_losses_total", kind="killed"): grow((0, 60))},
        19 * _MIN,
        25 * _MIN,
        35 * _MIN,
        {"model_name": "toy"},
        _event("worker_losses_total", kind="killed"),
    ),
    "OutriderSloBurn": Recorded(
        _slo(15), 41 * _MIN, 70 * _MIN, 90 * _MIN, {"model_name": "toy", "objective": "ttft"}, _slo(0.15)
    ),
    "OutriderDeviceFault": Recorded(
        {name("device_fault", device="CUDA:0", what="lost"): hold(0, 10) + hold(1, 10) + hold(0, 10)},
        9 * _MIN,
        15 * _MIN,
        22 * _MIN,
        {"model_name": "toy", "device": "CUDA:0", "what": "lost"},
        {name("device_fault", device="CUDA:0", what="lost"): hold(0, 30)},
    ),
    "OutriderDeviceSlow": Recorded(
        {name("device_slowed", device="CUDA:0"): hold(0, 10) + hold(1, 10) + hold(0, 10)},
        9 * _MIN,
        17 * _MIN,
        22 * _MIN,
        {"model_name": "toy", "device": "CUDA:0"},
        {name("device_slowed", device="CUDA:0"): hold(0, 10) + hold(1, 4) + hold(0, 10)},
    ),
    "OutriderKvPressure": Recorded(
        {
            name("kv_cache_usage_perc"): hold(0.99, 50),
            name("num_requests_waiting"): hold(0, 10) + hold(3, 10) + hold(0, 30),
        },
        9 * _MIN,
        15 * _MIN,
        22 * _MIN,
        {"model_name": "toy", "engine": "0"},
        {
            name("kv_cache_usage_perc"): hold(0.5, 50),
            name("num_requests_waiting"): hold(0, 10) + hold(3, 10) + hold(0, 30),
        },
    ),
    "OutriderPredictionsDrift": Recorded(
        _drift(300), 15 * _MIN, 30 * _MIN, 45 * _MIN, {"model_name": "toy"}, _drift(3)
    ),
    "OutriderQuarantine": Recorded(
        {name("quarantined_requests"): hold(0, 10) + hold(1, 10) + hold(0, 10)},
        9 * _MIN,
        15 * _MIN,
        25 * _MIN,
        {"model_name": "toy"},
    ),
    "OutriderJournalShort": Recorded(
        {name("journal_problems", kind="left_out"): hold(0, 10) + hold(1, 10) + hold(0, 10)},
        9 * _MIN,
        15 * _MIN,
        25 * _MIN,
        {"model_name": "toy", "kind": "left_out"},
    ),
}

"""What a standby is worth where a target's worker is killed now and then: none, a warm one, a hot one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.daemon.control.streams.admission import ControlLimits
from outrider_lab.simulation.faults import Fault, FaultSchedule
from outrider_lab.simulation.fleet import Fleet
from outrider_lab.simulation.questions.answer import Answer, Plot, read_points
from outrider_lab.simulation.questions.asked import Asked, make, place, read_row
from policies.serving.failover.standby import FailoverRules, Readiness

_EVERY_S, _KILLS, _LOAD_S = 90.0, 5, 10.0
_WAYS = {"none": None, "warm": Readiness.WARM, "hot": Readiness.HOT}
_RATE = 1.0


def answer(asked: Asked) -> Answer:
    """Return the pause behind a loss, and what clients saw, by the standby that there is."""
    kind = asked.target
    load_s = max(_LOAD_S, kind.load_s)
    kind = replace(kind, load_s=load_s)
    kills = max(1, round(_KILLS * asked.share))
    schedule = FaultSchedule(
        faults=tuple(
            Fault(at_s=_EVERY_S * (number + 0.5), kind="kill_worker", name="target-1") for number in range(kills)
        )
    )
    requests = make(asked, _RATE, _EVERY_S * kills, seed=3)
    limits = ControlLimits(asked.limits.max_running, 1 << 20, 1 << 20, failover=FailoverRules())
    rows: list[dict[str, Any]] = []
    for name, readiness in _WAYS.items():
        asked.told(f"standby: {name}")
        fleet = place(kind, 1)
        if readiness is not None:
            fleet = _with_standby(fleet, readiness)
        result = asked.play(fleet, requests, faults=schedule, limits=limits)
        summary = result["summary"]
        pause = summary["pause_ms"] or {"mean": None, "p99": None}
        told = {"pause_ms": pause["mean"], "pause_p99_ms": pause["p99"], "completed": summary["completed"]}
        # A hot standby holds its device all the time; a warm one has to have one that is free.
        rows.append(
            {
                "standby": name,
                "load_s": load_s,
                **told,
                **read_row(result),
                "refused": summary["failed"],
                "held_devices": 2 if name == "hot" else 1,
            }
        )
    points = [{"x": float(number), "y": row["pause_ms"]} for number, row in enumerate(rows)]
    plot = Plot(
        "standby",
        "standby: 0 none, 1 warm, 2 hot",
        "mean pause behind a loss, ms",
        {"pause": read_points(points, "x", "y")},
    )
    return Answer("standby", "Hot or warm standby?", _COLUMNS, rows, [plot], asked.assume())


def _with_standby(fleet: Fleet, readiness: Readiness) -> Fleet:
    spare = replace(fleet.replicas[0], name="standby-1", host="host-spare", standby=readiness)
    return replace(fleet, replicas=(*fleet.replicas, spare), devices=fleet.devices + 1)


_COLUMNS = {
    "standby": "{}",
    "load_s": "{:.1f}",
    "pause_ms": "{:,.0f}",
    "pause_p99_ms": "{:,.0f}",
    "ttft_ms": "{:,.0f}",
    "tpot_ms": "{:.2f}",
    "completed": "{:,}",
    "refused": "{:,}",
    "held_devices": "{:,}",
}

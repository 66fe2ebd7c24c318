"""The load of the target's replicas, for whoever decides on their number. Only reads control's state."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.daemon.control.replicas.replicas import Replica
from orchestrator.daemon.control.state import FAILED
from orchestrator.daemon.control.step import State
from orchestrator.protocol.contract import WorkerSpec
from policies.serving.failover.health import Health
from policies.serving.scaling import ScaledReplica, ScaleLoad
from policies.serving.slo import SloAction

_WANTS_MORE = frozenset({SloAction.ADMISSION_GIVES_WAY, SloAction.NOTHING_HELPS})
"""An objective is missed, and fewer requests at a time, or more machines, are what helps."""


@dataclass(frozen=True, slots=True)
class SeenReplicas:
    """The replicas that get requests, standbys left out. `specs`: by the replica's name, what it was started from."""

    load: ScaleLoad
    specs: dict[str, WorkerSpec]


def measure_load(state: State, now_s: float) -> SeenReplicas:
    replicas = state.replicas.primary
    seen = tuple(_measure_replica(state, replica, now_s) for replica in replicas)
    held = len(state.streams) - sum(replica.streams for replica in seen)
    late = next((reason for replica in replicas if (reason := _find_late(replica, held))), "")
    return SeenReplicas(ScaleLoad(seen, held, late), {replica.name: replica.spec for replica in replicas})


def _measure_replica(state: State, replica: Replica, now_s: float) -> ScaledReplica:
    judged = state.health.judge(replica.parts, now_s, replica.name)
    broken = judged.state in (Health.OPEN, Health.HALF_OPEN)
    gone = replica.state.phase == FAILED or (not replica.serving and (broken or replica.state.spent))
    places = 0 if judged.refuses else replica.places
    return ScaledReplica(replica.name, replica.serving, gone, state.streams.counts[replica.name], places)


def _find_late(replica: Replica, held: int) -> str:
    gauges = replica.state.gauges
    if gauges is None or gauges.slo is None:
        return ""
    levers = set(gauges.slo.levers)
    waits = bool(gauges.waiting or held) and levers != {SloAction.NOTHING}
    return f"an objective is at risk: {gauges.slo.why}" if waits or levers & _WANTS_MORE else ""

"""What load asks of a plan: how many replicas, for how many requests at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import Placement
from orchestrator.planning.wanted import PlanRequest


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """There are to be `least` replicas, and at most `most`, for so many `requests` at once."""

    least: int
    most: int
    requests: int


def ask_for_replicas(request: PlanRequest, demand: ReplicaDemand) -> PlanRequest:
    """Return what is asked of a plan where load wants this. It is never planned for fewer requests than configured."""
    concurrency = max(request.placement.concurrency, demand.requests)
    placement = request.placement.model_copy(update={"concurrency": concurrency})
    return replace(request, replicas=demand.most, least_replicas=demand.least, placement=placement)


def start_replicas(config: ClusterConfig, count: int) -> ClusterConfig:
    """Return the configuration that starts so many replicas, where load decides how many there are."""
    bounds = config.model.bounds
    if bounds is None:
        return config
    placed = config.model.place((bounds.places or [Placement()] * count)[:count])
    return config.model_copy(update={"model": config.model.model_copy(update={"replicas": placed})})

"""The target's standbys, as cluster.yaml describes them or as the plan names one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.config.failover import StandbyTarget
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.fitting.worker_options import engine_options, worker_specs
from policies.serving.failover.standby import Readiness

_PREPARING_ENTRY = "orchestrator.worker.loading.preparing:build_preparing"


def build_standbys(
    config: ClusterConfig, base: Path, wanted: Sequence[StandbyTarget] | None = None
) -> list[StandbySpec]:
    """Return how standbys are started: those `wanted`, or of `failover.standby`. Raises what resolving models does."""
    standbys = config.failover.standby if wanted is None else wanted
    return [_build_standby(config, base, standby, number) for number, standby in enumerate(standbys)]


def _build_standby(config: ClusterConfig, base: Path, standby: StandbyTarget, number: int) -> StandbySpec:
    placed = config.model_copy(update={"model": config.model.model_copy(update={"replicas": [standby]})})
    [target] = worker_specs(engine_options(placed, base), placed)
    spec = msgspec.structs.replace(target, name="standby" if number == 0 else f"standby-{number}")
    prepares = msgspec.structs.replace(spec, name=f"prepare {spec.name}", entry=_PREPARING_ENTRY, device="")
    readiness = Readiness(standby.readiness)
    return StandbySpec(spec, readiness, prepares if readiness is Readiness.WARM else None)

"""The target's standbys, as cluster.yaml describes them or as the plan names one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.config.failover import FailoverSection, StandbyTarget
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import Placement
from orchestrator.control.events import StandbySpec
from orchestrator.loading.options import engine_options, worker_specs
from orchestrator.loading.preparing import preparing_spec
from orchestrator.workers.contract import WorkerSpec
from policies.serving.failover.standby import FailoverRules, Readiness


def failover_rules(section: FailoverSection) -> FailoverRules:
    """Return when standbys take over."""
    return FailoverRules(section.after_s, section.back_after_s, section.other_bits)


def build_standbys(
    config: ClusterConfig, base: Path, wanted: Sequence[StandbyTarget] | None = None
) -> list[StandbySpec]:
    """Return how standbys are started: those of `failover.standby`, where no others are `wanted`. Raises what resolving
    the models raises."""
    standbys = config.failover.standby if wanted is None else wanted
    return [_build_standby(config, base, one, number) for number, one in enumerate(standbys)]


def _build_standby(config: ClusterConfig, base: Path, one: StandbyTarget, number: int) -> StandbySpec:
    placement = Placement(host=one.host, cores=one.cores, threads=one.threads)
    own = {name: getattr(one, name) for name in ("adapter", "device", "weights", "activations", "kv_cache_precision")}
    model = {name: value for name, value in own.items() if value is not None} | {"replicas": [placement]}
    bounds = {name: getattr(one, name) for name in ("kv_cache", "max_running", "max_batch_rows")}
    limits = {name: value for name, value in bounds.items() if value is not None}
    placed = config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "limits": config.limits.model_copy(update=limits),
        }
    )
    [spec] = worker_specs(engine_options(placed, base), placed)
    spec = _name(spec, "standby" if number == 0 else f"standby-{number}")
    readiness = Readiness(one.readiness)
    return StandbySpec(spec, readiness, preparing_spec(spec) if readiness is Readiness.WARM else None)


def _name(spec: WorkerSpec, name: str) -> WorkerSpec:
    return msgspec.structs.replace(spec, name=name)

"""Who changes the number of replicas for a configuration, and where they may run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from adapters.hardware import cores
from orchestrator.clock import Clock
from orchestrator.config.drafts import Draft, ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.target import ReplicaBounds
from orchestrator.daemon.bootstrap.failover import build_standbys
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.replicas.scale_load import SeenReplicas
from orchestrator.daemon.control.replicas.scaler import PlacedReplicas, PlannedReplicas, ReplicaRunner, ReplicaScaler
from orchestrator.errors import WorkerError
from orchestrator.planning.wanted import start_replicas
from orchestrator.protocol.contract import Cluster, WorkerSpec
from policies.serving.scaling import ScaleBounds


def waits_for_hosts(config: ClusterConfig) -> bool:
    """Return whether the first replicas are started where the hosts of a Ray cluster are, which no plan chooses."""
    bounds = config.model.bounds
    return bounds is not None and bool(config.cluster.address) and not config.planned and not bounds.places


async def build_scaler(
    config: ClusterConfig,
    base: Path,
    control: TargetControl,
    cluster: Cluster,
    keeper: PlanKeeper | None,
    clock: Clock,
    others: Sequence[ClusterConfig],
) -> ReplicaScaler | None:
    """Return who follows load, None where nobody does. `others` are the other targets of the file. Where hosts are
    waited for, it says what starts on them. Raises WorkerError where there is no such cluster."""
    bounds = config.model.bounds
    if bounds is None:
        return None
    limits = ScaleBounds(bounds.min, bounds.max, bounds.idle_s)
    runner: ReplicaRunner
    if keeper is not None:
        runner = PlannedReplicas(keeper, limits)
    else:
        targets, drafts = build_start_specs(start_replicas(config, bounds.max), base)
        if waits_for_hosts(config):
            runner = HostReplicas(control, cluster, targets[0], drafts)
            control.set_specs(*await runner.list_first(bounds.min), build_standbys(config, base))
        else:
            count = len(targets) if bounds.places else count_room(config, others)
            why_none = _explain_room(config, bounds, count, alone=not others)
            runner = PlacedReplicas(control, targets[:count], drafts, why_none)
    scaler = ReplicaScaler(limits, control.measure_replicas, runner, clock)
    control.views.scale_view = scaler.view
    return scaler


def count_room(config: ClusterConfig, others: Sequence[ClusterConfig] = (), host_cores: int = 0) -> int:
    """Return how many replicas have cores of their own with their draft workers, on this machine of so many physical
    cores (0: as many as it has). The other targets of the file keep those of their least replicas."""
    shared, each = _count_threads(config, config.drafts)
    left = (host_cores or cores()) - shared - sum(map(_count_kept, others))
    return max(1, left // max(1, each))


def _count_threads(config: ClusterConfig, drafts: Sequence[Draft]) -> tuple[int, int]:
    """Return the threads that all replicas with these drafts share, and those of each with its own draft workers."""
    threads = config.devices.threads
    shared, each = 0, threads
    for draft in drafts:
        if isinstance(draft, ModelDraft) and draft.process == "own":
            mine = draft.threads or len(draft.cores) or threads
            if draft.workers.min:
                shared += draft.workers.min * mine
            else:
                each += mine
    return shared, each


def _count_kept(config: ClusterConfig) -> int:
    bounds = config.model.bounds
    shared, each = _count_threads(config, config.drafts)
    if bounds is not None:
        return shared + each * bounds.min
    replicas = [placement for placement in config.model.placements if not placement.is_endpoint]
    here = [placement.own_drafts for placement in replicas if placement.host in ("", THIS_NODE)]
    return shared + sum(each if own is None else sum(_count_threads(config, own)) for own in here)


def _explain_room(config: ClusterConfig, bounds: ReplicaBounds, count: int, *, alone: bool) -> str:
    if bounds.places:
        return f"all {count} of model.replicas.places are taken"
    left = "" if alone else " that the other models leave"
    return (
        f"{count} with {config.devices.threads} threads each, and their draft workers, take the {cores()} cores{left}"
    )


class HostReplicas(PlacedReplicas):
    """Implements ReplicaRunner over the hosts of a Ray cluster, where no plan chooses among them: one on each, started
    from `target`."""

    def __init__(
        self, control: TargetControl, cluster: Cluster, target: WorkerSpec, drafts: Sequence[WorkerSpec]
    ) -> None:
        super().__init__(control, (), drafts, "there is a replica on each host")
        self._cluster = cluster
        self._target = target
        self._start_drafts = drafts

    async def list_first(self, least: int) -> tuple[list[WorkerSpec], list[Sequence[WorkerSpec]]]:
        """Open the cluster, and return the targets and draft workers that start on its hosts. Raises WorkerError."""
        await self._cluster.open()
        first = (await self._list_places())[:least]
        return first, [self._start_drafts] * len(first)

    async def find_room(self, seen: SeenReplicas) -> tuple[int, str]:
        """See ReplicaRunner. While nobody tells the hosts, there are those of before."""
        with suppress(WorkerError):
            self.set_places(await self._list_places())
        return await super().find_room(seen)

    async def _list_places(self) -> list[WorkerSpec]:
        nodes = await self._cluster.nodes()
        own = self._cluster.own_node
        names = [THIS_NODE] * (own in nodes) + sorted(node for node in nodes if node != own)
        return [
            msgspec.structs.replace(self._target, name=f"target-{number}", node=name)
            for number, name in enumerate(names)
        ]

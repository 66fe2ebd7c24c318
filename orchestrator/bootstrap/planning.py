"""Makes the daemon's plan: measures what has no profile yet, plans, and says what to start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from device_profiles.store import ProfileStore
from orchestrator.bootstrap.clusters import measuring_cluster
from orchestrator.bootstrap.options import draft_specs, engine_options, worker_specs
from orchestrator.bootstrap.profile_work import MEASURING_LOCK, Work, planned_work, profile_store
from orchestrator.cluster.port import Cluster, WorkerSpec
from orchestrator.config.model import AUTO, ClusterConfig
from orchestrator.errors import WorkerError
from orchestrator.measuring.run import Watch, measure
from orchestrator.planning.applied import allowed, applied, whole_targets
from orchestrator.planning.correction import Corrections, corrected
from orchestrator.planning.proposal import PlanError, Proposal, asked_by_config, proposal, propose_here

OnProgress = Callable[[str, float], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and how its workers are started."""

    proposal: Proposal
    targets: tuple[WorkerSpec, ...]
    drafts: tuple[WorkerSpec, ...]


def started(config: ClusterConfig, base: Path) -> tuple[list[WorkerSpec], list[WorkerSpec]]:
    """Return how the target's and the drafts' workers are started where nothing is left to a plan."""
    options = engine_options(config, base)
    return worker_specs(options, config), draft_specs(options, config)


async def profiled(config: ClusterConfig, base: Path, progress: OnProgress) -> None:
    """Measure what the plan may choose and has no profile. What cannot be measured is logged, and left out of the plan.

    Raises WorkerError where no worker can be started at all, PlanError where somebody else is measuring, and what
    resolving the models raises.
    """
    if config.placement.profile == "never":
        return
    store = profile_store(config)
    todo = [one for one in planned_work(config, base) if _asked_for(one, config) and not one.done(store)]
    if not todo:
        return
    store.directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(store.directory / MEASURING_LOCK, timeout=0):
            await _measure(todo, store, measuring_cluster(config), progress)
    except Timeout:
        raise PlanError(
            f"somebody is measuring with {store.directory} already; start again when that is done"
        ) from None


async def _measure(todo: Sequence[Work], store: ProfileStore, cluster: Cluster, progress: OnProgress) -> None:
    await cluster.open()
    try:
        for number, one in enumerate(todo, 1):
            progress(f"profile {one.title} ({number} of {len(todo)})", -1.0)
            try:
                spec = one.spec(store, refresh=False)
                await measure(cluster, spec, Watch(lambda stage, fraction: None, store.save))
            except WorkerError as error:
                _log.warning("%s cannot be measured and is not planned with: %s", one.title, error)
    finally:
        await cluster.close()


def planned(config: ClusterConfig, base: Path) -> Planned:
    """Return the plan for this machine by the stored profiles.

    Raises PlanError, and what resolving the models raises.
    """
    asked = whole_targets(asked_by_config(config, base))
    free = {"CPU": int(psutil.virtual_memory().available)}
    return _planned(config, base, propose_here(asked, profile_store(config), free, allowed(config, asked)))


def planned_again(config: ClusterConfig, base: Path, before: Proposal, corrections: Corrections) -> Planned:
    """Return the plan with costs as they turned out to be. Raises PlanError."""
    cluster = corrected(before.cluster, corrections)
    return _planned(config, base, proposal(cluster, before.asked, before.behind, before.pairs))


def _planned(config: ClusterConfig, base: Path, found: Proposal) -> Planned:
    """Return how each replica's workers are started. Drafts in workers of their own are those of the first: each is
    started as often as there are targets."""
    targets = []
    for number in range(len(found.plan.replicas)):
        specs, _ = started(applied(config, found, number), base)
        targets.append(specs[number])
    _, drafts = started(applied(config, found), base)
    return Planned(found, tuple(targets), tuple(drafts))


def _asked_for(work: Work, config: ClusterConfig) -> bool:
    model = work.job.model
    if work.job.role != "target":
        return True
    adapter, device = config.model.adapter, config.model.device
    simulated = model.adapter == "simulated" and device == "CPU"
    return adapter in (AUTO, model.adapter) and (device in (AUTO, model.device) or simulated)

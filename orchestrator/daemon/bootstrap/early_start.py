"""What a daemon does before most of it is imported: it takes its state directory, and starts its first worker.

Importing the rest takes longer than all that a worker's orders follow from, so it goes on while the worker loads.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.contract import AdapterError
from adapters.hf_hub import HUB_PREFIX
from orchestrator.clock import SystemClock
from orchestrator.config.load import state_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.bootstrap.clusters import build_cluster
from orchestrator.daemon.bootstrap.lease import hold_lease
from orchestrator.daemon.bootstrap.model_sources import bind_sources
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.daemon.journal.book import AnswerBook
from orchestrator.errors import OutriderError
from orchestrator.protocol.contract import AheadCluster, Cluster, WorkerSpec

if TYPE_CHECKING:  # to plan takes half of what the daemon imports
    from orchestrator.daemon.control.loops.planner_port import StartPlan


@dataclass(frozen=True, slots=True)
class EarlyStart:
    """The daemon's own directory, its journal, and the cluster that its workers are started by. `plan`: by which the
    first worker was started, where one was made for that."""

    state: Path
    book: AnswerBook
    cluster: Cluster
    plan: StartPlan | None = None


@asynccontextmanager
async def start_early(config: ClusterConfig, path: Path) -> AsyncIterator[EarlyStart]:
    """Hold the state directory of the daemon that cluster.yaml at `path` describes, with its first worker begun where
    that can be known; all of them have ended afterwards. SIGTERM cancels whoever entered.

    Raises DaemonError where another daemon has the directory, or there can be no such directory.
    """
    state = state_directory(config, path)
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with hold_lease(state):
        book = AnswerBook(config.journal, SystemClock(), state / "journal" if config.journal.enabled else None)
        book.reserve()  # before models are prepared, which may fill the disk
        cluster, plan = build_cluster(config, state), None
        try:
            if isinstance(cluster, AheadCluster):
                with suppress(OutriderError, AdapterError):  # whoever starts it again says what is wrong
                    first, plan = _find_first_spec(config, path, state)
                    if first is not None:
                        await cluster.start_ahead(first)
            yield EarlyStart(state, book, cluster, plan)
        finally:
            await cluster.close()


def _find_first_spec(config: ClusterConfig, path: Path, state: Path) -> tuple[WorkerSpec | None, StartPlan | None]:
    """Return how the first worker is started, and the plan that says so where one does; None where it is several
    processes, where a hub says what its model is, or where more is to be known before. Raises what resolving the models
    raises."""
    nothing = None, None
    if any(source.startswith(HUB_PREFIX) for source in config.targets[0].model_sources):
        return nothing
    base, first = path.resolve().parent, config.targets[0]
    if first.model.keep == "on_demand":
        return nothing
    first = first.with_sources(bind_sources(first))
    if not any(target.planned for target in config.targets):
        targets, _ = build_start_specs(first, base)
        return (None if targets[0].parts else targets[0]), None
    if len(config.targets) > 1 or first.plans_hosts:
        return nothing
    from orchestrator.daemon.bootstrap.planning import plan_at_once

    plan = plan_at_once(first, base, state)
    return nothing if plan is None or plan.targets[0].parts else (plan.targets[0], plan)

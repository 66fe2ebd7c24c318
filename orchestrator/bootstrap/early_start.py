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

from adapters.contract import AdapterError
from adapters.hf_hub import HUB_PREFIX
from orchestrator.bootstrap.clusters import build_cluster
from orchestrator.bootstrap.journal import build_book
from orchestrator.bootstrap.lease import hold_lease
from orchestrator.bootstrap.model_sources import bind_sources
from orchestrator.bootstrap.start_specs import build_start_specs
from orchestrator.clock import SystemClock
from orchestrator.config.load import state_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import OutriderError
from orchestrator.journal.book import AnswerBook
from orchestrator.workers.contract import AheadCluster, Cluster, WorkerSpec


@dataclass(frozen=True, slots=True)
class EarlyStart:
    """The daemon's own directory, its journal, and the cluster that its workers are started by."""

    state: Path
    book: AnswerBook
    cluster: Cluster


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
        book = build_book(config, state, SystemClock())
        book.reserve()  # before models are prepared, which may fill the disk
        cluster = build_cluster(config, state)
        try:
            if isinstance(cluster, AheadCluster) and not any(one.planned for one in config.targets):
                with suppress(OutriderError, AdapterError):  # whoever starts it again says what is wrong
                    if (first := _find_first_spec(config.targets[0], path)) is not None:
                        await cluster.start_ahead(first)
            yield EarlyStart(state, book, cluster)
        finally:
            await cluster.close()


def _find_first_spec(config: ClusterConfig, path: Path) -> WorkerSpec | None:
    """Return how the first worker is started; None where it is several processes, or a hub says what its model is.
    Raises what resolving the models raises."""
    if any(source.startswith(HUB_PREFIX) for source in config.model_sources):
        return None
    targets, _ = build_start_specs(config.with_sources(bind_sources(config)), path.resolve().parent)
    return None if targets[0].parts else targets[0]

"""Measures what a plan would rest on before its target serves: told beforehand, bounded, and with progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from device_profiles.device_load import PROCESSOR, DeviceLoad
from device_profiles.store import ProfileStore
from orchestrator.bootstrap.clusters import measuring_cluster
from orchestrator.clock import Clock
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import THIS_NODE
from orchestrator.errors import WorkerError
from orchestrator.planning.proposal import PlanError
from orchestrator.profiling.duration import measure_pace, predict_duration_s
from orchestrator.profiling.progress import MeasuringProgress, OnProgress
from orchestrator.profiling.run import Watch, measure_on_cluster
from orchestrator.profiling.work import MEASURING_LOCK, Work, is_requested, list_work, profile_store
from orchestrator.workers.contract import Cluster

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartWatch:
    """Who hears of a start's measuring, and what it goes by. `awaited` is set once a request waits for the target;
    `loads`: what other programs take of the devices."""

    tell: OnProgress
    awaited: asyncio.Event
    loads: Mapping[str, DeviceLoad]
    clock: Clock


def list_wanted(config: ClusterConfig, base: Path) -> list[Work]:
    """Return all that a plan for this configuration may rest on here, as far as it is to be measured. Raises what
    resolving the models raises."""
    if config.placement.profile == "never":
        return []
    return [one for one in list_work(config, base) if is_requested(one, config)]


@contextmanager
def measuring_alone(store: ProfileStore) -> Iterator[None]:
    """Let nobody else measure with this store meanwhile. Raises PlanError."""
    store.directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(store.directory / MEASURING_LOCK, timeout=0):
            yield
    except Timeout:
        raise PlanError(
            f"somebody is measuring with {store.directory} already; start again when that is done"
        ) from None


async def profile_missing(config: ClusterConfig, base: Path, watch: StartWatch) -> None:
    """Measure what the plan may choose and has no profile, for `placement.profile_budget_s` at most. Where a request
    waits, that ends as soon as one target is known. What cannot be measured is logged.

    Raises WorkerError where no worker can be started at all, PlanError where somebody else is measuring, and what
    resolving the models raises.
    """
    store = profile_store(config)
    wanted = list_wanted(config, base)
    todo = [one for one in wanted if not one.is_known(store)]
    if not todo:
        return
    with measuring_alone(store):
        predicted_s = await asyncio.to_thread(_predict, todo, store, find_processor_load(watch.loads))
        run = _StartRun(wanted, store, watch, config.placement.profile_budget_s, predicted_s)
        why = await run.measure(todo, measuring_cluster(config))
    left = [one.title for one in todo if not one.is_known(store)]
    if why and left:
        _log.warning("%s: not measured yet are %s; they are when nobody asks", why, "; ".join(left))


def find_processor_load(loads: Mapping[str, DeviceLoad]) -> DeviceLoad:
    """Return the load of this host's processor, as far as it is known."""
    return loads.get(f"{THIS_NODE}/{PROCESSOR}", DeviceLoad())


def _predict(todo: Sequence[Work], store: ProfileStore, load: DeviceLoad) -> dict[str, float]:
    """Return the seconds that each piece of work is to take, by its title."""
    pace = measure_pace() / max(0.1, 1.0 - (load.others or 0.0))
    texts, found = False, {}
    for one in todo:
        found[one.title] = predict_duration_s(one, store, pace, texts=texts)
        texts = texts or one.job.role == "target"
    return found


class _StartRun:
    """Measures one piece after another, as long as the budget lasts."""

    def __init__(
        self,
        wanted: Sequence[Work],
        store: ProfileStore,
        watch: StartWatch,
        budget_s: float,
        predicted_s: dict[str, float],
    ) -> None:
        self._wanted, self._store, self._watch, self._budget_s = wanted, store, watch, budget_s
        self._progress = MeasuringProgress(predicted_s, watch.tell, watch.clock)

    async def measure(self, todo: Sequence[Work], cluster: Cluster) -> str:
        """Return why not all was measured; "" where nothing kept it from that. Raises WorkerError."""
        self._progress.tell_beforehand(self._budget_s)
        await cluster.open()
        telling = asyncio.create_task(self._progress.keep_telling(), name="tell how far measuring is")
        try:
            for one in todo:
                if why := await self._measure_one(cluster, one):
                    return why
            return ""
        finally:
            telling.cancel()
            await cluster.close()

    async def _measure_one(self, cluster: Cluster, one: Work) -> str:
        """Return why measuring is to end; "" where it goes on."""
        why = self._find_end()
        if why:
            return why
        if doubt := one.describe_doubt(self._store):
            _log.info("%s: the profile is measured again: %s", one.title, doubt)
        self._progress.begin(one.title)
        watch = Watch(self._progress.observe, self._store.save)
        measuring = asyncio.create_task(measure_on_cluster(cluster, one.spec(self._store, refresh=False), watch))
        ends = asyncio.create_task(self._wait_end())
        try:
            await asyncio.wait({measuring, ends}, return_when=asyncio.FIRST_COMPLETED)
            if not measuring.done():
                return self._find_end()
            measuring.result()
        except WorkerError as error:
            _log.warning("%s cannot be measured and is not planned with: %s", one.title, error)
        finally:
            measuring.cancel()
            ends.cancel()
            await asyncio.gather(measuring, ends, return_exceptions=True)
        self._progress.end()
        return ""

    def _find_end(self) -> str:
        if self._progress.elapsed_s >= self._budget_s:
            return f"placement.profile_budget_s ({self._budget_s:g} s) is spent"
        return "a request waits" if self._watch.awaited.is_set() and self._can_serve() else ""

    async def _wait_end(self) -> None:
        left_s = self._budget_s - self._progress.elapsed_s
        if not self._can_serve():
            await asyncio.sleep(left_s)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._watch.awaited.wait(), left_s)

    def _can_serve(self) -> bool:
        """Return whether a target is known, so that requests can be answered."""
        return any(one.job.role == "target" and one.is_known(self._store) for one in self._wanted)

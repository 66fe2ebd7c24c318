"""Measures what a plan would rest on before its target serves: told beforehand, bounded, and with progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from adapters.contract import Progress, Unsupported
from adapters.names import IN_PLACE_ADAPTERS
from device_profiles.store import ProfileStore
from orchestrator.clock import Clock
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import AUTO
from orchestrator.daemon.bootstrap.clusters import measuring_cluster
from orchestrator.errors import WorkerError
from orchestrator.planning.profiling.duration import measure_pace, predict_duration_s
from orchestrator.planning.profiling.progress import MeasuringProgress
from orchestrator.planning.profiling.run import Watch, measure_until
from orchestrator.planning.profiling.work import Work, is_requested, list_work, measuring_alone, profile_store
from orchestrator.protocol.contract import Cluster
from orchestrator.protocol.measuring import Finding

_SURELY_TOO_LONG: Final = 2.0
"""So many times what is left of the budget: predictions are off by less. ADR 0108."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartWatch:
    """Who hears of a start's measuring. `awaited` is set once a request waits for the target."""

    tell: Progress
    awaited: asyncio.Event
    clock: Clock


def list_wanted(config: ClusterConfig, base: Path, runtimes: Sequence[str] = ()) -> list[Work]:
    """Return all that a plan for this configuration may rest on here, as far as it is to be measured; of these
    `runtimes` alone where any are named. Raises Unsupported where one of them is not here, and what resolving the
    models raises."""
    if config.placement.profile == "never":
        return []
    return [work for work in list_work(config, base, runtimes) if is_requested(work, config)]


def list_in_place(config: ClusterConfig, base: Path) -> list[Work]:
    """Return the target on the devices of runtimes that load its file as it is; no other runtime is looked at. Raises
    what resolving the models raises."""
    if config.model.adapter != AUTO:
        return []
    try:
        wanted = list_wanted(config, base, IN_PLACE_ADAPTERS)
    except Unsupported:
        return []
    return [work for work in wanted if work.job.role == "target"]


async def profile_missing(config: ClusterConfig, base: Path, watch: StartWatch, budget_s: float) -> None:
    """Measure what the plan may choose and has no profile, for `budget_s` at most: this target's share of
    `placement.profile_budget_s`. Where a request waits, that ends as soon as one target is known. Where a runtime loads
    the model's file as it is, nothing is measured now: it serves first. What cannot be measured is logged.

    Raises WorkerError where no worker can be started at all, PlanError where somebody else is measuring, and what
    resolving the models raises.
    """
    if await asyncio.to_thread(list_in_place, config, base):
        return
    store = profile_store(config)
    wanted = list_wanted(config, base)
    if all(work.is_known(store) for work in wanted):
        return
    with measuring_alone(store):
        await _StartMeasuring(wanted, store, budget_s, watch).run(measuring_cluster(config))


class _StartMeasuring:
    """Measures one piece of work after another, as long as the budget lasts."""

    def __init__(self, wanted: Sequence[Work], store: ProfileStore, budget_s: float, watch: StartWatch) -> None:
        self._wanted, self._store, self._budget_s, self._watch = wanted, store, budget_s, watch
        self._end_s = watch.clock.monotonic_s() + budget_s
        self._enough = asyncio.Event()  # enough to serve with

    async def run(self, cluster: Cluster) -> None:
        """Measure. Raises WorkerError where no worker can be started at all."""
        todo = self._list_missing()
        predicted_s = await asyncio.to_thread(_predict, todo, self._store) if self._budget_s else {}
        progress = MeasuringProgress(predicted_s, self._budget_s, self._watch.tell, self._watch.clock)
        if predicted_s:
            progress.tell_beforehand()
        if self._can_serve():
            self._enough.set()
        await cluster.open()
        telling = asyncio.create_task(progress.keep_telling(), name="tell how far measuring is")
        try:
            for work in todo:
                if self._find_end() or self._is_too_long(predicted_s[work.title]):
                    continue
                await self._measure(cluster, work, progress)
        finally:
            telling.cancel()
            await cluster.close()
        self._tell_left()

    async def _measure(self, cluster: Cluster, work: Work, progress: MeasuringProgress) -> None:
        if doubt := work.describe_doubt(self._store):
            _log.info("%s: the profile is measured again: %s", work.title, doubt)
        progress.begin(work.title)
        watch = Watch(progress.observe_stage, self._keep)
        try:
            await measure_until(cluster, work.spec(self._store, refresh=False), watch, self._wait_end())
        except WorkerError as error:
            _log.warning("%s cannot be measured and is not planned with: %s", work.title, error)
        progress.end(work.title)

    def _keep(self, finding: Finding) -> None:
        self._store.save(finding)
        if self._can_serve():
            self._enough.set()

    def _list_missing(self) -> list[Work]:
        return [work for work in self._wanted if not work.is_known(self._store)]

    @property
    def _left_s(self) -> float:
        return self._end_s - self._watch.clock.monotonic_s()

    def _find_end(self) -> str:
        if self._left_s <= 0.0:
            return f"placement.profile_budget_s ({self._budget_s:g} s) is spent"
        return "a request waits" if self._watch.awaited.is_set() and self._can_serve() else ""

    def _is_too_long(self, predicted_s: float) -> bool:
        """Return whether a piece of work would be dropped unfinished, while something is there to serve with."""
        return predicted_s > _SURELY_TOO_LONG * self._left_s and self._can_serve()

    def _can_serve(self) -> bool:
        """Return whether a target is known that can answer; of few layers, with a second device."""
        targets = [work for work in self._wanted if work.job.role == "target" and work.can_plan(self._store)]
        profiles = [work.find_model_profile(self._store) for work in targets]
        return len(profiles) > 1 or any(profile is not None and not profile.few_layers for profile in profiles)

    async def _wait_end(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._left_s)):
                await self._watch.awaited.wait()
                await self._enough.wait()

    def _tell_left(self) -> None:
        left = [work.title for work in self._list_missing()]
        if left:
            why = self._find_end() or f"placement.profile_budget_s ({self._budget_s:g} s) is too short for all"
            _log.warning("%s: left for when nobody asks: %s", why, "; ".join(left))


def _predict(todo: Sequence[Work], store: ProfileStore) -> dict[str, float]:
    pace = measure_pace()
    texts, durations_s = False, {}
    for work in todo:
        durations_s[work.title] = predict_duration_s(work, store, pace, texts=texts)
        texts = texts or work.job.role == "target"
    return durations_s

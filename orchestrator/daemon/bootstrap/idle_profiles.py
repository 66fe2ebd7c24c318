"""Measures what a start has left, and what was measured on a busy machine, while nobody asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from adapters.contract import AdapterError, silent
from adapters.device_memory import read_host_memory
from device_profiles.device_load import PROCESSOR, DeviceLoad, name_counters
from device_profiles.units import human_bytes
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.bootstrap.clusters import local_cluster
from orchestrator.daemon.bootstrap.planning import build_local_request, propose_local
from orchestrator.daemon.bootstrap.start_profiles import list_wanted
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.state import READY, STARTING
from orchestrator.errors import OutriderError, WorkerError
from orchestrator.planning.estimates import EstimableDevice
from orchestrator.planning.profiling.run import Watch, measure_until
from orchestrator.planning.profiling.work import Work, measuring_alone, predict_needed_bytes, profile_store
from orchestrator.planning.promise import predict_promise
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.wanted import PlanError
from policies.planning.plan import Role

# ADR 0108, 0112: a daemon that is never idle so long measures nothing.
IDLE_S: Final = 10.0
# ADR 0108: tries that were ended wait longer, doubled up to this.
_LONGEST_IDLE_S: Final = 640.0
# ADR 0108: a request ends a measurement within half a second.
_LOOK_S: Final = 0.2
_LOOK_AGAIN_S: Final = 60.0  # whether there is something to measure. Not tuned.
_MOST_TRIES: Final = 3
"""A machine that is never quiet is not measured for ever. ADR 0108."""

_log = logging.getLogger(__name__)


def _is_planned_at_once(first: PlanProposal, wanted: Sequence[Work]) -> bool:
    """Return whether a plan was made with a look at some runtimes only, so that the rest of them is not known to it."""
    known = {option.runtime for option in first.cluster.options if option.role is Role.TARGET}
    estimated = all(option.source == "estimate" for option in first.cluster.options)
    return estimated and not {work.job.model.adapter for work in wanted if work.job.role == "target"} <= known


class IdleMeasuring:
    """Measures one piece of work at a time, and lets the keeper plan by it. A request that comes meanwhile ends it, and
    the next try waits longer."""

    def __init__(
        self, config: ClusterConfig, base: Path, served: TargetControl, keeper: PlanKeeper, idle_s: float = IDLE_S
    ) -> None:
        self._config, self._base, self._served, self._keeper = config, base, served, keeper
        self._store = profile_store(config)
        self._idle_s = idle_s
        self._tries: dict[str, int] = {}

    async def run(self) -> None:
        """Measure what is left, and later what turns out not to hold; until cancelled. What goes wrong is logged."""
        try:
            await self._wait_served()
            wanted = await asyncio.to_thread(list_wanted, self._config, self._base)
            if _is_planned_at_once(self._keeper.first, wanted):
                await self._plan()
            while wanted:
                await self._measure_left(wanted)
                await asyncio.sleep(_LOOK_AGAIN_S)
        except (OutriderError, AdapterError, OSError) as error:
            _log.warning("nothing more is measured while nobody asks: %s", error)

    async def _measure_left(self, wanted: Sequence[Work]) -> None:
        while todo := await asyncio.to_thread(self._list_todo, wanted):
            await self._wait_idle(todo[0])
            if await self._try(todo[0]):
                await self._plan()
        self._keeper.to_measure = ()

    async def _plan(self) -> None:
        loads = self._served.list_loads()
        ours_bytes = loads.get(f"{THIS_NODE}/{PROCESSOR}", DeviceLoad()).memory_ours_bytes
        taken = self._keeper.first.request.taken
        try:
            request = await asyncio.to_thread(build_local_request, self._config, self._base, taken)
            first = await asyncio.to_thread(propose_local, self._config, self._base, request, ours_bytes)
        except PlanError as error:
            _log.warning("the plan is kept, though more was measured: %s", error)
        else:
            self._keeper.observe_profiles(first)

    def _list_todo(self, wanted: Sequence[Work]) -> list[Work]:
        """Return what is left and worth it, and tell the keeper: first what has no profile, and what loads at once."""
        left = [
            work for work in wanted if self._tries.get(work.title, 0) < _MOST_TRIES and not work.is_done(self._store)
        ]
        measured = {
            work.job.model.adapter for work in wanted if work.job.role == "target" and work.can_plan(self._store)
        }
        todo = {work.title: work for work in left}
        promises = dict.fromkeys(todo, "")
        for work in left:
            if work.is_known(self._store) or work.is_prepared():
                continue
            promise = self._find_promise(work, measured)
            if promise is None:
                del todo[work.title]
            else:
                promises[work.title] = promise
        self._keeper.to_measure = tuple(f"{title}{promises[title]}" for title in todo)
        return sorted(todo.values(), key=lambda work: (work.is_known(self._store), not work.is_prepared()))

    def _find_promise(self, work: Work, measured: Collection[str]) -> str | None:
        """Return what a runtime that converts the model first could bring, None where it is not to be tried: the
        operator does not allow it, or it promises no more than what serves. A draft follows its target."""
        if not self._config.placement.improve:
            return None
        if work.job.role != "target":
            return "" if work.job.model.adapter in measured else None
        if not measured:
            return ""
        device = work.find_device_profile(self._store)
        if device is None:
            return ", beginning with what its device can do"
        try:
            promise = predict_promise(self._keeper.asked_now, EstimableDevice(device))
        except PlanError:
            return ""
        return f" ({promise.text})" if promise.is_worth_measuring else None

    async def _try(self, work: Work) -> bool:
        needed, free = predict_needed_bytes(work, self._store), read_host_memory().free_bytes
        if needed > free:
            self._tries[work.title] = _MOST_TRIES
            text = "%s is not measured beside what serves: of %s that it takes, %s are free; stop the daemon and run %s"
            _log.warning(text, work.title, human_bytes(needed), human_bytes(free), "`outrider profile`")
            return False
        device_only = self._begins_with_device(work)
        _log.info("nobody asks: measuring %s%s", work.title, ", its device" if device_only else "")
        try:
            with measuring_alone(self._store):
                measured = await self._measure(work, device_only=device_only)
        except PlanError as error:
            _log.info("%s", error)
            measured = False
        except WorkerError as error:
            _log.warning("%s cannot be measured and is not planned with: %s", work.title, error)
            self._tries[work.title] = _MOST_TRIES
            return False
        if measured and not device_only:
            self._tries[work.title] = self._tries.get(work.title, 0) + 1
        if not measured or work.describe_doubt(self._store):
            self._idle_s = min(_LONGEST_IDLE_S, 2.0 * self._idle_s)
        return measured

    def _begins_with_device(self, work: Work) -> bool:
        """Return whether it is to be known what a device can do before a model is converted for it: that takes seconds,
        and the conversion may not be worth it."""
        is_target = work.job.role == "target"
        return is_target and not work.is_prepared() and work.find_device_profile(self._store) is None

    async def _measure(self, work: Work, *, device_only: bool) -> bool:
        """Return whether nothing was in the way meanwhile. Raises WorkerError."""
        cluster = local_cluster()
        await cluster.open()
        watch = Watch(silent, self._store.save)
        try:
            spec = work.spec(self._store, refresh=False, device_only=device_only)
            return await measure_until(cluster, spec, watch, self._wait_obstacle(work))
        finally:
            await cluster.close()

    async def _wait_obstacle(self, work: Work) -> None:
        while True:
            if why := self._find_obstacle(work):
                _log.info("%s: %s is measured later", why, work.title)
                return
            await asyncio.sleep(_LOOK_S)

    async def _wait_served(self) -> None:
        """Return once a first target serves and nobody has asked for a while, or none will: to look at all runtimes
        takes seconds of the processor that it loads on."""
        quiet_s = 0.0
        while quiet_s < self._idle_s and (view := self._served.view()).phase in (STARTING, READY):
            await asyncio.sleep(_LOOK_S)
            quiet_s = 0.0 if view.streams or view.phase == STARTING else quiet_s + _LOOK_S

    async def _wait_idle(self, work: Work) -> None:
        quiet_s = 0.0
        while quiet_s < self._idle_s:
            await asyncio.sleep(_LOOK_S)
            quiet_s = 0.0 if self._find_obstacle(work) else quiet_s + _LOOK_S

    def _find_obstacle(self, work: Work) -> str:
        view, loads = self._served.view(), self._served.list_loads()
        if view.streams:
            return "a request has come"
        if view.phase != READY:
            return f"the target is {view.phase}"
        names = (name_counters(work.job.model.device), PROCESSOR)
        load = next((loads[name] for name in (f"{THIS_NODE}/{name}" for name in names) if name in loads), None)
        return "other programs take the device" if load is not None and load.others else ""

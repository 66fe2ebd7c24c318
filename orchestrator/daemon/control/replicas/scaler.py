"""Keeps as many replicas as load needs, within bounds: looks each second, and has one more or one less run.

What is decided is decided in policies.serving.scaling. A number is changed by a rollout, so streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from orchestrator.clock import Clock
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.loops.planner_port import PlanExecutor
from orchestrator.daemon.control.port import ScaleView
from orchestrator.daemon.control.replicas.scale_load import SeenReplicas
from orchestrator.daemon.control.rollout.replica_diff import leave_name
from orchestrator.errors import OutriderError
from orchestrator.planning.wanted import ReplicaDemand
from orchestrator.protocol.contract import WorkerSpec
from policies.serving.scaling import ScaleBounds, ScaleChange, ScaleTrend, choose_leaver, follow_load

# ADR 0062. Not tuned: a third of ADD_AFTER_S.
LOOK_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class ReplicaRunner(Protocol):
    """Has another number of replicas run. What does not work is returned in a line, "" where it does."""

    @property
    def mark(self) -> Hashable:
        """What the places are: where this is another value, one more may have become possible."""
        ...

    async def find_room(self, seen: SeenReplicas) -> tuple[int, str]:
        """Return for how many replicas there are places, and why for no more."""
        ...

    async def run_more(self, seen: SeenReplicas) -> str:
        """Have one replica more, and none that is gone, while the rest goes on."""
        ...

    async def run_fewer(self, seen: SeenReplicas) -> str:
        """Have one replica less; its streams move to those that are left."""
        ...


class ReplicaScaler:
    """`measure` tells the load. `run` is to be one task, and `view` says how things are."""

    def __init__(
        self, bounds: ScaleBounds, measure: Callable[[], SeenReplicas], runner: ReplicaRunner, clock: Clock
    ) -> None:
        self._bounds = bounds
        self._measure = measure
        self._runner = runner
        self._clock = clock
        self._trend = ScaleTrend()
        self._mark = runner.mark
        self._wanted = bounds.least
        self._why = "nothing was looked at yet"
        self._last = ""

    def view(self) -> ScaleView:
        replicas = self._measure().load.present
        ready = sum(replica.serving for replica in replicas)
        bounds = (self._bounds.least, self._bounds.most)
        return ScaleView(self._wanted, len(replicas), ready, *bounds, self._why, self._last)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.look()
            except Exception:
                _log.exception("the number of replicas could not follow load")

    async def look(self) -> None:
        """Look once, and carry out what follows; returns when that is done."""
        seen = self._measure()
        room, why_none = await self._runner.find_room(seen)
        seen = replace(seen, load=replace(seen.load, room=room, no_room=why_none))
        if self._runner.mark != self._mark:
            self._mark, self._trend = self._runner.mark, self._trend.forget_failures()
        change = follow_load(self._trend, self._bounds, seen.load, self._clock.monotonic_s())
        self._trend, self._wanted, self._why = change.trend, change.wanted, change.why
        if change.more > 0:
            await self._grow(seen, change)
        elif change.more < 0:
            await self._shrink(seen, change)

    async def _grow(self, seen: SeenReplicas, change: ScaleChange) -> None:
        before, begun_s = len(seen.load.present), self._clock.monotonic_s()
        _log.info("load asks for one more replica, %d -> %d: %s", before, change.wanted, change.why)
        failed = await self._runner.run_more(seen)
        now_s = self._clock.monotonic_s()
        if failed:
            self._trend = self._trend.observe_failure(now_s)
            pause_s = self._trend.again_s - now_s
            self._last = f"one more could not be had: {failed}"
            _log.warning("there is no replica more: %s; tried again in %g s", failed, round(pause_s))
            return
        self._trend = self._trend.forget_failures()
        self._last = f"{before} -> {change.wanted} in {now_s - begun_s:.1f} s: {change.why}"
        _log.info("%d replicas serve, after %.1f s", change.wanted, now_s - begun_s)

    async def _shrink(self, seen: SeenReplicas, change: ScaleChange) -> None:
        before = len(seen.load.replicas)
        _log.info("one replica is not needed, %d -> %d: %s", before, before - 1, change.why)
        failed = await self._runner.run_fewer(seen)
        self._last = failed or f"{before} -> {before - 1}: {change.why}"
        if failed:
            _log.warning("all replicas stay: %s", failed)


class PlannedReplicas:
    """Implements ReplicaRunner where a plan chooses the places. One more runs only where that is predicted to pay."""

    def __init__(self, keeper: PlanKeeper, bounds: ScaleBounds) -> None:
        self._keeper = keeper
        self._bounds = bounds

    @property
    def mark(self) -> Hashable:
        return self._keeper.devices

    async def find_room(self, seen: SeenReplicas) -> tuple[int, str]:
        """See ReplicaRunner: the planner says, when it is asked. What it has placed already is to serve first."""
        planned = len(self._keeper.proposal.plan.replicas)
        if planned >= self._bounds.most:
            return len(seen.load.present), f"the plan has {planned} replicas, and not all of them serve"
        return self._bounds.most, ""

    async def run_more(self, seen: SeenReplicas) -> str:
        count, least = len(self._keeper.proposal.plan.replicas), self._bounds.least
        return await self._keeper.scale(
            ReplicaDemand(max(count, least), max(count + 1, least), max(seen.load.requests, count + 1))
        )

    async def run_fewer(self, seen: SeenReplicas) -> str:
        left = max(1, len(self._keeper.proposal.plan.replicas) - 1)
        return await self._keeper.scale(ReplicaDemand(left, left, seen.load.requests))


class PlacedReplicas:
    """Implements ReplicaRunner over places that are known: a spec for each. `why_none`: why there are no more."""

    def __init__(
        self, control: PlanExecutor, specs: Sequence[WorkerSpec], drafts: Sequence[WorkerSpec], why_none: str
    ) -> None:
        self._control = control
        self._specs = list(specs)
        self._drafts = drafts
        self._why_none = why_none

    def set_places(self, specs: Sequence[WorkerSpec]) -> None:
        self._specs = list(specs)

    @property
    def mark(self) -> Hashable:
        return tuple(spec.node for spec in self._specs)

    async def find_room(self, seen: SeenReplicas) -> tuple[int, str]:
        """See ReplicaRunner. A place whose replica is gone is no place for another one."""
        return len(seen.load.present) + len(self._list_free(seen)), self._why_none

    async def run_more(self, seen: SeenReplicas) -> str:
        left = [seen.specs[replica.name] for replica in seen.load.present]
        return await self._run([*left, self._list_free(seen)[0]])

    async def run_fewer(self, seen: SeenReplicas) -> str:
        leaver = choose_leaver(seen.load.replicas)
        return await self._run([spec for name, spec in seen.specs.items() if name != leaver])

    async def _run(self, specs: Sequence[WorkerSpec]) -> str:
        try:
            await self._control.change(specs, [self._drafts] * len(specs))
        except OutriderError as error:
            return str(error)
        return ""

    def _list_free(self, seen: SeenReplicas) -> list[WorkerSpec]:
        free = list(self._specs)
        for spec in map(leave_name, seen.specs.values()):
            taken = next((place for place in free if leave_name(place) == spec), None)
            if taken is not None:
                free.remove(taken)
        return free


async def end_scaling(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task

"""Keeps the running plan true: plans again when rounds, requests, devices or hosts part from what it was made with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from device_profiles.device_load import DeviceLoad
from orchestrator.clock import Clock
from orchestrator.config.placement import PlacementSection
from orchestrator.daemon.control import actions
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.daemon.control.loops.load_watch import LoadWatch
from orchestrator.daemon.control.loops.plan_choice import (
    NoRoomBeside,
    leave_room,
    refuse_crowding,
    refuse_idle_growth,
    weigh_move,
)
from orchestrator.daemon.control.loops.plan_obstacles import Place, PlanObstacles, find_places
from orchestrator.daemon.control.loops.planner_port import PlanExecutor, Planner, StartPlan
from orchestrator.daemon.control.loops.prediction_watch import DecodeRound, PredictionWatch
from orchestrator.daemon.control.loops.profile_watch import ProfileWatch
from orchestrator.daemon.control.port import PlanView, ReplicaView
from orchestrator.daemon.control.replicas.shortfall import list_missing_of_plan
from orchestrator.daemon.control.rollout.replica_diff import leave_name
from orchestrator.daemon.control.routing.loads import explain_rounds, name_device
from orchestrator.daemon.control.state import READY
from orchestrator.errors import OutriderError
from orchestrator.planning.basis import list_doubts
from orchestrator.planning.correction import Key, key_of, list_taken
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.wanted import PlanError, ReplicaDemand, ask_for_replicas
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.rounds import RoundReport
from policies.planning.merit import slow_down
from policies.planning.placement.running import predict_running
from policies.planning.plan import Prediction, ReplicaPlacement, Role, Shard
from policies.serving import drift
from policies.serving.request_load import has_changed

# Rounds that wait for the next sample, a second (ADR 0057). Bounds memory.
_MOST_UNJUDGED = 4096
_WITHOUT: Final = "plan without what refuses work"
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class PlanKeeper:
    """One running plan, which is to hear of what it `hears`. `to_measure`: when nobody asks, for people."""

    def __init__(
        self, running: StartPlan, control: PlanExecutor, making: Planner, policy: PlacementSection, clock: Clock
    ) -> None:
        self._first = running.proposal
        self._running = running
        self._control = control
        self._making = making
        self._policy = policy
        self._clock = clock
        self._watch = PredictionWatch(running.proposal, policy)
        self._obstacles = PlanObstacles()
        self._corrections: dict[Key, float] = {}
        self._requests = running.proposal.request.placement.concurrency  # at once, that was planned for last
        self._plans = 0
        self._recent = 0  # of these, as far as they count for the pause before the next
        self._moves = 0
        self._demand: ReplicaDemand | None = None
        self._planned_s = clock.monotonic_s()
        self._last = ""
        self._doubts = list_doubts(running.proposal)
        self.to_measure: tuple[str, ...] = ()
        self._health: dict[str, PartHealth] = {}
        self._coming: Sequence[WorkerSpec] = ()
        devices, self._taken = running.proposal.cluster.devices, _list_taken(running.proposal)
        self._loads = LoadWatch(devices, policy.load_lasts_s, self._taken)
        self._unjudged: list[DecodeRound] = []  # it is not known yet how much of the device they had
        self._task: asyncio.Task[Any] | None = None
        self._marking: asyncio.Task[None] | None = None
        self._waiting: dict[str, tuple[asyncio.Task[None], bool]] = {}  # who makes a plan, by what for, behind a pause
        self.hears: Mapping[type, Callable[[Any], None]] = {
            RoundReport: self.observe_round,
            actions.TellHealth: lambda event: self.observe_health(event.unwell),
            actions.TellLoads: self.observe_loads,
            actions.TellLacking: self.observe_lacking,
            actions.TellRefused: self.observe_refused,
            actions.TellStarved: self.observe_starved,
            actions.TellUseless: self.observe_useless,
        }

    def set_places(self, engines: Sequence[int]) -> None:
        self._watch.set_places(engines)

    async def adjust(self, wanted: StartPlan, making: Planner) -> StartPlan:
        """Return the plan of another configuration by what is known of costs, devices and loads here. `wanted` is that
        plan by profiles alone. Raises OutriderError."""
        refused = self._obstacles.starts_alike(wanted.targets, self._running.targets)
        first = self._obstacles.leave_out(wanted.proposal, refused=refused)
        return await self._make(first, self._loads.list_loads(), making)

    def succeed(self, before: PlanKeeper, first: PlanProposal) -> None:
        """Know of costs and devices what another keeper knew. `first`: what the running plan was adjusted from."""
        self._watch.profiles = ProfileWatch(first, self._policy.drift_tolerance, self._policy.drift_after_s)
        self._watch.take_requests(before._watch)
        self._corrections = dict(before._corrections)
        self._health = dict(before._health)
        refused = before._obstacles.starts_alike(self._running.targets, before._running.targets)
        self._obstacles.inherit(before._obstacles, refused=refused)
        self._take_first(first)

    @property
    def first(self) -> PlanProposal:
        """What is planned by the profiles alone."""
        return self._first

    @property
    def asked_now(self) -> PlanProposal:
        """The same for the replicas and the requests at once that are wanted now."""
        requests = max(self._first.request.placement.concurrency, self._watch.count_requests())
        placement = self._first.request.placement.model_copy(update={"concurrency": requests})
        request = replace(self._first.request, placement=placement)
        return replace(
            self._first, request=request if self._demand is None else ask_for_replicas(request, self._demand)
        )

    @property
    def running(self) -> StartPlan:
        return self._running

    @property
    def proposal(self) -> PlanProposal:
        return self._running.proposal

    @property
    def devices(self) -> frozenset[str]:
        """The devices that plans choose from: another set of them may have room for what had none."""
        return frozenset(device.id for device in self._first.cluster.devices)

    def view(self, replicas: Sequence[ReplicaView] = ()) -> PlanView:
        """Return what was predicted and what is measured, and what of the plan runs where these are the `replicas`."""
        plan, places, drifts = self.proposal.plan, self._watch.places, self._watch.drifts
        serving = {places[view.engine] for view in replicas if view.phase == READY and view.engine in places}
        predicted = [replica.prediction.goodput_tokens_per_s for replica in plan.replicas]
        return PlanView(
            predicted_tokens_per_s=plan.goodput_tokens_per_s,
            measured_tokens_per_s=self._watch.tokens_per_s,
            ratio=max(drifts, key=lambda drifted: abs(drifted.log_ratio)).ratio,
            rounds=sum(drifted.rounds for drifted in drifts),
            plans=self._plans,
            moves=self._moves,
            last=self._last,
            drifted=tuple(notice for notice in self._watch.profiles.marked.values() if notice),
            objective=plan.objective,
            currency=plan.currency,
            predicted_cost_per_million_tokens=plan.cost_per_million_tokens,
            predicted_joules_per_token=plan.joules_per_token,
            price_per_hour=plan.price_per_hour,
            corrections=tuple(self._corrections.values()),
            serving_tokens_per_s=sum(predicted[number] for number in sorted(serving)),
            missing=list_missing_of_plan(replicas, places),
            doubts=self._doubts,
            to_measure=self.to_measure,
            replica_tokens_per_s={
                engine: predicted[number] for engine, number in places.items() if number < len(predicted)
            },
        )

    def expect_load_s(self, engine: int) -> float:
        """Return how long the worker of a replica takes to load, as it was measured; 0 where it was not."""
        number, replicas = self._watch.places.get(engine), self.proposal.plan.replicas
        if number is None or number >= len(replicas):  # the plan is about to be another one
            return 0.0
        replica = replicas[number]
        return replica.load_s if all(shard.source == "measured" for shard in replica.shards) else 0.0

    def observe_round(self, done: RoundReport) -> None:
        decoded = self._watch.observe_round(done)
        if decoded is None:
            return
        requests = self.asked_now.request.placement.concurrency
        if has_changed(self._requests, requests) and self._may_plan():
            self._obstacles.try_useless(requests, self._clock.monotonic_s())
            reason = f"{requests} requests come at once, and not {self._requests}"
            self._begin(self._plan_because(reason), "plan for more requests")
        if done.in_flight > 1:
            return  # it has waited for stages that ran other rounds, and nobody knows how long
        if self._loads.knows(self._clock.monotonic_s()) and len(self._unjudged) < _MOST_UNJUDGED:
            self._unjudged.append(decoded)
        else:
            self._judge(decoded)

    def _judge(self, done: DecodeRound) -> None:
        if (key := self._watch.compare_round(done)) is not None:
            marking = self._mark(key)
            self._marking = asyncio.get_running_loop().create_task(marking, name="mark a drifted profile")
        if drift.has_drifted(self._watch.drifts[done.replica]) and self._may_plan():
            self._begin(self._plan_drifted(done.replica), "plan again")

    def observe_hosts(self, first: PlanProposal) -> None:
        """Plan again at once: hosts came or went. `first`: the plan for those that are there, by profiles alone."""
        self._obstacles.forget_absent({device.id for device in first.cluster.devices})
        self._take_first(first)
        self._loads.set_devices(first.cluster.devices)
        self._plan_soon(self._plan_without, _WITHOUT)

    def observe_profiles(self, first: PlanProposal) -> None:
        """Plan again at once: something was measured. `first`: what would be planned by all profiles that there are.
        Corrections of what is measured anew are forgotten."""
        planned = self._obstacles.leave_out(first)
        before = {key_of(option): option.cost for option in self._first.cluster.options if option.role is Role.TARGET}
        now = {key_of(option): option.cost for option in planned.cluster.options if option.role is Role.TARGET}
        self._corrections = {key: ratio for key, ratio in self._corrections.items() if before.get(key) == now.get(key)}
        self._watch.profiles.renew(planned)
        self._first = planned
        self._plan_soon(partial(self._plan_because, "more was measured"), "plan by profiles")

    def observe_lacking(self, event: actions.TellLacking) -> None:
        if self._obstacles.note_lacking(self._first, event):
            self._take_first(self._first)
            self._plan_soon(self._plan_without, _WITHOUT)

    def observe_refused(self, event: actions.TellRefused) -> None:
        """Plan again at once without a runtime on a device where a worker of this plan will never serve. It is tried
        again after a reload that changes how workers are started."""
        if self._obstacles.note_refused(self._first, event, (*self._running.targets, *self._coming)):
            self._take_first(self._first)
            self._plan_soon(self._plan_without, _WITHOUT)

    def observe_starved(self, event: actions.TellStarved) -> None:
        places = find_places(self._first, event.spec)
        if places and leave_name(event.spec) in map(leave_name, self._running.targets):
            reason = f"no worker finds memory on {', '.join(sorted(device for device, _ in places))}"
            self._plan_soon(partial(self._plan_because, reason, places), "plan by free memory", pauses=True)

    def observe_useless(self, event: actions.TellUseless) -> None:
        """Plan again at once without a draft model that helps nobody. Its device is free for a replica, where that
        pays. It may be planned with again once fewer requests come at once, or others behind its rest."""
        now_s = self._clock.monotonic_s()
        if self._obstacles.note_useless(self._first, self._running, event, self._requests, now_s):
            reason = f"draft {event.spec.name} rests, as {event.why}"
            self._plan_soon(partial(self._plan_because, reason), "plan without a draft")

    def observe_loads(self, loads: actions.TellLoads) -> None:
        """Devices were sampled: judge the rounds that ran meanwhile, and plan again where other programs take another
        share of a device than was planned with, for long."""
        now_s = self._clock.monotonic_s()
        self._loads.observe_means(loads.means, now_s)
        unjudged, self._unjudged = self._unjudged, []
        stretches = [explain_rounds(loads.newest.get(name_device(spec)), spec) for spec in self._running.targets]
        for done in unjudged:
            shards = self.proposal.plan.replicas[done.replica].shards
            # The prediction has it in it.
            taken = max(self._taken.get(name, 0.0) for shard in shards for name in shard.devices)
            stretch = max(1.0, stretches[done.replica] * (1.0 - taken))
            self._judge(replace(done, measured_ms=done.measured_ms / stretch))
        changed = self._loads.find_lasting(now_s)
        if changed and self._may_plan():
            self._begin(self._plan_because(changed), "plan by loads")

    def observe_health(self, unwell: Mapping[Part, PartHealth]) -> None:
        """Plan again at once without devices and hosts that refuse work, and later with those that work again."""
        before = self._refusing
        self._health = {part.name: health for part, health in unwell.items() if part.kind in ("device", "host")}
        if self._refusing != before:
            self._plan_soon(self._plan_without, _WITHOUT, pauses=self._refusing < before)

    @property
    def _refusing(self) -> set[str]:
        return {name for name, health in self._health.items() if not health.share}

    async def wait_planned(self) -> bool:
        """Wait while the plan is made anew, and its workers start; returns whether there was anything to wait for."""
        waited = False
        while planning := [task for task, _ in (*self._waiting.values(), (self._task, False)) if task is not None]:
            waited = True
            await asyncio.wait(planning, return_when=asyncio.FIRST_COMPLETED)
        return waited

    async def scale(self, demand: ReplicaDemand) -> str:
        """Run a plan for this demand from now on. Returns "" where it runs, else why it does not; then everything goes
        on as before. One replica more is worth it only where that is predicted to serve more."""
        while self._task is not None:
            await asyncio.wait([self._task])
        return await self._begin(self._scale(demand), "plan for another load")

    async def close(self) -> None:
        for task in (*(task for task, _ in self._waiting.values()), self._task, self._marking):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._waiting.clear()

    def _take_first(self, first: PlanProposal) -> None:
        """Plan from this, but for what turned out to be lacking or refused."""
        self._first = self._obstacles.leave_out(first)
        self._watch.profiles.add(self._first)

    def _may_plan(self) -> bool:
        return self._task is None and self._find_left_s() <= 0.0

    def _find_left_s(self) -> float:
        pause_s = drift.pause_s(self._recent, self._policy.replan_pause_s)
        return pause_s - (self._clock.monotonic_s() - self._planned_s)

    def _begin(self, planning: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(planning, name=name)
        self._task = task
        task.add_done_callback(self._finish_planning)
        return task

    def _finish_planning(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("planning again failed: %s", error, exc_info=error)

    def _plan_soon(self, plan: Callable[[], Coroutine[Any, Any, None]], name: str, *, pauses: bool = False) -> None:
        """Plan again for this reason, as soon as nothing else is planned, and where it `pauses`, once the running plan
        was kept for long enough. Of two with one name that wait one is made: the newer, but for one that pauses."""
        before, paused = self._waiting.get(name, (None, True))
        if before is not None:
            if pauses and not paused:
                return  # it will know of this, too
            before.cancel()
        waiting = self._wait_and_plan(plan, name, pauses=pauses)
        self._waiting[name] = (asyncio.get_running_loop().create_task(waiting, name=f"wait to {name}"), pauses)

    async def _wait_and_plan(self, plan: Callable[[], Coroutine[Any, Any, None]], name: str, *, pauses: bool) -> None:
        while (left_s := self._find_left_s() if pauses else 0.0) > 0.0 or self._task is not None:
            await (asyncio.sleep(left_s) if self._task is None else asyncio.wait([self._task]))
        del self._waiting[name]
        self._begin(plan(), name)

    async def _mark(self, key: Key) -> None:
        profiles = self._watch.profiles
        try:
            notice = await asyncio.to_thread(self._making.mark_drifted, self._first, key, profiles.ratio(key))
        except OSError as error:
            notice = f"{key[0]} {key[1]}: its profile has drifted, and that cannot be kept: {error}"
        profiles.marked[key] = notice
        _log.warning("%s", notice)

    async def _scale(self, demand: ReplicaDemand) -> str:
        try:
            await self._run_scaled(demand)
        except OutriderError as error:
            return str(error)
        return ""

    async def _run_scaled(self, demand: ReplicaDemand) -> None:
        """Make the plan, and run it where it has no more replicas than now, or they pay. Raises OutriderError."""
        count = len(self.proposal.plan.replicas)
        planned = await self._make_for(demand)
        plan = planned.proposal.plan
        if len(plan.replicas) <= count < demand.most:
            raise PlanError("; ".join(plan.reasons) or f"the plan for {demand.most} replicas has no more of them")
        if len(plan.replicas) > max(count, demand.least):
            fewer = (await self._make_for(replace(demand, most=count))).proposal.plan
            refuse_idle_growth(fewer, planned.proposal, count)
        self._loads.settle()
        refuse_crowding(self._list_alive(), self._running.targets, planned)
        await self._move(planned, f"for {demand.requests} requests at once: {count} -> {len(plan.replicas)} replicas")
        self._demand = replace(demand, least=len(plan.replicas), most=len(plan.replicas))

    async def _make_for(self, demand: ReplicaDemand) -> StartPlan:
        """Return the plan for a demand, by all that is known now. Raises OutriderError."""
        first = replace(self._first, request=ask_for_replicas(self._first.request, demand))
        return await self._make(first, self._loads.list_loads(), self._making)

    async def _make(self, first: PlanProposal, loads: Mapping[str, DeviceLoad], making: Planner) -> StartPlan:
        known = (dict(self._corrections), self._running.targets, dict(self._health), loads)
        return await asyncio.to_thread(making.again, self._obstacles.leave_drafts(first), *known)

    async def _plan_because(self, changed: str, starved: Set[Place] = frozenset()) -> None:
        """Make the plan by what is known now. What the running one reaches is predicted by that, too; it reaches
        nothing where workers are `starved`."""
        _log.info("%s: planning again", changed)
        try:
            await self._plan_again(self._list_alive(starved))
        except OutriderError as error:
            self._last = f"kept, though {changed}: {error}"
            _log.info("the plan is %s", self._last)

    async def _plan_without(self) -> None:
        out, plan = self._refusing, self.proposal.plan
        hosts = {host.name for host in self._first.cluster.hosts}
        news = self._obstacles.describe_news(plan, {host.name for host in self.proposal.cluster.hosts}, hosts, out)
        _log.warning("%s: planning again", news)
        alive = self._list_alive()
        # Whatever is planned now: a plan whose host is away cannot be run.
        running = [] if {shard.host for shard in plan.shards} - hosts else alive
        reached = [
            self._reach(replica, max(self._corrections.get(key_of(shard), 1.0) for shard in replica.shards))
            for replica in running
        ]
        try:
            await self._plan_again(alive, reached)
        except OutriderError as error:
            self._last = f"kept, though {news}: {error}"
            _log.warning("the plan is %s", self._last)

    async def _plan_drifted(self, number: int) -> None:
        """Make the plan by costs as a replica's rounds show them to be."""
        ratio, before = self._watch.drifts[number].ratio, self.proposal.plan
        shards = before.replicas[number].shards
        keys = {key_of(shard) for shard in shards}
        self._corrections |= {key: self._corrections.get(key, 1.0) * ratio for key in keys}
        _log.warning(
            "rounds on %s take %.2f times what was predicted (tolerance %g): planning again",
            *(", ".join(shard.device for shard in shards), ratio, self._policy.drift_tolerance),
        )
        # What the running plan reaches, as far as it is known: replicas that run alike have drifted alike.
        alive = self._list_alive()
        reached = [
            self._reach(replica, ratio if keys & {key_of(shard) for shard in replica.shards} else 1.0)
            for replica in alive
        ]
        try:
            await self._plan_again(alive, reached)
        except OutriderError as error:  # go on as before, and compare with costs as they turned out to be
            self._watch.correct_costs(keys, ratio)
            self._tell_last(f"kept: {error}")

    def _list_alive(self, starved: Set[Place] = frozenset()) -> list[ReplicaPlacement]:
        """Return the replicas of the running plan that can have workers: not where runtimes are lacking or refused, nor
        on what refuses work or is away."""
        out, hosts = self._refusing, {host.name for host in self._first.cluster.hosts}

        def is_there(shard: Shard) -> bool:
            return shard.host in hosts and not {*shard.devices, shard.host} & out

        possible = self._obstacles.list_possible(self.proposal.plan, starved)
        return [replica for replica in possible if all(map(is_there, replica.shards))]

    def _reach(self, replica: ReplicaPlacement, ratio: float) -> Prediction:
        """Return what a replica of the running plan reaches, as far as it is known. Its rounds take `ratio` times what
        was predicted. Other programs may take another share of its device than planned."""
        changed = min(self._loads.find_change(name) for shard in replica.shards for name in shard.devices)
        return slow_down(replica.prediction, ratio / changed)

    async def _plan_again(self, alive: Sequence[ReplicaPlacement], reached: Sequence[Prediction] | None = None) -> None:
        """Make another plan by what is known now, and run it where that is worth a move. `alive`: the replicas of the
        running one that can run. `reached`: what these reach; None: as is predicted for them on devices as they are
        now. Raises OutriderError as `_take` does."""
        now_s = self._clock.monotonic_s()
        self._plans += 1
        self._recent = drift.count_recent(self._recent, now_s - self._planned_s, self._policy.replan_pause_s) + 1
        self._planned_s = now_s
        first = self.asked_now
        self._requests = first.request.placement.concurrency
        loads = self._loads.settle()
        planned = await self._make(first, loads, self._making)
        if reached is None:  # a draft's device counts as well as its target's
            reached = predict_running(alive, planned.proposal.cluster, planned.proposal.wanted)
        try:
            await self._take(planned, alive, reached)
        except NoRoomBeside as error:
            beside = {name: replace(load, memory_ours_bytes=0) for name, load in loads.items()}
            try:
                await self._take(await self._make(leave_room(first, alive), beside, self._making), (), reached)
            except PlanError as other:
                raise PlanError(f"{error}; beside it: {other}") from error

    async def _take(self, planned: StartPlan, alive: Sequence[ReplicaPlacement], reached: Sequence[Prediction]) -> None:
        """Run another plan where that is worth a move by the objective, compared with what the running one reaches,
        and its workers have room beside those of the replicas that are `alive`. Raises OutriderError, with the reason,
        where it is not, or they do not start."""
        moves, reason = weigh_move(self.proposal.plan, planned.proposal, reached)
        if moves:
            refuse_crowding(alive, self._running.targets, planned)
            await self._move(planned, reason)
        else:
            self._adopt(planned, reason)

    async def _move(self, planned: StartPlan, reason: str) -> None:
        """Replace workers for another plan. Raises WorkerError where one does not start."""
        self._coming = planned.targets
        engines = await self._control.change(planned.targets, planned.drafts, planned.standbys)
        self._moves += 1
        self._watch.set_places(engines)
        self._adopt(planned, reason)

    def _adopt(self, planned: StartPlan, reason: str) -> None:
        self._running = planned
        self._doubts = list_doubts(planned.proposal)
        self._taken = _list_taken(planned.proposal)
        self._loads.set_taken(self._taken)
        self._unjudged.clear()
        self._watch.set_running(planned.proposal)
        self._tell_last(reason)

    def _tell_last(self, reason: str) -> None:
        self._last = reason
        _log.info("the plan is %s", reason)


def _list_taken(proposal: PlanProposal) -> dict[str, float]:
    shards = (shard for replica in proposal.plan.replicas for shard in replica.shards)
    return list_taken(proposal.cluster, shards)

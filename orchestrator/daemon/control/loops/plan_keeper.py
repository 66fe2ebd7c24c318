"""Keeps the running plan true: compares its prediction with every round, and plans again when they part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from device_profiles.device_load import DeviceLoad
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.config.target import THIS_NODE
from orchestrator.daemon.control.actions import TellLacking, TellLoads, TellRefused
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.daemon.control.loops.load_watch import LoadWatch
from orchestrator.daemon.control.loops.profile_watch import ProfileWatch
from orchestrator.daemon.control.port import PlanView, ReplicaView
from orchestrator.daemon.control.replicas.shortfall import list_missing_of_plan
from orchestrator.daemon.control.rollout.replica_diff import leave_name
from orchestrator.daemon.control.routing.loads import explain_rounds, name_device
from orchestrator.daemon.control.state import READY
from orchestrator.errors import OutriderError
from orchestrator.planning.basis import list_doubts
from orchestrator.planning.correction import Corrections, Key, key_of, scale_option
from orchestrator.planning.lacking import Lacks, leave_lacking
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.wanted import PlanError, ReplicaDemand, ask_for_replicas
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.rounds import RoundReport
from policies.planning.merit import describe_merit, slow_down, sum_merits
from policies.planning.placement.running import predict_running
from policies.planning.plan import Prediction, ReplicaPlacement, Role, diff
from policies.planning.shard_cost import ModelPart, context_tokens
from policies.running_mean import update_mean
from policies.serving import drift
from policies.serving.drift import Drift
from policies.serving.request_load import RequestLoad, has_changed, observe_load

_MOST_UNJUDGED = 4096
_LOOK_AGAIN_S = 1.0  # while another plan is being made
_NEWEST = 0.05  # weight of the newest round in the measured tokens per second

_log = logging.getLogger(__name__)


class Planned(Protocol):
    """A plan, and how its workers are started: one target a replica, and the draft workers of each."""

    @property
    def proposal(self) -> PlanProposal: ...

    @property
    def targets(self) -> Sequence[WorkerSpec]: ...

    @property
    def drafts(self) -> Sequence[Sequence[WorkerSpec]]: ...

    @property
    def standbys(self) -> Sequence[StandbySpec]: ...


class PlanExecutor(Protocol):
    """What executes a plan's changes: control.controller.TargetControl."""

    async def change(
        self,
        specs: Sequence[WorkerSpec],
        drafts: Sequence[Sequence[WorkerSpec]],
        standbys: Sequence[StandbySpec] | None = None,
    ) -> list[int]: ...


class Planner(Protocol):
    """How plans are made; both calls may take their time, and run in a thread."""

    def again(
        self,
        first: PlanProposal,
        corrections: Corrections,
        running: Sequence[WorkerSpec],
        health: Mapping[str, tuple[float, str]],
        loads: Mapping[str, DeviceLoad],
    ) -> Planned:
        """Return another plan, by the factors by which costs turned out to differ from the first one's, and by the
        `health` and the `loads` of devices and hosts (planning.correction). What it needs of the `running` targets has
        their very specs."""
        ...

    def mark_drifted(self, first: PlanProposal, key: Key, ratio: float) -> str:
        """Note that a target's profile does not hold: rounds take `ratio` times what it predicts. Returns that in a
        line, with when it is measured again."""
        ...


@dataclass(frozen=True, slots=True)
class DriftPolicy:
    """How far rounds may be from what is predicted, as a share of it, and for how long, in time of rounds, before a
    profile is marked as drifted. `pause_s`: between the first two plans that are made anew. `load_lasts_s`: for how
    long other programs take more of a device than planned, or less, before that is a reason to plan."""

    tolerance: float
    marked_after_s: float
    pause_s: float = drift.FIRST_PAUSE_S
    load_lasts_s: float = 10.0


class PlanKeeper:
    """One running plan. `observe` is to be called with each round, in the event loop."""

    def __init__(
        self, running: Planned, control: PlanExecutor, making: Planner, patience: DriftPolicy, clock: Clock
    ) -> None:
        self._first = running.proposal
        self._running = running
        self._control = control
        self._making = making
        self._patience = patience
        self._clock = clock
        self._costs = _list_costs(running.proposal)
        self._places = {number: number for number in range(len(self._costs))}  # in the plan, by replica
        self._corrections: dict[Key, float] = {}
        self._drifts = [Drift() for _ in self._costs]
        self._profiles = ProfileWatch(running.proposal, patience.tolerance, patience.marked_after_s)
        self._tokens_per_s = [0.0 for _ in self._costs]
        self._request_loads = [RequestLoad() for _ in self._costs]
        self._requests = running.proposal.request.placement.concurrency  # at once, that was planned for last
        self._plans = 0
        self._recent = 0  # of these, as far as they count for the pause before the next
        self._moves = 0
        self._demand: ReplicaDemand | None = None
        self._planned_s = clock.monotonic_s()
        self._last = ""
        self._doubts = list_doubts(running.proposal)
        self.to_measure: tuple[str, ...] = ()
        """What is measured when nobody asks, for people."""
        self._health: dict[str, PartHealth] = {}
        self._lacks: dict[tuple[str, str], str] = {}
        self._refused: dict[tuple[str, str], str] = {}  # as _lacks, of workers that this plan or its next move started
        self._refused_specs: list[WorkerSpec] = []
        self._coming: Sequence[WorkerSpec] = ()
        self._loads = LoadWatch(running.proposal.cluster.devices, patience.load_lasts_s)
        self._unjudged: list[_Round] = []  # it is not known yet how much of the device they had
        self._later: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | asyncio.Task[str] | None = None
        self._marking: asyncio.Task[None] | None = None

    def set_places(self, engines: Sequence[int]) -> None:
        """The plan's replicas run in these places, in its order."""
        self._places = {engine: number for number, engine in enumerate(engines)}

    async def adjust(self, found: Planned, making: Planner) -> Planned:
        """Return the plan of another configuration by what is known of costs, devices and loads here. `found` is that
        plan by profiles alone. Raises OutriderError."""
        known = (dict(self._corrections), self._running.targets, dict(self._health), self._loads.list_loads())
        refused = self._refused if self._starts_alike(found.targets) else {}
        return await asyncio.to_thread(making.again, _leave_out(found.proposal, self._lacks | refused), *known)

    def succeed(self, before: PlanKeeper, first: PlanProposal) -> None:
        """Know of costs and devices what another keeper knew. `first`: what the running plan was adjusted from."""
        self._profiles = ProfileWatch(first, self._patience.tolerance, self._patience.marked_after_s)
        self._corrections = dict(before._corrections)
        self._request_loads = _spread(before._request_loads, len(self._costs))
        self._health = dict(before._health)
        self._lacks = dict(before._lacks)
        if before._starts_alike(self._running.targets):
            self._refused, self._refused_specs = dict(before._refused), list(before._refused_specs)
        self._take_first(first)

    @property
    def first(self) -> PlanProposal:
        """What is planned by the profiles alone."""
        return self._first

    @property
    def asked_now(self) -> PlanProposal:
        """The same for the replicas and the requests at once that are wanted now."""
        requests = max(self._first.request.placement.concurrency, self._count_requests())
        placement = self._first.request.placement.model_copy(update={"concurrency": requests})
        asked = replace(self._first.request, placement=placement)
        return replace(self._first, request=asked if self._demand is None else ask_for_replicas(asked, self._demand))

    def _count_requests(self) -> int:
        """Return how many requests there are at once while there are any, by the rounds; 0 while that is not known."""
        known = [one.sequences for one in self._request_loads if one.is_known]
        return round(sum(known))

    @property
    def running(self) -> Planned:
        """The running plan, and how its workers were started."""
        return self._running

    @property
    def proposal(self) -> PlanProposal:
        """The running plan, and what it was made from."""
        return self._running.proposal

    def view(self, replicas: Sequence[ReplicaView] = ()) -> PlanView:
        """Return what was predicted and what is measured, and what of the plan runs where these are the `replicas`."""
        serving = {self._places[one.engine] for one in replicas if one.phase == READY and one.engine in self._places}
        predicted = [one.prediction.goodput_tokens_per_s for one in self.proposal.plan.replicas]
        worst = max(self._drifts, key=lambda one: abs(one.log_ratio))
        return PlanView(
            predicted_tokens_per_s=self.proposal.plan.goodput_tokens_per_s,
            measured_tokens_per_s=sum(self._tokens_per_s),
            ratio=worst.ratio,
            rounds=sum(one.rounds for one in self._drifts),
            plans=self._plans,
            moves=self._moves,
            last=self._last,
            drifted=tuple(told for told in self._profiles.marked.values() if told),
            objective=self.proposal.plan.objective,
            currency=self.proposal.plan.currency,
            predicted_cost_per_million_tokens=self.proposal.plan.cost_per_million_tokens,
            predicted_joules_per_token=self.proposal.plan.joules_per_token,
            price_per_hour=self.proposal.plan.price_per_hour,
            corrections=tuple(self._corrections.values()),
            serving_tokens_per_s=sum(predicted[number] for number in sorted(serving)),
            missing=list_missing_of_plan(replicas, self._places),
            doubts=self._doubts,
            to_measure=self.to_measure,
        )

    def observe(self, done: RoundReport) -> None:
        """Compare a round with its prediction. Rounds that read prompts say nothing: nobody knows their share."""
        engine, sequences = self._places.get(done.engine), len(done.deltas)
        if not sequences or sequences != done.sequences or engine is None:
            return
        workload = self.proposal.wanted.workload
        min_rows = max(part.option.min_rows for part in self._costs[engine])
        if done.rows > sequences * (workload.depth_bound + 1 + min_rows):
            return
        held = [one.stats.prompt_tokens + one.stats.generated for one in done.deltas if one.stats is not None]
        context = sum(held) / len(held) if held else context_tokens(workload)
        self._count(engine, sum(len(one.tokens) for one in done.deltas), done.round_ms / done.in_flight)
        self._observe_requests(engine, sequences, done.round_ms)
        if done.in_flight > 1:
            return  # it has waited for stages that ran other rounds, and nobody knows how long
        seen = _Round(engine, (done.rows, sequences, context), done.round_ms - done.draft_ms)
        if self._loads.knows(self._clock.monotonic_s()) and len(self._unjudged) < _MOST_UNJUDGED:
            self._unjudged.append(seen)
        else:
            self._judge(seen)

    def _observe_requests(self, engine: int, sequences: int, round_ms: float) -> None:
        """Plan again where many more requests come at once than was planned for, or many fewer."""
        self._request_loads[engine] = observe_load(self._request_loads[engine], sequences, round_ms)
        requests = self.asked_now.request.placement.concurrency
        if has_changed(self._requests, requests) and self._task is None and self._is_due():
            told = f"{requests} requests come at once, and not {self._requests}"
            self._task = asyncio.get_running_loop().create_task(self._plan_because(told), name="plan for more requests")
            self._task.add_done_callback(self._finish_planning)

    def _is_due(self) -> bool:
        """Return whether the running plan was kept for long enough."""
        return self._clock.monotonic_s() - self._planned_s >= drift.pause_s(self._recent, self._patience.pause_s)

    def _judge(self, seen: _Round) -> None:
        """Compare a round with its prediction, as it would have been without other programs on its device."""
        engine, parts = seen.engine, self._costs[seen.engine]
        predicted_ms, measured_ms = sum(part.ms(*seen.shape) for part in parts), seen.measured_ms
        tolerance = self._patience.tolerance
        self._drifts[engine] = drift.observe_drift(self._drifts[engine], predicted_ms, measured_ms, tolerance)
        # Of a target in shards nobody knows whose profile does not hold.
        if len(parts) == 1 and self._profiles.observe(key_of(parts[0].option), seen.shape, measured_ms):
            self._begin_marking(key_of(parts[0].option))
        if self._task is None and self._is_due() and drift.has_drifted(self._drifts[engine]):
            self._task = asyncio.get_running_loop().create_task(self._again(engine), name="plan again")
            self._task.add_done_callback(self._finish_planning)

    def observe_hosts(self, first: PlanProposal) -> None:
        """Plan again at once: hosts came or went. `first`: what would be planned for those that are there, by their
        profiles alone."""
        there = {device.id for device in first.cluster.devices}
        for known in (self._lacks, self._refused):
            for key in [key for key in known if key[0] not in there]:
                del known[key]  # who comes again tells anew
        self._take_first(first)
        self._loads.set_devices(first.cluster.devices)
        self._begin_planning_without(first=True)

    def observe_profiles(self, first: PlanProposal) -> None:
        """Plan again at once: something was measured. `first`: what would be planned by all profiles that there are.
        Corrections of what is measured anew are forgotten."""
        planned = self._leave_lacking(first)
        before = {key_of(one): one.cost for one in self._first.cluster.options if one.role is Role.TARGET}
        now = {key_of(one): one.cost for one in planned.cluster.options if one.role is Role.TARGET}
        self._corrections = {key: ratio for key, ratio in self._corrections.items() if before.get(key) == now.get(key)}
        self._profiles.renew(planned)
        self._first = planned
        if self._later is not None:
            self._later.cancel()
        if self._task is not None:
            self._later = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self.observe_profiles, first)
            return
        self._later = None
        self._task = asyncio.get_running_loop().create_task(
            self._plan_because("more was measured"), name="plan by profiles"
        )
        self._task.add_done_callback(self._finish_planning)

    def _take_first(self, first: PlanProposal) -> None:
        """Plan from this, but for what turned out to be lacking or refused."""
        self._first = self._leave_lacking(first)
        self._profiles.add(self._first)

    def _leave_lacking(self, first: PlanProposal) -> PlanProposal:
        return _leave_out(first, self._lacks | self._refused)

    def _starts_alike(self, targets: Sequence[WorkerSpec]) -> bool:
        """Return whether some of these workers are started as one was that runs here, or was refused."""
        known = [leave_name(one) for one in (*self._running.targets, *self._refused_specs)]
        return any(leave_name(one) in known for one in targets)

    def observe_lacking(self, told: TellLacking) -> None:
        """Plan again at once without a runtime that a host lacks, whatever its agent says. Of a target in layer shards
        nobody knows which runtime that is."""
        self._plan_without_runtime(told, self._lacks)

    def observe_refused(self, told: TellRefused) -> None:
        """Plan again at once without a runtime on a device where a worker of this plan will never serve. It is tried
        again after a reload that changes how workers are started."""
        refused = leave_name(told.spec)
        if refused in map(leave_name, (*self._running.targets, *self._coming)):
            self._refused_specs.append(refused)
            self._plan_without_runtime(told, self._refused)

    def _plan_without_runtime(self, told: TellLacking | TellRefused, known: dict[tuple[str, str], str]) -> None:
        model = told.spec.options.get("model", {})
        if model.get("shards"):
            return
        runtime, host = model.get("adapter", ""), told.spec.node or THIS_NODE
        found = {
            (device.id, runtime): told.why
            for device in self._first.cluster.devices
            if device.host == host and self._first.behind[device.profile].device_for(runtime) == told.spec.device
        }
        if found.keys() <= known.keys():
            return
        known |= found
        self._take_first(self._first)
        self._begin_planning_without(first=True)

    async def wait_planned(self) -> bool:
        """Wait while the plan is made anew, and its workers start; returns whether there was anything to wait for."""
        waited = False
        while self._task is not None or self._later is not None:
            waited = True
            await (asyncio.sleep(_LOOK_AGAIN_S) if self._task is None else asyncio.wait([self._task]))
        return waited

    def observe_loads(self, told: TellLoads) -> None:
        """Devices were sampled: judge the rounds that ran meanwhile, and plan again where other programs take another
        share of a device than was planned with, for long."""
        now_s = self._clock.monotonic_s()
        self._loads.observe(told.means, now_s)
        seen, self._unjudged = self._unjudged, []
        stretches = [explain_rounds(told.newest.get(name_device(spec)), spec) for spec in self._running.targets]
        for one in seen:
            self._judge(replace(one, measured_ms=one.measured_ms / stretches[one.engine]))
        changed = self._loads.find_lasting(now_s)
        if changed and self._task is None and self._is_due():
            self._task = asyncio.get_running_loop().create_task(self._plan_because(changed), name="plan by loads")
            self._task.add_done_callback(self._finish_planning)

    @property
    def devices(self) -> frozenset[str]:
        """The devices that plans choose from: another set of them may have room for what had none."""
        return frozenset(one.id for one in self._first.cluster.devices)

    async def scale(self, demand: ReplicaDemand) -> str:
        """Run a plan for this demand from now on. Returns "" where it runs, else why it does not; then everything goes
        on as before. One replica more is worth it only where that is predicted to serve more."""
        while self._task is not None:
            await asyncio.wait([self._task])
        scaling = asyncio.get_running_loop().create_task(self._scale(demand), name="plan for another load")
        self._task = scaling
        scaling.add_done_callback(self._finish_planning)
        return await scaling

    async def _scale(self, demand: ReplicaDemand) -> str:
        try:
            await self._run_scaled(demand)
        except OutriderError as error:
            return str(error)
        return ""

    async def _run_scaled(self, demand: ReplicaDemand) -> None:
        """Make the plan, and run it where it has no replica more than the running one, or where that pays. Raises
        OutriderError."""
        count = len(self.proposal.plan.replicas)
        found = await self._make(demand)
        plan = found.proposal.plan
        if len(plan.replicas) <= count < demand.most:
            raise PlanError("; ".join(plan.reasons) or f"the plan for {demand.most} replicas has no more of them")
        if len(plan.replicas) > max(count, demand.least):
            fewer = (await self._make(replace(demand, most=count))).proposal.plan
            objective, requests = plan.objective, found.proposal.wanted.workload.concurrency
            alone, more = (
                sum_merits(objective, [one.prediction for one in made.replicas], requests)[0] for made in (fewer, plan)
            )
            if not drift.worth_moving(alone, more):
                told = [describe_merit(objective, merit, plan.currency) for merit in (alone, more)]
                raise PlanError(f"{told[1]} predicted with {len(plan.replicas)} replicas, {told[0]} with {count}")
        self._loads.settle()
        await self._move(found, f"for {demand.requests} requests at once: {count} -> {len(plan.replicas)} replicas")
        self._demand = replace(demand, least=len(plan.replicas), most=len(plan.replicas))

    def _ask_again(self, demand: ReplicaDemand) -> PlanProposal:
        return replace(self._first, request=ask_for_replicas(self._first.request, demand))

    async def _make(self, demand: ReplicaDemand) -> Planned:
        """Return the plan for a demand, by all that is known now. Raises OutriderError."""
        known = (self._ask_again(demand), dict(self._corrections), self._running.targets, dict(self._health))
        return await asyncio.to_thread(self._making.again, *known, self._loads.list_loads())

    async def _plan_because(self, changed: str) -> None:
        """Make the plan by what is known now. What the running one reaches is predicted by that, too."""
        _log.info("%s: planning again", changed)
        try:
            await self._plan_again()
        except OutriderError as error:
            self._last = f"kept, though {changed}: {error}"
            _log.info("the plan is %s", self._last)

    def _reach(self, one: ReplicaPlacement, ratio: float = 1.0) -> Prediction:
        """Return what a replica of the running plan reaches, as far as it is known. Its rounds take `ratio` times what
        was predicted. Other programs may take another share of its device than planned."""
        return slow_down(one.prediction, ratio / min(self._loads.find_change(shard.device) for shard in one.shards))

    def observe_health(self, unwell: Mapping[Part, PartHealth]) -> None:
        """Plan again at once without devices and hosts that refuse work, and later with those that work again."""
        before = self._refusing
        self._health = {part.name: one for part, one in unwell.items() if part.kind in ("device", "host")}
        if self._refusing != before:
            self._begin_planning_without(first=bool(self._refusing - before))

    @property
    def _refusing(self) -> set[str]:
        return {name for name, one in self._health.items() if not one.share}

    def _begin_planning_without(self, *, first: bool) -> None:
        left_s = drift.pause_s(self._recent, self._patience.pause_s) - (self._clock.monotonic_s() - self._planned_s)
        loop = asyncio.get_running_loop()
        if self._later is not None:
            self._later.cancel()
        if self._task is not None or (left_s > 0.0 and not first):
            again = partial(self._begin_planning_without, first=first)
            self._later = loop.call_later(_LOOK_AGAIN_S if first else max(_LOOK_AGAIN_S, left_s), again)
            return
        self._later = None
        self._task = loop.create_task(self._plan_without(), name="plan without what refuses work")
        self._task.add_done_callback(self._finish_planning)

    async def _plan_without(self) -> None:
        """Make the plan for the devices as they are now."""
        out = self._refusing
        lacking = sorted(self._list_lacking_in_use())
        there = {host.name for host in self._first.cluster.hosts}
        before = {host.name for host in self.proposal.cluster.hosts}
        happened = [
            *(f"{host} has left" for host in sorted(before - there)),
            *(f"{host} has come" for host in sorted(there - before)),
            *(f"{part} refuses work" for part in sorted(out)),
            *(f"{device} {'has no' if (device, one) in self._lacks else 'refuses'} {one}" for device, one in lacking),
        ]
        told = ", ".join(happened) or "all devices take work again"
        _log.warning("%s: planning again", told)
        reached = [
            self._reach(one, max(self._corrections.get(key_of(shard), 1.0) for shard in one.shards))
            for one in self._list_possible()
            if not {place for shard in one.shards for place in (shard.device, shard.host)} & out
        ]
        if {one.host for one in self.proposal.plan.shards} - there:
            reached = []  # whatever is planned now: the running plan cannot be run
        try:
            await self._plan_again(reached)
        except OutriderError as error:
            self._last = f"kept, though {told}: {error}"
            _log.warning("the plan is %s", self._last)

    def _list_possible(self) -> list[ReplicaPlacement]:
        """Return the replicas of the running plan that can be run where they are."""
        out = self._list_lacking_in_use()
        replicas = self.proposal.plan.replicas
        return [one for one in replicas if not {(shard.device, shard.runtime) for shard in one.shards} & out]

    def _list_lacking_in_use(self) -> set[tuple[str, str]]:
        """Return the devices and runtimes of the running plan that cannot be run."""
        used = {(shard.device, shard.runtime) for one in self.proposal.plan.replicas for shard in one.shards}
        return used & (self._lacks | self._refused).keys()

    def _count(self, engine: int, tokens: int, round_ms: float) -> None:
        if round_ms > 0.0:
            newest = tokens / round_ms * MS_PER_S
            self._tokens_per_s[engine] = update_mean(self._tokens_per_s[engine] or newest, newest, _NEWEST)

    def _begin_marking(self, key: Key) -> None:
        self._marking = asyncio.get_running_loop().create_task(self._mark(key), name="mark a drifted profile")

    async def _mark(self, key: Key) -> None:
        try:
            told = await asyncio.to_thread(self._making.mark_drifted, self._first, key, self._profiles.ratio(key))
        except OSError as error:
            told = f"{key[0]} {key[1]}: its profile has drifted, and that cannot be kept: {error}"
        self._profiles.marked[key] = told
        _log.warning("%s", told)

    async def close(self) -> None:
        """End a change that is under way."""
        if self._later is not None:
            self._later.cancel()
        for task in (self._task, self._marking):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _finish_planning(self, task: asyncio.Task[None] | asyncio.Task[str]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("planning again failed: %s", error, exc_info=error)

    async def _again(self, engine: int) -> None:
        ratio, before = self._drifts[engine].ratio, self.proposal.plan
        shards = before.replicas[engine].shards
        keys = {key_of(shard) for shard in shards}
        self._corrections |= {key: self._corrections.get(key, 1.0) * ratio for key in keys}
        _log.warning(
            "rounds on %s take %.2f times what was predicted (tolerance %g): planning again",
            *(", ".join(shard.device for shard in shards), ratio, self._patience.tolerance),
        )
        # What the running plan reaches, as far as it is known: replicas that run alike have drifted alike.
        reached = [
            self._reach(one, ratio if keys & {key_of(shard) for shard in one.shards} else 1.0)
            for one in self._list_possible()
        ]
        try:
            await self._plan_again(reached)
        except OutriderError as error:  # go on as before, and compare with costs as they turned out to be
            self._costs = [[_scale(part, ratio, keys) for part in parts] for parts in self._costs]
            self._reset_drifts(f"kept: {error}")

    async def _plan_again(self, reached: Sequence[Prediction] | None = None) -> None:
        """Make another plan by what is known now, and run it where that is worth a move. `reached`: what the running
        one reaches; None: as is predicted for it on devices as they are now. Raises OutriderError as `_take` does."""
        now_s = self._clock.monotonic_s()
        self._plans += 1
        self._recent = drift.count_recent(self._recent, now_s - self._planned_s, self._patience.pause_s) + 1
        self._planned_s = now_s
        first = self.asked_now
        self._requests = first.request.placement.concurrency
        known = (first, dict(self._corrections), self._running.targets, dict(self._health), self._loads.settle())
        found = await asyncio.to_thread(self._making.again, *known)
        if reached is None:  # a draft's device counts as well as its target's
            reached = predict_running(self._list_possible(), found.proposal.cluster, found.proposal.wanted)
        await self._take(found, reached)

    async def _take(self, found: Planned, reached: Sequence[Prediction]) -> None:
        """Run another plan where that is worth a move by the objective, compared with what the running one reaches.
        Raises OutriderError, with the reason, where it is not, or its workers do not start."""
        before, after = self.proposal.plan, found.proposal.plan
        promised = [one.prediction for one in after.replicas]
        objective, requests = after.objective, found.proposal.wanted.workload.concurrency
        merits = [sum_merits(objective, one, requests)[0] for one in (reached, promised)]
        told = [describe_merit(objective, one, after.currency) for one in merits]
        changes = "; ".join(
            f"{one.part}: {one.before or 'none'} -> {one.after or 'none'}"
            for one in diff(before, after).changes
            if one.restart
        )
        now = f"{told[0]} with corrected costs"
        if not changes:
            self._adopt(found, f"kept: {now}, and still the best")
            return
        few = len(before.replicas) < len(after.replicas) <= found.proposal.wanted.constraints.min_replicas
        if not few and not drift.worth_moving(*merits):
            raise PlanError(f"{now}, and the best other is predicted to reach {told[1]} only")
        await self._move(found, f"changed, {told[0]} -> {told[1]} predicted: {changes}")

    async def _move(self, found: Planned, told: str) -> None:
        """Replace workers for another plan. Raises WorkerError where one does not start."""
        self._coming = found.targets
        engines = await self._control.change(found.targets, found.drafts, found.standbys)
        self._moves += 1
        self._places = {engine: number for number, engine in enumerate(engines)}
        self._tokens_per_s = [0.0 for _ in engines]
        self._request_loads = _spread(self._request_loads, len(engines))
        self._adopt(found, told)

    def _adopt(self, found: Planned, told: str) -> None:
        self._running, self._costs = found, _list_costs(found.proposal)
        self._doubts = list_doubts(found.proposal)
        self._unjudged.clear()
        self._reset_drifts(told)

    def _reset_drifts(self, told: str) -> None:
        self._drifts = [Drift() for _ in self._costs]
        self._last = told
        _log.info("the plan is %s", told)


@dataclass(frozen=True, slots=True)
class _Round:
    """A round that only decodes: of which target of the plan, its rows, sequences and context, and what it took."""

    engine: int
    shape: tuple[int, int, float]
    measured_ms: float


def _spread(loads: Sequence[RequestLoad], replicas: int) -> list[RequestLoad]:
    """Return what so many replicas have of the requests that others had together."""
    known = [one for one in loads if one.is_known]
    each = sum(one.sequences for one in known) / max(1, replicas)
    return [RequestLoad(each, max((one.rounds_ms for one in known), default=0.0))] * replicas


def _leave_out(first: PlanProposal, lacks: Lacks) -> PlanProposal:
    """Return what to plan from without these runtimes on these devices, and say so in what is assumed."""
    cluster, behind, told = leave_lacking(first.cluster, first.behind, lacks)
    return replace(first, cluster=cluster, behind=behind, assumed=(*first.assumed, *told))


def _list_costs(proposal: PlanProposal) -> list[list[ModelPart]]:
    """Return what the parts of each replica's target run: one, or its layer shards."""
    known = {key_of(one): one for one in proposal.cluster.options if one.role is Role.TARGET}
    layers = proposal.wanted.workload.target.layers
    return [
        [ModelPart(known[key_of(one)], (one.end_layer - one.first_layer) / layers) for one in replica.shards]
        for replica in proposal.plan.replicas
    ]


def _scale(part: ModelPart, factor: float, keys: Collection[Key]) -> ModelPart:
    """Return a part that takes so many times as long, where its option is one of these."""
    return replace(part, option=scale_option(part.option, factor)) if key_of(part.option) in keys else part

"""Control's edge: hands what happens to control.step, and carries out the actions that come back, in order.

It decides nothing about workers and streams. It has what `step` must not have: processes, tasks, the clock, the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import msgspec

from adapters.model_identity import ModelIdentity
from device_profiles.device_load import DeviceLoad
from orchestrator.clock import Clock
from orchestrator.daemon.control.actions import (
    Action,
    AskPages,
    Deliver,
    DropPages,
    EndStream,
    FinishRetune,
    FinishRollout,
    LogLine,
    Notify,
    Send,
    Settle,
    StartWorker,
    StopWorker,
    TellGauges,
    TellHealth,
    TellLacking,
    TellLoads,
    TellRefused,
    TellResumed,
    WakeAfter,
)
from orchestrator.daemon.control.drafts.draft_workers import NO_POOLS
from orchestrator.daemon.control.event_log import tell_changes
from orchestrator.daemon.control.events import (
    ClusterFailed,
    ClusterOpened,
    ControlClosed,
    ControlEvent,
    DrainBegun,
    DrainOver,
    LoadObserved,
    PartHeld,
    QuarantineReleased,
    RetuneAsked,
    RolloutAsked,
    RolloutDropped,
    RulesChanged,
    StandbySpec,
    StreamClosed,
    StreamOpened,
    Woke,
    WorkersChosen,
)
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.daemon.control.operator_desk import OperatorDesk
from orchestrator.daemon.control.port import (
    DraftStoreView,
    PlanView,
    RecentOutputsView,
    ReplicaView,
    RouteView,
    ScaleView,
    StateView,
)
from orchestrator.daemon.control.replicas.replicas import Rank, Replica, has_lost_model, unlike_any
from orchestrator.daemon.control.replicas.scale_load import SeenReplicas, measure_load
from orchestrator.daemon.control.replicas.shortfall import judge_workers
from orchestrator.daemon.control.replicas.supervisor import Supervisor
from orchestrator.daemon.control.routing.room import check_room
from orchestrator.daemon.control.routing.surroundings import Surroundings
from orchestrator.daemon.control.state import DRAINING, FAILED, READY, STARTING, add_totals, format_progress, whole
from orchestrator.daemon.control.steering_port import QuarantinedView
from orchestrator.daemon.control.step import State, step
from orchestrator.daemon.control.streams.admission import Asked, ControlLimits, describe_held, refuse_or_pass
from orchestrator.daemon.control.streams.deadlines import Reader, deadline_s, next_item
from orchestrator.daemon.control.streams.overrides import (
    NO_OVERRIDES,
    OverrideScope,
    bounds_of,
    change_overrides,
    format_override,
)
from orchestrator.errors import RequestError, WorkerError
from orchestrator.protocol.commands import MoveOut, Retune, SharedMemory, Submit
from orchestrator.protocol.contract import Cluster, WorkerSpec
from orchestrator.protocol.events import Progress
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, RoundReport
from orchestrator.protocol.shared_memory import SharedMemories
from orchestrator.protocol.trace_messages import ResumedStream
from orchestrator.telemetry import get_logger
from policies.serving.canary import CanaryVariant
from policies.serving.draft_pool import PoolSize
from policies.serving.failover.health import Health, Held, PartKind
from policies.serving.failover.watchdog import FLOOR_S
from policies.serving.overrides import EffectiveBound, Override

_log = logging.getLogger(__name__)
_entries = get_logger(__name__)
_LEVELS = logging.getLevelNamesMapping()
_T = TypeVar("_T")
_REMOTE_PATIENCE_S = 4.0
_Told = (
    WakeAfter
    | Settle
    | FinishRollout
    | FinishRetune
    | TellGauges
    | TellHealth
    | TellLacking
    | TellLoads
    | TellRefused
    | Notify
)
_VIEWED_S = 1.0


class TargetControl:
    """Implements control.port.Control over workers of `cluster`, which it opens and closes: one replica a spec. All
    must serve the same model in the same way. Without specs it has nothing to start until `set_specs` was called.

    `drafts` are started beside them once one is ready; nothing waits for them. Of each there are as many workers as
    `draft_pools` says of its name, else as there are replicas.
    `standbys` take the replicas' place when none serves. `plan_view` says what a plan predicts, where there is one, and
    what of it runs with these replicas. `scale_view` says how many replicas are wanted, where load decides,
    `draft_store_view` how the draft store does, `recent_outputs_view` what users were answered of late.
    `explain_unserved` says why requests cannot be served yet though a worker says that it is ready; "" where they can.
    `on_round` and `on_progress` are called with each event, `on_resumed` with each traced stream that goes on. So are
    `on_health` with the parts that are not healthy, when these change, and `on_loads` with each sample of devices.
    `on_lacking` is called with what a host lacks, `on_refused` with each worker that will never serve where it is. All
    are called in the event loop, and what they raise is logged. `kv_moves`: streams that are moved by plan take their
    KV cache along, where workers share this host's memory.
    """

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[WorkerSpec],
        limits: ControlLimits,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        drafts: Sequence[WorkerSpec] = (),
        standbys: Sequence[StandbySpec] = (),
        *,
        kv_moves: bool = True,
        share_memory: bool = True,
        draft_pools: Mapping[str, PoolSize] = NO_POOLS,
    ) -> None:
        self.plan_view: Callable[[Sequence[ReplicaView]], PlanView] | None = None
        self.scale_view: Callable[[], ScaleView] | None = None
        self.draft_store_view: Callable[[], DraftStoreView] | None = None
        self.recent_outputs_view: Callable[[], RecentOutputsView] | None = None
        self.explain_unserved: Callable[[Ready], str] = lambda _ready: ""
        self.on_round: list[Callable[[RoundReport], None]] = []
        self.on_progress: list[Callable[[Progress], None]] = []
        self.on_resumed: list[Callable[[ResumedStream], None]] = []
        self.on_health: list[Callable[[dict[Part, PartHealth]], None]] = []
        self.on_loads: list[Callable[[TellLoads], None]] = []
        self.awaited = asyncio.Event()
        """Set once a request has come while there is nothing to start yet."""
        self.on_lacking: list[Callable[[TellLacking], None]] = []
        self.on_refused: list[Callable[[TellRefused], None]] = []
        self._cluster = cluster
        self._limits = limits
        self._clock = clock
        around = _surround(limits)
        self._state = State(limits.max_restarts, limits.least_depth, limits.quarantine_s, around, draft_pools)
        self._state.watch.patience_s = FLOOR_S if cluster.runtime == "local" else _REMOTE_PATIENCE_S
        self._state.router.moves.enabled = kv_moves
        self._state.router.moves.share_memory = share_memory and cluster.runtime == "local"
        self._memories = SharedMemories()
        self.steering = OperatorDesk(self._state, self._post, clock)
        self._supervisor = Supervisor(cluster, sleep, self._post, self._state.identities.pin)
        self._overrides = NO_OVERRIDES
        self._readers: dict[str, Reader] = {}  # of live streams, by the request's id
        self._reading = 0
        self._all_read = asyncio.Event()
        self._changing = asyncio.Lock()
        self._changed: asyncio.Future[list[int]] | None = None
        self._retuned: asyncio.Future[None] | None = None
        self._preparing = "the workers are being planned"
        self._given_up = False
        self._seen: tuple[tuple[int, bool, bool], float, StateView] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._failed = asyncio.Event()
        self._started_s = clock.monotonic_s()
        self.set_specs(specs, [drafts] * len(specs), standbys)

    def set_specs(
        self,
        specs: Sequence[WorkerSpec],
        drafts: Sequence[Sequence[WorkerSpec]],
        standbys: Sequence[StandbySpec] = (),
    ) -> None:
        """Say what to start: replicas, the draft workers of each, and what takes the replicas' place when none serves.
        To be called before `start`."""
        self._post(WorkersChosen(specs, list(chain.from_iterable(drafts)), standbys, self._limits.failover))

    def prepares(self, progress: Progress) -> None:
        """Something goes on before there is anything to start."""
        self._preparing = format_progress(progress)

    def give_up(self, reason: str) -> None:
        """Say that nothing of this serves, nor ever will. To be called instead of `start`, or where what a worker says
        cannot be served."""
        self._preparing, self._given_up = reason, True
        self._settled.set()
        self._failed.set()

    async def start(self) -> None:
        """Begin to open the cluster and start the workers; returns at once (see `wait_settled`)."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="open the cluster")

    async def wait_settled(self) -> StateView:
        """Wait until a worker was ready once, or all have failed for good, or control was closed."""
        await self._settled.wait()
        return self.view()

    def look(self) -> None:
        """Look for what is due, as after a WakeAfter: whoever calls this knows afterwards that control works."""
        self._post(Woke())

    async def wait_failed(self) -> str:
        """Wait until no worker can ever serve; returns why."""
        await self._failed.wait()
        return self.view().detail

    def view(self) -> StateView:
        """See control.port.Control. Of very many replicas it is put together once a second, and when one comes or
        goes."""
        state, now_s = self._state, self._clock.monotonic_s()
        if state.fleet.candidates is None:
            return self._look(now_s)
        state.fleet.refresh()
        key = (state.fleet.turns, state.draining, self._given_up)
        if self._seen is None or self._seen[0] != key or not self._seen[1] <= now_s < self._seen[1] + _VIEWED_S:
            self._seen = (key, now_s, self._look(now_s))
        return self._seen[2]

    def _look(self, now_s: float) -> StateView:
        state = self._state
        serving, uptime_s = state.replicas.serving, now_s - self._started_s
        if not serving or self._given_up:
            phase = DRAINING if state.draining else FAILED if self._given_up else STARTING
            devices = state.loads.view(now_s)
            told = (phase, self._preparing, "", self._cluster.runtime, None, None)
            return StateView(*told, uptime_s=uptime_s, devices=devices, cluster_away=self._cluster.away)
        replicas = [self._view_replica(one, now_s) for one in serving]
        held, gauges = state.streams.held, replicas[0].gauges
        if held and gauges is not None:  # they wait, and no worker knows of them
            waiting = msgspec.structs.replace(gauges, waiting=gauges.waiting + held)
            replicas[0] = replace(replicas[0], gauges=waiting)
        view = self._tell_whether_it_serves(
            whole(
                replicas,
                self._cluster.runtime,
                streams=len(state.streams),
                uptime_s=uptime_s,
                draining=state.draining,
            )
        )
        plan = self.plan_view(view.replicas) if self.plan_view is not None else None
        least = self._limits.least_depth
        if view.ready is not None:
            theirs = bounds_of(view.ready, least, CanaryVariant.CANARY.value)
            view = replace(view, bounds=bounds_of(view.ready, least), canary_bounds=theirs)
        shown = replace(view, totals=add_totals([state.replicas.gone, view.totals]), plan=plan)
        idle = [self._view_replica(one, now_s) for one in state.standbys.list_idle()]
        drafts = state.drafts.views()
        out = judge_workers([*replicas, *idle], drafts, state.standbys.list_refused())
        shown = replace(
            shown,
            drafts=drafts,
            overrides=self._overrides,
            losses=dict(state.losses),
            kv_moves=dict(state.router.moves.totals),
            health=(*state.health.views(now_s), *out),
            standbys=tuple(idle),
            taken_over=dict(state.standbys.taken),
            devices=state.loads.view(now_s),
            scaling=self.scale_view() if self.scale_view is not None else None,
            draft_store=self.draft_store_view() if self.draft_store_view is not None else None,
            recent_outputs=self.recent_outputs_view() if self.recent_outputs_view is not None else None,
            quarantined=len(state.blame.list_quarantined(now_s)),
            cluster_away=self._cluster.away,
        )
        kept = describe_held(shown) if shown.phase == READY else ""
        return replace(shown, detail=kept) if kept else shown

    def _tell_whether_it_serves(self, view: StateView) -> StateView:
        """Return the view with the phase that requests meet: ready where they are served, and at no other time."""
        coming = self._state.rollout.list_coming() if view.phase == FAILED else []
        if coming:
            started = f"{', '.join(coming)} starts in place of what has failed: {view.detail}"
            return replace(view, phase=STARTING, detail=started)
        why = self.explain_unserved(view.ready) if view.phase == READY and view.ready is not None else ""
        return replace(view, phase=STARTING, detail=why) if why else view

    def _view_replica(self, replica: Replica, now_s: float) -> ReplicaView:
        live = self._state.streams.counts[replica.name]
        silent_s = now_s - max(replica.life.heard_s, replica.busy_s)
        ready = replica.state.ready
        view = replica.state.view(replica.engine, live, silent_s, now_s)
        if replica.standby:
            view.standby = True
            view.unlike = unlike_any(ready, self._state.replicas.primary) if ready is not None else ""
        if self._state.health.holds:
            judged = self._state.health.judge(replica.parts, now_s, replica.name)
            view.held = judged.why if judged.held else ""
        view.draft, view.route = replica.draft, replica.taken_by
        view.device = replica.device if replica.spec.device else ""
        return view

    def hold(self, kind: PartKind, name: str, held: Held) -> None:
        """See control.port.AdminControl."""
        part = Part(kind, name)
        known = self._state.list_parts()
        if part not in known:
            there = ", ".join(sorted(str(one) for one in known))
            raise RequestError(f"there is no {part}; there is: {there}", status=404, code="part_not_found")
        self._post(PartHeld(part, Health(held) if held else None))

    def observe_load(self, samples: Mapping[str, DeviceLoad]) -> None:
        """Take in what devices do, by "HOST/DEVICE", of whichever host ("here": the daemon's). The one way for live
        state to come in; who samples a host calls it each second or so. To be called in the event loop."""
        self._post(LoadObserved(samples))

    def list_loads(self) -> dict[str, DeviceLoad]:
        """Return what devices do, by "HOST/DEVICE", as whoever plans takes it (control.routing.loads)."""
        return self._state.loads.list_loads()

    def measure_replicas(self) -> SeenReplicas:
        """Return how much the replicas have to do now, for whoever decides on their number."""
        return measure_load(self._state, self._clock.monotonic_s())

    def list_workers(self) -> list[int]:
        """Return the numbers of the processes that say they are our workers, on whichever host."""
        replicas = self._state.replicas.list_ranked(*Rank)
        targets = [ready for one in replicas if (ready := one.state.ready) is not None]
        drafts = [one.ready.pid for one in self._state.drafts.views() if one.ready is not None]
        parts = [pid for ready in targets for pid in ready.shards.pids]
        return [*(ready.pid for ready in targets), *parts, *drafts]

    def explain(self, request_id: str) -> list[RouteView]:
        """See control.port.AdminControl."""
        found = self._state.router.book.find(request_id, self._clock.monotonic_s())
        if not found:
            text = f"nothing is known of a request {request_id}: it was refused, or others have come since"
            raise RequestError(text, status=404, code="request_not_found")
        return found

    def override(self, wanted: Override | None, asked_by: str, *, user: str = "", engine: int | None = None) -> None:
        """See control.port.AdminControl."""
        engines = [replica.engine for replica in self._state.replicas.serving]
        scope = OverrideScope(user, engine)
        changed = change_overrides(self._overrides, scope, wanted, asked_by, engines, self._clock.wall_s())
        self._overrides, concerned = changed
        for whom in concerned:
            _entries.info("speculation override", **whom, override=format_override(wanted), asked_by=asked_by)

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        """See control.port.Control."""
        now_s = self._clock.monotonic_s()
        asked = Asked(wanted, coming)
        if self._opening is None:
            self.awaited.set()
        if self._given_up:
            refuse_or_pass(self.view(), self._limits, self._state.streams, now_s, asked)
        else:
            check_room(self._state, self._limits, self.view, now_s, asked)

    def find_speculation(self, submit: Submit) -> EffectiveBound | None:
        """See control.port.Control."""
        return self._state.router.find_speculation(submit, self._overrides)

    def list_quarantined(self) -> list[QuarantinedView]:
        """See control.port.AdminControl."""
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        return [
            QuarantinedView(
                *(one.digest, one.request_id, one.prompt_tokens, one.deaths, one.cause),
                since_s=wall_s - (now_s - one.since_s),
                until_s=wall_s + (one.until_s - now_s),
            )
            for one in self._state.blame.list_quarantined(now_s)
        ]

    def release_quarantined(self, digests: Sequence[str]) -> list[str]:
        """See control.port.AdminControl."""
        known = {one.digest for one in self.list_quarantined()}
        self._post(QuarantineReleased(digests))
        return [digest for digest in digests if digest in known]

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See control.port.Control. A request is taken in (or refused) when its first token is asked for."""
        self.check_room()
        end_s = deadline_s(submit, self._limits.request_timeout_s, self._clock)
        reader = self._open_stream(submit)
        try:
            while True:
                item = await next_item(reader, end_s, self._clock)
                if isinstance(item, RequestError):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            self._close_stream(submit.request_id, reader)

    async def change(
        self,
        specs: Sequence[WorkerSpec],
        drafts: Sequence[Sequence[WorkerSpec]],
        standbys: Sequence[StandbySpec] | None = None,
        draft_pools: Mapping[str, PoolSize] | None = None,
    ) -> list[int]:
        """Let these be the replicas, with the draft workers of each, while streams go on; returns their numbers.
        `standbys` and `draft_pools` None: as before.

        What runs one of these specs stays, whatever it is called. New ones are started beside the old ones. When all
        are ready, those that are left over give their streams to the other replicas and are stopped. Where their tokens
        could differ (another runtime or precision), they keep the streams that have a token. They are then stopped when
        the last has ended, and only then does this return. Raises WorkerError where a new one does not become ready, or
        would say other tokens than one that stays; then everything goes on as it was.
        """
        async with self._changing:
            self._changed = asyncio.get_running_loop().create_future()
            self._post(RolloutAsked(specs, list(chain.from_iterable(drafts)), standbys, draft_pools))
            try:
                return await self._changed
            except asyncio.CancelledError:
                self._post(RolloutDropped())
                raise

    async def retune(
        self,
        specs: Mapping[int, WorkerSpec],
        drafts: Sequence[Sequence[WorkerSpec]],
        standbys: Sequence[StandbySpec],
        draft_pools: Mapping[str, PoolSize],
    ) -> None:
        """Let replicas, by their numbers, decode by other options in the workers that they have; streams go on. Returns
        when all do. Raises WorkerError where one cannot, and stays as it was."""
        async with self._changing:
            self._retuned = asyncio.get_running_loop().create_future()
            drafted = list(chain.from_iterable(drafts))
            self._post(RetuneAsked(specs, drafted, standbys, draft_pools))
            await self._retuned

    def list_specs(self) -> dict[int, WorkerSpec]:
        """Return what the workers of the replicas are started from, by the replicas' numbers; standbys left out."""
        return {one.engine: one.spec for one in self._state.replicas.primary if not one.standby}

    def list_identities(self) -> Mapping[str, ModelIdentity]:
        """Return the content that each model had when it was loaded first, by its source."""
        return self._state.identities.known

    def list_ready(self) -> list[Ready]:
        """Return what workers say of themselves that are ready, standbys among them."""
        ready = [one.state.ready for one in self._state.replicas.list_all()]
        return [one for one in ready if one is not None]

    def list_replaced(self) -> list[int]:
        """Return the replicas, by their numbers, that have failed as their model is neither at its place nor in the
        store; standbys left out."""
        return [one.engine for one in self._state.replicas.primary if has_lost_model(one)]

    def list_unwell(self) -> dict[Part, PartHealth]:
        """Return the parts that are not healthy, as `on_health` hears of them."""
        return dict(self._state.unwell)

    def set_limits(self, limits: ControlLimits) -> None:
        """Take requests in, bound and route them by these from now on. `max_restarts` stays as it is."""
        self._limits = limits
        bounds = (limits.least_depth, limits.quarantine_s, limits.failover)
        self._post(RulesChanged(_surround(limits), *bounds))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the live streams end for up to `timeout_s`, then end the rest with 503."""
        self._post(DrainBegun(timeout_s))
        if self._reading:
            self._all_read.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_read.wait()
        self._post(DrainOver(timeout_s))

    async def close(self) -> None:
        """End every stream, the workers and the cluster. Idempotent."""
        if self._opening is not None:
            self._opening.cancel()
        self._post(ControlClosed())
        if self._opening is not None:
            await asyncio.wait([self._opening])
        await self._supervisor.wait_ended()
        await self._cluster.close()
        self._memories.close()
        self._settled.set()

    async def _open(self) -> None:
        try:
            await self._cluster.open()
        except WorkerError as error:
            self._post(ClusterFailed(str(error)))
        else:
            self._post(ClusterOpened())

    def _open_stream(self, submit: Submit) -> Reader:
        """Take in a request. Raises RequestError where its id is in use."""
        now_s = self._clock.monotonic_s()
        actions = step(self._state, StreamOpened(submit, self._overrides), now_s)
        stream = self._state.streams.find(submit.request_id)
        assert stream is not None  # noqa: S101 -- it was opened just now, and only a worker's event ends it
        reader = self._readers[submit.request_id] = Reader(stream)
        self._reading += 1
        self._carry_out(actions)
        return reader

    def _close_stream(self, key: str, reader: Reader) -> None:
        self._reading -= 1
        if not self._reading:
            self._all_read.set()
        if self._readers.get(key) is reader:  # it has not ended
            del self._readers[key]
            self._post(StreamClosed(key))

    def _post(self, event: ControlEvent) -> None:
        self._carry_out(step(self._state, event, self._clock.monotonic_s()))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Send(worker, Retune(options)):
                self._supervisor.send(worker, Retune(self._state.identities.pin_options(options)))
            case Send(worker, command):
                self._supervisor.send(worker, command)
            case AskPages(worker, key, sent_id, most_bytes, link):
                memory = self._memories.create(key, most_bytes) if link is None else SharedMemory("", key, 0)
                self._supervisor.send(worker, MoveOut(sent_id, memory, link))
            case DropPages(key):
                self._memories.remove(key)
            case Deliver(key, delta):
                self._hand_over(key, delta, ends=bool(delta.finish))
            case EndStream(key, error):
                self._hand_over(key, error, ends=True)
            case StartWorker():
                self._supervisor.start(action)
            case StopWorker():
                self._supervisor.stop(action)
            case TellResumed(resumed):
                _notify(self.on_resumed, resumed)
            case LogLine(level, text, values):
                _log.log(_LEVELS[level.upper()], text, *values)
            case _:
                self._tell(action)

    def _tell(self, action: _Told) -> None:
        match action:
            case Settle():
                self._settled.set()
                serving = self._state.replicas.serving
                if all(one.state.phase == FAILED for one in serving) and not any(map(has_lost_model, serving)):
                    self._failed.set()
                else:
                    self._failed.clear()
            case WakeAfter(after_s):
                asyncio.get_running_loop().call_later(after_s, self._post, Woke())
            case FinishRollout(engines, error) if self._changed is not None and not self._changed.done():
                if error:
                    self._changed.set_exception(WorkerError(error))
                else:
                    self._changed.set_result(list(engines))
            case FinishRetune(error) if self._retuned is not None and not self._retuned.done():
                if error:
                    self._retuned.set_exception(WorkerError(error))
                else:
                    self._retuned.set_result(None)
            case TellGauges(replica, before, now):
                tell_changes(replica, before, now)
            case _:
                self._tell_observers(action)

    def _tell_observers(self, action: _Told) -> None:
        match action:
            case TellHealth(unwell):
                _notify(self.on_health, unwell)
            case TellLoads():
                _notify(self.on_loads, action)
            case TellLacking():
                _notify(self.on_lacking, action)
            case TellRefused():
                _notify(self.on_refused, action)
            case Notify(event):
                _notify(self.on_round, event) if isinstance(event, RoundReport) else _notify(self.on_progress, event)
            case _:
                pass

    def _hand_over(self, key: str, item: Delta | RequestError, *, ends: bool) -> None:
        self._readers[key].items.put_nowait(item)
        if ends:
            del self._readers[key]


def _surround(limits: ControlLimits) -> Surroundings:
    return Surroundings.of(limits.routing, limits.request_timeout_s, limits.ttft.ms or 0.0)


def _notify(observers: list[Callable[[_T], None]], event: _T) -> None:
    for observer in observers:
        try:
            observer(event)
        except Exception:
            _log.exception("an observer failed")

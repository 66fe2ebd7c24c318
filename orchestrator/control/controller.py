"""Keeps the target's replicas running and their streams alive: observe -> (one step of state) -> act.

When a replica is lost, its streams go to another one, or pause where there is none. Whoever takes them gets every live
stream with the tokens that were delivered, and goes on with the very next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import msgspec

from orchestrator.clock import Clock
from orchestrator.control.admission import ControlLimits, refuse_or_pass
from orchestrator.control.deadlines import deadline_s, next_item
from orchestrator.control.draft_workers import DraftWorkers
from orchestrator.control.event_log import tell_changes
from orchestrator.control.overrides import Overrides, bounds_of
from orchestrator.control.port import PlanView, StateView
from orchestrator.control.replica import Replica
from orchestrator.control.replicas import ALIKE, Replicas
from orchestrator.control.rollout import Rollout
from orchestrator.control.router import LOSSES_ARE_KNOWN_S, Router
from orchestrator.control.state import DRAINING, FAILED, STARTING, add_totals, format_progress, whole
from orchestrator.control.streams import Streams
from orchestrator.control.supervisor import SupervisorSettings
from orchestrator.errors import RequestError, WorkerError
from orchestrator.workers.contract import Cluster, WorkerSpec
from orchestrator.workers.draft_messages import AttachDraft, DraftLink
from orchestrator.workers.messages import Delta, Event, Gauges, Progress, Ready, Refused, RoundReport, Submit
from policies.serving.canary import CanaryVariant
from policies.serving.overrides import Override

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class TargetControl:
    """Implements control.port.Control over workers of `cluster`, which it opens and closes: one replica a spec. All
    must serve the same model in the same way. Without specs it has nothing to start until `set_specs` was called.

    `drafts` are started beside them once one is ready, each as often as there are replicas; nothing waits for them.
    `plan_view` says what a plan predicts, where there is one. `on_round` and `on_progress` are called with each event,
    in the event loop; what they raise is logged.
    """

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[WorkerSpec],
        limits: ControlLimits,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        drafts: Sequence[WorkerSpec] = (),
    ) -> None:
        self.plan_view: Callable[[], PlanView] | None = None
        self.on_round: list[Callable[[RoundReport], None]] = []
        self.on_progress: list[Callable[[Progress], None]] = []
        self._cluster = cluster
        self._limits = limits
        self._clock = clock
        self._upkeep = SupervisorSettings(cluster, limits.max_restarts, clock, sleep)
        self._streams = Streams()
        self._replicas = Replicas(self._upkeep, self)
        self._wishes = Overrides(clock)
        self._router = Router(self._replicas.serving, self._replicas.retiring, self._streams, clock, limits.least_depth)
        self._drafts = DraftWorkers(self._upkeep, self._attach)
        self._exchange = Rollout(self._replicas, self._router, self._drafts)
        self._preparing = "the workers are being planned"
        self.set_specs(specs, [drafts] * len(specs))
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._draining = False
        self._started_s = clock.monotonic_s()

    def set_specs(self, specs: Sequence[WorkerSpec], drafts: Sequence[Sequence[WorkerSpec]]) -> None:
        """Say what to start: replicas, and the draft workers of each. To be called before `start`."""
        self._replicas.create_replicas(specs)
        self._drafts.run_these(list(chain.from_iterable(drafts)))

    def prepares(self, progress: Progress) -> None:
        """Something goes on before there is anything to start."""
        self._preparing = format_progress(progress)

    async def start(self) -> None:
        """Begin to open the cluster and start the workers; returns at once (see `wait_settled`)."""
        if self._task is None:
            self._task = asyncio.create_task(self._open(), name="open the cluster")

    async def wait_settled(self) -> StateView:
        """Wait until a worker was ready once, or all have failed for good, or control was closed."""
        await self._settled.wait()
        return self.view()

    def view(self) -> StateView:
        """See control.port.Control."""
        now_s = self._clock.monotonic_s()
        if not self._replicas.serving:
            uptime_s, phase = now_s - self._started_s, DRAINING if self._draining else STARTING
            return StateView(phase, self._preparing, "", self._cluster.runtime, None, None, uptime_s=uptime_s)
        live = self._streams.counts
        replicas = [
            one.state.view(one.engine, live[one.name], now_s - max(one.heard_s, one.busy_s))
            for one in self._replicas.serving
        ]
        view = whole(
            replicas,
            self._cluster.runtime,
            streams=len(self._streams),
            uptime_s=now_s - self._started_s,
            draining=self._draining,
        )
        plan = self.plan_view() if self.plan_view is not None else None
        least = self._limits.least_depth
        if view.ready is not None:
            theirs = bounds_of(view.ready, least, CanaryVariant.CANARY.value)
            view = replace(view, bounds=bounds_of(view.ready, least), canary_bounds=theirs)
        shown = replace(view, totals=add_totals([self._replicas.gone, view.totals]), plan=plan)
        return replace(shown, drafts=self._drafts.views(), wishes=self._wishes.standing)

    def wish(self, wish: Override | None, asked_by: str, *, user: str = "", engine: int | None = None) -> None:
        """See control.port.Control."""
        engines = [replica.engine for replica in self._replicas.serving]
        self._wishes.take(wish, asked_by, user=user, engine=engine, engines=engines)

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See control.port.Control. A request is taken in (or refused) when its first token is asked for."""
        refuse_or_pass(self.view(), self._limits, self._streams)
        end_s = deadline_s(submit, self._limits.request_timeout_s, self._clock)
        stream = self._streams.open(submit, self._wishes.standing)
        try:
            self._router.feed()
            while True:
                item = await next_item(stream, end_s, self._clock)
                if isinstance(item, RequestError):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            if self._streams.close(stream):
                self._router.cancel(stream)
            self._router.feed()  # a trial may be over

    async def change(self, specs: Sequence[WorkerSpec], drafts: Sequence[Sequence[WorkerSpec]]) -> list[int]:
        """Let these be the replicas, with the draft workers of each, while streams go on; returns their numbers.

        What runs one of these specs stays, whatever it is called. New ones are started beside the old ones. When all
        are ready, those that are left over give their streams to the other replicas and are stopped. Where their tokens
        could differ (another runtime or precision), they keep the streams that have a token. They are then stopped when
        the last has ended, and only then does this return. Raises WorkerError where a new one does not become ready, or
        would say other tokens than one that stays; then everything goes on as it was.
        """
        return await self._exchange.change(specs, drafts)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the live streams end for up to `timeout_s`, then end the rest with 503."""
        self._draining = True
        _log.info("draining: %d streams are being finished, for %g s at most", len(self._streams), timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._streams.all_read()
        if len(self._streams):
            _log.warning("drain timed out after %g s: %d streams are cut off", timeout_s, len(self._streams))
        self._end_streams("the server is shutting down; send the request again")

    async def close(self) -> None:
        """End every stream, the workers and the cluster. Idempotent."""
        self._draining = self._replicas.closed = True
        self._end_streams("the server is shutting down; send the request again")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(self._drafts.close(), self._replicas.close())
        await self._cluster.close()
        self._settled.set()

    async def _open(self) -> None:
        try:
            await self._cluster.open()
        except WorkerError as error:  # the cluster cannot be opened
            for replica in self._replicas.serving:
                replica.state.mark_failed(str(error))
            self._settle_failed(str(error))
        else:
            for replica in self._replicas.serving:
                replica.start()

    def handle_replica_event(self, replica: Replica, event: Event) -> None:
        """See control.replica.Owner: fold one event into the state and pass it on."""
        if isinstance(event, Ready) and (why := self._replicas.unlike_before(replica, event)):
            replica.refuse(
                f"{replica.name} serves with {why}: its tokens would differ from the other replicas'; {ALIKE}"
            )
            return
        if replica not in self._replicas:  # nobody waits for what it says
            replica.state.observe(event)
            return
        delivered = 0
        if isinstance(event, RoundReport):
            event, delivered = self._deliver(replica, event)
        again = replica.state.phase != STARTING
        gauges = replica.state.gauges
        replica.state.observe(event, delivered)
        match event:
            case RoundReport():
                self._router.feed()
                _notify(self.on_round, event)
            case Gauges():
                tell_changes(replica.name, gauges, event)
            case Progress():
                _notify(self.on_progress, event)
            case Ready():
                self._settled.set()
                _log.info(
                    "worker %s ready%s: %s, %d streams go on",
                    *(replica.name, " again" if again else "", replica.state.where, len(self._streams)),
                )
                self._router.feed()
                if replica in self._replicas.serving:
                    self._drafts.target_ready(replica.name, event.all_drafters)
            case DraftLink():
                self._drafts.observe(replica.name, event)
            case Refused():
                self._streams.fail(self._streams.find_sent(event.request_id), _refusal(event))
                self._router.feed()

    def _deliver(self, replica: Replica, done: RoundReport) -> tuple[RoundReport, int]:
        """Hand a round's deltas to their streams; returns it with its replica's number, and the tokens delivered."""
        if replica.engine:
            deltas = [msgspec.structs.replace(delta, engine=replica.engine) for delta in done.deltas]
            done = msgspec.structs.replace(done, deltas=deltas, engine=replica.engine)
        now_s = self._clock.monotonic_s()
        delivered = sum(self._streams.deliver(delta, now_s) for delta in done.deltas)
        self._replicas.count_for_heir(replica, done, delivered)
        return done, delivered

    def handle_replica_loss(self, replica: Replica, cause: str) -> None:
        """See control.replica.Owner: its streams go on elsewhere; a request that kills workers is ended here."""
        if replica not in self._replicas:
            return
        culprit = self._router.recall_streams(replica)
        if culprit is not None:
            _log.error("request %s is ended: its worker died each time it ran; %s", culprit.key, cause)
            self._streams.fail(
                culprit, _build_broken_error("the worker died each time it ran this request; it is not tried again")
            )
        if not self._replicas.closed:
            self._router.feed()
            asyncio.get_running_loop().call_later(LOSSES_ARE_KNOWN_S, self._router.feed)  # a trial may wait for that

    def handle_replica_failure(self, replica: Replica, cause: str) -> None:
        """See control.replica.Owner."""
        if replica not in self._replicas.serving:
            return
        if all(other.state.phase == FAILED for other in self._replicas.serving):
            self._settle_failed(cause)
        else:
            self._drafts.detach_target(replica.name)

    def _settle_failed(self, cause: str) -> None:
        self._settled.set()
        self._end_streams(f"the model has failed: {cause}")
        self._drafts.stop()

    def _attach(self, name: str, command: AttachDraft) -> None:
        for replica in self._replicas.serving:
            if replica.name == name:
                replica.send(command)

    def _end_streams(self, message: str) -> None:
        for stream in self._streams.live():
            error = RequestError(message, status=503, kind="server_error", code="interrupted", retry_after_s=10)
            self._streams.fail(stream, error)
            self._router.cancel(stream)


def _refusal(event: Refused) -> RequestError:
    if event.kind == "invalid":
        return RequestError(event.message, status=400)
    return _build_broken_error(event.message)


def _build_broken_error(message: str) -> RequestError:
    return RequestError(message, status=500, kind="server_error", code="failed")


def _notify(observers: list[Callable[[_T], None]], event: _T) -> None:
    for observer in observers:
        try:
            observer(event)
        except Exception:
            _log.exception("an observer failed")

"""Keeps the target's replicas running and their streams alive: observe -> (one step of state) -> act.

A replica that is lost costs its streams the way to another one, or a pause where there is none: whoever takes them gets
every live stream with the tokens that were delivered, and goes on with the very next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, count
from typing import TypeVar

import msgspec

from orchestrator.clock import Clock
from orchestrator.cluster.contract import Cluster, WorkerSpec
from orchestrator.cluster.draft_messages import AttachDraft, DraftLink
from orchestrator.cluster.port import DEADLINE, Delta, Event, Gauges, Progress, Ready, Refused, Round, Submit
from orchestrator.control import low_acceptance
from orchestrator.control.admission import ControlLimits as ControlLimits
from orchestrator.control.admission import refuse_or_pass
from orchestrator.control.arrangement import arranged
from orchestrator.control.drafts import DraftWorkers
from orchestrator.control.keeping import Upkeep
from orchestrator.control.port import PlanView, StateView, Totals
from orchestrator.control.replica import Replica
from orchestrator.control.router import LOSSES_ARE_KNOWN_S, Router
from orchestrator.control.state import (
    DRAINING,
    FAILED,
    STARTING,
    added_totals,
    failed_drafters,
    fold_round,
    moved_levers,
    told,
    unlike,
    whole,
)
from orchestrator.control.streams import Stream, Streams
from orchestrator.control.wishes import Wishes, bounds_of
from orchestrator.errors import RequestError, WorkerError
from policies.wishes import Wish

_LEAVING_POLL_S = 0.05
_ALIKE = "set the precision in cluster.yaml, and use one set of library versions"

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class TargetControl:
    """Implements control.port.Control over workers of `cluster`, which it opens and closes: one replica a spec. All
    must serve the same model in the same way. Without specs it has nothing to start until `named` was called.

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
        self.on_round: list[Callable[[Round], None]] = []
        self.on_progress: list[Callable[[Progress], None]] = []
        self._cluster = cluster
        self._limits = limits
        self._clock = clock
        self._upkeep = Upkeep(cluster, limits.max_restarts, clock, sleep)
        self._streams = Streams()
        self._replicas: list[Replica] = []
        self._retiring: list[Replica] = []
        self._wishes = Wishes(clock)
        self._joining: list[Replica] = []
        self._router = Router(self._replicas, self._retiring, self._streams, clock, limits.least_depth)
        self._changing = asyncio.Lock()
        self._drafts = DraftWorkers(self._upkeep, self._attach)
        self._gone = Totals()  # of replicas that have no heir
        self._preparing = "the workers are being planned"
        self.named(specs, [drafts] * len(specs))
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._draining = False
        self._closed = False
        self._started_s = clock.monotonic_s()

    def named(self, specs: Sequence[WorkerSpec], drafts: Sequence[Sequence[WorkerSpec]]) -> None:
        """Say what to start: replicas, and the draft workers of each. To be called before `start`."""
        for engine, spec in enumerate(specs):
            self._replicas.append(self._replica(spec, engine))
        self._drafts.run_these(list(chain.from_iterable(drafts)))

    def prepares(self, progress: Progress) -> None:
        """Something goes on before there is anything to start."""
        self._preparing = told(progress)

    def _replica(self, spec: WorkerSpec, engine: int) -> Replica:
        taken = {replica.name for replica in (*self._replicas, *self._joining, *self._retiring)}
        name = next(name for name in chain([spec.name], map(f"{spec.name}.{{}}".format, count(2))) if name not in taken)
        return Replica(self._upkeep, spec, name, engine, self)

    async def start(self) -> None:
        """Begin to open the cluster and start the workers; returns at once (see `settled`)."""
        if self._task is None:
            self._task = asyncio.create_task(self._open(), name="open the cluster")

    async def settled(self) -> StateView:
        """Wait until a worker was ready once, or all have failed for good, or control was closed."""
        await self._settled.wait()
        return self.view()

    def view(self) -> StateView:
        """See control.port.Control."""
        now_s = self._clock.monotonic_s()
        if not self._replicas:
            uptime_s, phase = now_s - self._started_s, DRAINING if self._draining else STARTING
            return StateView(phase, self._preparing, "", self._cluster.runtime, None, None, uptime_s=uptime_s)
        live = self._streams.counts
        replicas = [
            one.state.view(one.engine, live[one.name], now_s - max(one.heard_s, one.busy_s)) for one in self._replicas
        ]
        view = whole(
            replicas,
            self._cluster.runtime,
            streams=len(self._streams),
            uptime_s=now_s - self._started_s,
            draining=self._draining,
        )
        plan = self.plan_view() if self.plan_view is not None else None
        bounds = bounds_of(view.ready, self._limits.least_depth) if view.ready is not None else None
        shown = replace(view, totals=added_totals([self._gone, view.totals]), plan=plan)
        return replace(shown, drafts=self._drafts.views(), bounds=bounds, wishes=self._wishes.standing)

    def wish(self, wish: Wish | None, asked_by: str, *, user: str = "", engine: int | None = None) -> None:
        """See control.port.Control."""
        engines = [replica.engine for replica in self._replicas]
        self._wishes.take(wish, asked_by, user=user, engine=engine, engines=engines)

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See control.port.Control. A request is taken in (or refused) when its first token is asked for."""
        refuse_or_pass(self.view(), self._limits, self._streams)
        deadline_s = self._deadline_s(submit)
        stream = self._streams.open(submit, self._wishes.standing)
        try:
            self._router.feed()
            while True:
                item = await self._next(stream, deadline_s)
                if isinstance(item, RequestError):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            if self._streams.close(stream):
                self._router.cancel(stream)
            self._router.feed()  # a trial may be over

    def _deadline_s(self, submit: Submit) -> float:
        """Return when the request's time is over, by the clock."""
        bounds = [bound for bound in (submit.timeout_s, self._limits.request_timeout_s) if bound > 0.0]
        return self._clock.monotonic_s() + min(bounds, default=math.inf)

    async def _next(self, stream: Stream, deadline_s: float) -> Delta | RequestError:
        """Return what comes next; at the deadline the end of what there is, or an error where there is nothing."""
        if deadline_s == math.inf:
            return await stream.items.get()
        try:
            async with asyncio.timeout(deadline_s - self._clock.monotonic_s()):
                return await stream.items.get()
        except TimeoutError:
            if stream.committed:
                return Delta(stream.key, [], DEADLINE, stream.last_stats)
            message = "the request's time was over before its first token came; give it longer, or try again later"
            return RequestError(message, status=504, kind="server_error", code="deadline_exceeded", param="timeout_s")

    async def change(self, specs: Sequence[WorkerSpec], drafts: Sequence[Sequence[WorkerSpec]]) -> list[int]:
        """Let these be the replicas, with the draft workers of each, while streams go on; returns their numbers.

        What runs one of these specs stays, whatever it is called. New ones are started beside the old ones. When all
        are ready, those that are left over give their streams to the others and are stopped; where their tokens could
        differ (another runtime or precision) they keep the streams that have a token, and are stopped when the last has
        ended; this returns then. Raises WorkerError where a new one does not become ready, or would say other tokens
        than one that stays; then everything goes on as it was.
        """
        async with self._changing:
            made = arranged(self._replicas, specs)
            stay = [replica for replica in self._replicas if replica.engine in made.kept]
            leaving = [replica for replica in self._replicas if replica not in stay]
            new = await self._all_ready(made.coming, stay)
            self._switch(leaving, new)
            self._drafts.run_these(list(chain.from_iterable(drafts)))
            await asyncio.gather(*(self._ended(old) for old in leaving))
            return list(made.engines)

    async def _all_ready(self, coming: Sequence[tuple[int, WorkerSpec]], stay: Sequence[Replica]) -> list[Replica]:
        """Return new replicas when all serve, alike and like those that stay. Raises WorkerError."""
        new: list[Replica] = []
        for engine, spec in coming:
            new.append(self._replica(spec, engine))
            self._joining.append(new[-1])
        try:
            for one in new:
                one.start()
            for one in new:
                await one.settled.wait()
                if not one.serving or self._closed:
                    raise WorkerError(f"worker {one.name} cannot serve: {one.state.detail}")
                if one.state.ready is not None and (why := self._unlike(one, one.state.ready, (*stay, *new))):
                    raise WorkerError(f"worker {one.name} cannot serve beside the others, with {why}; {_ALIKE}")
        except BaseException:
            await asyncio.gather(*(one.close() for one in new))
            raise
        finally:
            self._joining = [one for one in self._joining if one not in new]
        return new

    def _switch(self, leaving: Sequence[Replica], coming: Sequence[Replica]) -> None:
        """Route to the new replicas and move the streams of those that leave, without waiting for anything."""
        stay = [replica for replica in self._replicas if replica not in leaving]
        self._replicas[:] = sorted((*stay, *coming), key=lambda replica: replica.engine)
        for old in leaving:
            heir, moved = self._heir(old), self._router.retire(old)
            if heir is not None:
                heir.state.totals = added_totals([old.state.totals, heir.state.totals])
                _log.info("worker %s takes the place of %s: %d streams move", heir.name, old.name, moved)
            else:
                self._gone = added_totals([self._gone, old.state.totals])
                _log.info("worker %s is not needed any more: %d streams move", old.name, moved)
        self._router.feed()
        for old in leaving:
            self._drafts.target_gone(old.name)
        for one in coming:
            if one.state.ready is not None:
                self._drafts.target_ready(one.name, one.state.ready.drafters)

    def _heir(self, old: Replica) -> Replica | None:
        """Return the replica that is in the place of one that leaves; None where there is none."""
        return next((one for one in self._replicas if one.engine == old.engine), None)

    async def _ended(self, old: Replica) -> None:
        """Stop a replica that is retiring when no stream needs it any more."""
        while not (self._closed or old.state.phase == FAILED or self._router.left(old)):  # noqa: ASYNC110 -- rare
            await asyncio.sleep(_LEAVING_POLL_S)
        self._retiring.remove(old)
        await old.close()

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
        self._draining = self._closed = True
        self._end_streams("the server is shutting down; send the request again")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        everyone = (*self._replicas, *self._joining, *self._retiring)
        await asyncio.gather(self._drafts.close(), *(one.close() for one in everyone))
        await self._cluster.close()
        self._settled.set()

    async def _open(self) -> None:
        try:
            await self._cluster.open()
        except WorkerError as error:  # the cluster cannot be opened
            for replica in self._replicas:
                replica.state.failed(str(error))
            self._all_failed(str(error))
        else:
            for replica in self._replicas:
                replica.start()

    def observed(self, replica: Replica, event: Event) -> None:
        """See control.replica.Owner: fold one event into the state and pass it on."""
        if isinstance(event, Ready) and replica in self._replicas and (why := self._unlike_before(replica, event)):
            replica.refuse(
                f"{replica.name} serves with {why}: its tokens would differ from the other replicas'; {_ALIKE}"
            )
            return
        if replica not in self._replicas and replica not in self._retiring:  # nobody waits for what it says
            replica.state.observe(event)
            return
        delivered = 0
        if isinstance(event, Round):
            event, delivered = self._deliver(replica, event)
        again = replica.state.phase != STARTING
        gauges = replica.state.gauges
        replica.state.observe(event, delivered)
        match event:
            case Round():
                self._router.feed()
                _notify(self.on_round, event)
            case Gauges():
                low_acceptance.tell_begun(replica.name, gauges, event)
                _tell_changes(replica.name, gauges, event)
            case Progress():
                _notify(self.on_progress, event)
            case Ready():
                self._settled.set()
                _log.info(
                    "worker %s ready%s: %s, %d streams go on",
                    *(replica.name, " again" if again else "", replica.state.where, len(self._streams)),
                )
                self._router.feed()
                if replica in self._replicas:
                    self._drafts.target_ready(replica.name, event.drafters)
            case DraftLink():
                self._drafts.observe(replica.name, event)
            case Refused():
                self._streams.fail(self._streams.known_as(event.request_id), _refusal(event))
                self._router.feed()

    def _unlike_before(self, replica: Replica, ready: Ready) -> str:
        """Return in what a worker that is ready for the first time differs from those whose tokens streams have."""
        return "" if replica.state.ready is not None else self._unlike(replica, ready, self._replicas)

    def _unlike(self, replica: Replica, ready: Ready, others: Sequence[Replica]) -> str:
        """Return in what a replica differs from the first of others that is known."""
        for other in others:
            known = other.state.ready
            if other is replica or known is None or other.state.phase == FAILED:
                continue
            if ready.device_name != known.device_name:
                _log.warning(
                    "%s runs on %s and %s on %s: tokens are the same to the bit on processors of one kind only",
                    *(replica.name, ready.device_name, other.name, known.device_name),
                )
            return unlike(ready, known)
        return ""

    def _deliver(self, replica: Replica, done: Round) -> tuple[Round, int]:
        """Hand a round's deltas to their streams; returns it with its replica's number, and the tokens delivered."""
        if replica.engine:
            deltas = [msgspec.structs.replace(delta, engine=replica.engine) for delta in done.deltas]
            done = msgspec.structs.replace(done, deltas=deltas, engine=replica.engine)
        now_s = self._clock.monotonic_s()
        delivered = sum(self._streams.deliver(delta, now_s) for delta in done.deltas)
        if replica in self._retiring:  # it counts for the one in its place, where there is one
            heir = self._heir(replica)
            if heir is not None:
                heir.state.observe(done, delivered)
            else:
                self._gone = fold_round(self._gone, done, delivered)
        return done, delivered

    def lost(self, replica: Replica, cause: str) -> None:
        """See control.replica.Owner: its streams go on elsewhere; a request that kills workers is ended here."""
        if replica not in self._replicas and replica not in self._retiring:
            return
        guilty = self._router.lost(replica)
        if guilty is not None:
            _log.error("request %s is ended: its worker died each time it ran; %s", guilty.key, cause)
            message = "the worker died each time it ran this request; it is not tried again"
            self._streams.fail(guilty, RequestError(message, status=500, kind="server_error", code="failed"))
        if not self._closed:
            self._router.feed()
            asyncio.get_running_loop().call_later(LOSSES_ARE_KNOWN_S, self._router.feed)  # a trial may wait for that

    def given_up(self, replica: Replica, cause: str) -> None:
        """See control.replica.Owner."""
        if replica not in self._replicas:
            return
        if all(other.state.phase == FAILED for other in self._replicas):
            self._all_failed(cause)
        else:
            self._drafts.target_gone(replica.name)

    def _all_failed(self, cause: str) -> None:
        self._settled.set()
        self._end_streams(f"the model has failed: {cause}")
        self._drafts.stop()

    def _attach(self, name: str, command: AttachDraft) -> None:
        for replica in self._replicas:
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
    return _broken(event.message)


def _broken(message: str) -> RequestError:
    return RequestError(message, status=500, kind="server_error", code="failed")


def _tell_changes(name: str, before: Gauges | None, now: Gauges) -> None:
    for drafter in failed_drafters(before, now):
        _log.warning("drafter %s failed and is not used any more: %s", drafter.name, drafter.reason)
    if why := moved_levers(before, now):
        _log.info("objectives of %s: %s", name, why)


def _notify(observers: list[Callable[[_T], None]], event: _T) -> None:
    for observer in observers:
        try:
            observer(event)
        except Exception:
            _log.exception("an observer failed")

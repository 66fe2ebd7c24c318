"""Control's edge: hands what happens to control.step, and has the actions that come back carried out (control.effects).

It decides nothing about workers and streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from adapters.model_identity import ModelIdentity
from device_profiles.device_load import DeviceLoad
from orchestrator.clock import Clock
from orchestrator.daemon.control import events
from orchestrator.daemon.control.drafts.draft_workers import NO_POOLS
from orchestrator.daemon.control.effects import Effects, Reader, deadline_s, next_item
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.daemon.control.operator_desk import OperatorDesk
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.replicas.replicas import has_lost_model
from orchestrator.daemon.control.replicas.residency import ResidencyTerms
from orchestrator.daemon.control.replicas.roster import SeenModel
from orchestrator.daemon.control.replicas.scale_load import SeenReplicas, measure_load
from orchestrator.daemon.control.state import format_progress
from orchestrator.daemon.control.state_views import StateViews
from orchestrator.daemon.control.step import State, step
from orchestrator.daemon.control.streams.admission import Asked, ControlLimits, check_room, refuse_or_pass
from orchestrator.errors import RequestError, WorkerError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import Cluster, WorkerSpec
from orchestrator.protocol.events import Progress
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta
from policies.serving.draft_pool import PoolSize
from policies.serving.failover.watchdog import FLOOR_S
from policies.serving.overrides import EffectiveBound
from policies.serving.residency import ModelStage

# ADR 0048: behind a cut cable silence is that of the link, which is reported within 4 s.
_REMOTE_PATIENCE_S = 4.0


class TargetControl:
    """Implements control.port.Control over workers of `cluster`, which it opens and closes: one replica a spec. All
    must serve the same model in the same way. Without specs it has nothing to start until `set_specs` was called.

    `drafts` are started beside them once one is ready; nothing waits for them. Of each there are as many workers as
    `draft_pools` says of its name, else as there are replicas. `standbys` take the replicas' place when none serves.
    `kv_moves`: streams that are moved by plan take their KV cache along, where workers share this host's memory.
    `observers` hear of RoundReport, Progress, ResumedStream, TellHealth (its parts have changed), TellLoads (each
    sample), TellLacking, TellRefused, TellStarved and TellUseless. `awaited` is set once a request has come while there
    is nothing to start yet.
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
        self.awaited = asyncio.Event()
        self._cluster = cluster
        self._limits = limits
        self._clock = clock
        around = limits.surround()
        state = self._state = State(limits.max_restarts, limits.least_depth, limits.quarantine_s, around, draft_pools)
        state.watch.patience_s = FLOOR_S if cluster.runtime == "local" else _REMOTE_PATIENCE_S
        state.router.moves.enabled = kv_moves
        state.router.moves.share_memory = share_memory and cluster.runtime == "local"
        self._effects = Effects(state, cluster, sleep, self._post)
        self.observers = self._effects.observers
        self.steering = OperatorDesk(state, self._post, clock)
        self.views = StateViews(state, cluster, self.steering, clock.monotonic_s())
        self.views.least_depth = limits.least_depth
        self.heard: Callable[[], object] | None = None
        """Called where requests load the model, when one has come or gone, and when that is at another stage."""
        self._stage_seen: tuple[object, ...] = ()
        self._reading = 0
        self._all_read = asyncio.Event()
        self._changing = asyncio.Lock()
        self._opening: asyncio.Task[None] | None = None
        self.set_specs(specs, [drafts] * len(specs), standbys)

    def set_specs(
        self, specs: Sequence[WorkerSpec], drafts: Sequence[Sequence[WorkerSpec]], standbys: Sequence[StandbySpec] = ()
    ) -> None:
        """Say what to start: replicas, each one's draft workers, and standbys. To be called before `start`."""
        self._post(events.WorkersChosen(specs, list(chain.from_iterable(drafts)), standbys, self._limits.failover))

    def manage(self, terms: ResidencyTerms) -> None:
        """Have the model in memory only where that is asked for. To be called between `set_specs` and `start`."""
        self._state.residency.manage(terms)

    def load_model(self) -> None:
        self._post(events.ModelLoadAsked())

    def leave_memory(self, gone_for: str) -> None:
        """Have the model out of memory once its requests are over. `gone_for`: the model that its room is for."""
        self._post(events.ModelLeaveAsked(gone_for))

    @property
    def request_timeout_s(self) -> float:
        """The longest time for any request; 0 is no limit."""
        return self._limits.request_timeout_s

    def see_model(self) -> SeenModel:
        """Return how the model stands, for whoever decides which are in memory."""
        streams, residency = self._state.streams, self._state.residency
        away = residency.stage is not ModelStage.LOADED
        return SeenModel(residency.stage, len(streams), streams.held if away else 0, streams.arrived, residency.load_s)

    def prepares(self, progress: Progress) -> None:
        self.views.preparing = format_progress(progress)

    def give_up(self, reason: str) -> None:
        """Say that nothing of this will ever serve. To be called instead of `start`, or where a worker is of no use."""
        self.views.preparing, self.views.given_up = reason, True
        self._effects.settled.set()
        self._effects.failed.set()

    async def start(self) -> None:
        """Begin to open the cluster and start the workers; returns at once (see `wait_settled`)."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="open the cluster")

    async def wait_settled(self) -> StateView:
        """Wait until a worker was ready once, or all have failed for good, or control was closed."""
        await self._effects.settled.wait()
        return self.view()

    def look(self) -> None:
        """Look for what is due, as after a WakeAfter: whoever calls this knows afterwards that control works."""
        self._post(events.Woke())

    async def wait_failed(self) -> str:
        await self._effects.failed.wait()
        return self.view().detail

    def view(self) -> StateView:
        return self.views.show(self._clock.monotonic_s())

    def observe_load(self, samples: Mapping[str, DeviceLoad]) -> None:
        """Take in what devices do, by "HOST/DEVICE", of whichever host ("here": the daemon's). The one way for live
        state to come in; who samples a host calls it each second or so. To be called in the event loop."""
        self._post(events.LoadObserved(samples))

    def list_loads(self) -> dict[str, DeviceLoad]:
        """Return what devices do, by "HOST/DEVICE", as whoever plans takes it (control.routing.loads)."""
        return self._state.loads.list_loads()

    def measure_replicas(self) -> SeenReplicas:
        return measure_load(self._state, self._clock.monotonic_s())

    def list_workers(self) -> list[int]:
        """Return the numbers of our workers' processes, on whichever host."""
        return self._effects.supervisor.list_processes()

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        now_s = self._clock.monotonic_s()
        request = Asked(wanted, coming)
        if self._opening is None:
            self.awaited.set()
        if self.views.given_up:
            refuse_or_pass(self.view(), self._limits, self._state.streams, now_s, request)
        else:
            check_room(self._state, self._limits, self.view, now_s, request)

    def find_speculation(self, submit: Submit) -> EffectiveBound | None:
        return self._state.router.find_speculation(submit, self.steering.overrides)

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
            changed = self._effects.changed = asyncio.Future[list[int]]()
            self._post(events.RolloutAsked(specs, list(chain.from_iterable(drafts)), standbys, draft_pools))
            try:
                return await changed
            except asyncio.CancelledError:
                self._post(events.RolloutDropped())
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
            retuned = self._effects.retuned = asyncio.Future[None]()
            drafted = list(chain.from_iterable(drafts))
            self._post(events.RetuneAsked(specs, drafted, standbys, draft_pools))
            await retuned

    def list_specs(self) -> dict[int, WorkerSpec]:
        """Return what the workers of the replicas are started from, by the replicas' numbers; standbys left out."""
        return {replica.engine: replica.spec for replica in self._state.replicas.primary if not replica.standby}

    def list_identities(self) -> Mapping[str, ModelIdentity]:
        """Return the content that each model had when it was loaded first, by its source."""
        return self._state.identities.known

    def list_ready(self) -> list[Ready]:
        ready = [replica.state.ready for replica in self._state.replicas.list_all()]
        return [answer for answer in ready if answer is not None]

    def list_replaced(self) -> list[int]:
        """Return the numbers of replicas that failed as their model is gone, from its place and the store, too."""
        return [replica.engine for replica in self._state.replicas.primary if has_lost_model(replica)]

    def list_unwell(self) -> dict[Part, PartHealth]:
        return dict(self._state.unwell)

    def set_limits(self, limits: ControlLimits) -> None:
        """Take requests in, bound and route them by these from now on. `max_restarts` stays as it is."""
        self._limits, self.views.least_depth = limits, limits.least_depth
        bounds = (limits.least_depth, limits.quarantine_s, limits.failover)
        self._post(events.RulesChanged(limits.surround(), *bounds))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the live streams end for up to `timeout_s`, then end the rest with 503."""
        self._post(events.DrainBegun(timeout_s))
        if self._reading:
            self._all_read.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_read.wait()
        self._post(events.DrainOver(timeout_s))

    async def close(self) -> None:
        """End every stream, the workers and the cluster. Idempotent."""
        if self._opening is not None:
            self._opening.cancel()
        self._post(events.ControlClosed())
        if self._opening is not None:
            await asyncio.wait([self._opening])
        await self._effects.wait_ended()
        await self._cluster.close()
        self._effects.settled.set()

    async def _open(self) -> None:
        try:
            await self._cluster.open()
        except WorkerError as error:
            self._post(events.ClusterFailed(str(error)))
        else:
            self._post(events.ClusterOpened())

    def _open_stream(self, submit: Submit) -> Reader:
        """Take in a request. Raises RequestError where its id is in use."""
        now_s = self._clock.monotonic_s()
        actions = step(self._state, events.StreamOpened(submit, self.steering.overrides), now_s)
        stream = self._state.streams.find_live(submit.request_id)
        assert stream is not None  # noqa: S101 -- it was opened just now, and only a worker's event ends it
        reader = self._effects.readers[submit.request_id] = Reader(stream)
        self._reading += 1
        self._effects.carry_out(actions)
        if self.heard is not None:
            self._tell_model(self.heard)
        return reader

    def _close_stream(self, key: str, reader: Reader) -> None:
        self._reading -= 1
        if not self._reading:
            self._all_read.set()
        if self._effects.readers.get(key) is reader:  # it has not ended
            del self._effects.readers[key]
            self._post(events.StreamClosed(key))

    def _post(self, event: events.ControlEvent) -> None:
        self._effects.carry_out(step(self._state, event, self._clock.monotonic_s()))
        if self.heard is not None:
            self._tell_model(self.heard)

    def _tell_model(self, hear: Callable[[], object]) -> None:
        """Tell whoever decides over models in memory, where something of this one has changed for that."""
        streams, residency = self._state.streams, self._state.residency
        now = (residency.stage, not len(streams), streams.arrived)
        if now != self._stage_seen:
            self._stage_seen = now
            hear()

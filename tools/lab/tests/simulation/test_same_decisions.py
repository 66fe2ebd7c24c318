"""The simulator and the daemon decide alike: what happened in a simulated world is told to the daemon's own controller,
event by event, and both send the same requests to the same workers in the same order, and refuse the same ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_lab.replay.recorded import Costs
from outrider_lab.simulation.courses import CourseBook
from outrider_lab.simulation.faults import Fault
from outrider_lab.simulation.fleet import Fleet, PlacedReplica, ReplicaKind
from outrider_lab.simulation.processes import Timing
from outrider_lab.simulation.trace import TracedRequest
from outrider_lab.simulation.world import World, build_submit

from device_profiles.cost import StepCost
from orchestrator.daemon.control.actions import Send, StartWorker
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.events import ControlEvent, StreamOpened, Woke, WorkerEnding, WorkerSaid, WorkerStarted
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.errors import RequestError, WorkerLost
from orchestrator.protocol.commands import Cancel, Command, Submit
from orchestrator.protocol.contract import Worker, WorkerSpec
from orchestrator.protocol.events import Event
from policies.serving.failover.standby import FailoverRules, OtherBits

_TURNS = 12  # of the event loop until what was told has had its consequences


class RecordingWorld(World):
    """Keeps what control was told and when, which worker is called what, what was sent, and what was refused."""

    def __init__(self, fleet: Fleet, limits: ControlLimits) -> None:
        super().__init__(fleet, limits, Timing(spawn_s=0.1))
        self.told: list[tuple[float, ControlEvent | Submit]] = []
        self.names: dict[int, str] = {}
        self.sent: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        start, send = self._do[StartWorker], self._do[Send]

        def note_start(action: StartWorker) -> None:
            self.names[action.worker] = action.spec.name
            start(action)

        def note_send(action: Send) -> None:
            if isinstance(action.command, Submit | Cancel):
                self.sent.append((self.names[action.worker], action.command.request_id))
            send(action)

        self._do[StartWorker], self._do[Send] = note_start, note_send

    def post(self, event: ControlEvent) -> None:
        self.told.append((self.now_s, event))
        super().post(event)

    def list_targets(self) -> list[WorkerSpec]:
        return self._processes.list_specs()[0]

    def _open_stream(self, key: str) -> None:
        submit, before = build_submit(key, self._live[key].traced), len(self.told)
        super()._open_stream(key)
        if len(self.told) == before:  # it was not let in
            self.told.append((self.now_s, submit))

    def _finish(self, key: str, error: str) -> None:
        if error:
            self.refused.append((key, error))
        super()._finish(key, error)


class HandClock:
    """Time as the world says it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


@dataclass
class ToldWorker:
    """A worker that says what it is told to say."""

    name: str
    cluster: ToldCluster
    pids: tuple[int, ...] = ()
    said: asyncio.Queue[Event | WorkerLost] = field(default_factory=asyncio.Queue)

    @property
    def where(self) -> str:
        return self.name

    def send(self, command: Command) -> None:
        if isinstance(command, Submit | Cancel):
            self.cluster.sent.append((self.name, command.request_id))

    async def events(self) -> AsyncIterator[Event]:
        while True:
            item = await self.said.get()
            if isinstance(item, WorkerLost):
                raise item
            yield item

    async def stop(self, grace_s: float) -> None:
        pass


class ToldCluster:
    """Starts workers when the story has come so far."""

    runtime = "local"
    own_node = away = ""
    members = None

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.running: dict[str, ToldWorker] = {}
        self._gates: dict[str, asyncio.Event] = {}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def nodes(self) -> list[str]:
        return [""]

    def let_start(self, name: str) -> None:
        self._gates.setdefault(name, asyncio.Event()).set()

    async def start(self, spec: WorkerSpec) -> Worker:
        gate = self._gates.setdefault(spec.name, asyncio.Event())
        await gate.wait()
        gate.clear()
        self.running[spec.name] = ToldWorker(spec.name, self)
        return self.running[spec.name]


class ToldDaemon:
    """The daemon's controller over such a cluster, its clients, and what these were refused."""

    def __init__(self, world: RecordingWorld, limits: ControlLimits) -> None:
        self.clock, self.cluster = HandClock(), ToldCluster()
        self.refused: list[tuple[str, str]] = []
        self._names = world.names
        self._readers: list[asyncio.Task[None]] = []
        self._control = TargetControl(
            self.cluster, world.list_targets(), limits, self.clock, _sleep_at_once, kv_moves=False
        )

    async def hear(self, story: list[tuple[float, ControlEvent | Submit]]) -> None:
        """Let all of it happen."""
        await self._control.start()
        await _turn()
        for at_s, event in story:
            self.clock.now_s = at_s
            self._tell(event)
            await _turn()
        await self._control.close()
        await asyncio.gather(*self._readers)

    def _tell(self, event: ControlEvent | Submit) -> None:
        match event:
            case Submit():  # it was refused before it was opened
                self._readers.append(asyncio.create_task(self._read(event)))
            case StreamOpened(submit):
                self._readers.append(asyncio.create_task(self._read(submit)))
            case WorkerStarted(worker):
                self.cluster.let_start(self._names[worker])
            case WorkerSaid(worker, said):
                self.cluster.running[self._names[worker]].said.put_nowait(said)
            case WorkerEnding(worker, cause, kind):
                self.cluster.running[self._names[worker]].said.put_nowait(WorkerLost(cause, kind=kind))
            case Woke():  # the daemon's own timer runs by another clock
                self._control.look()
            case _:
                pass

    async def _read(self, submit: Submit) -> None:
        try:
            async for _ in self._control.generate(submit):
                pass
        except RequestError as error:
            if error.code != "interrupted":
                self.refused.append((submit.request_id, error.code or ""))


async def _sleep_at_once(seconds: float) -> None:
    await asyncio.sleep(0)


async def _turn() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[tuple[float, str]], int, int, list[TracedRequest], list[Fault]]:
    """Speeds and groups of replicas, places of each, how many may wait, requests, and perhaps a lost worker."""
    of_each = st.tuples(st.sampled_from([1.0, 1.0, 2.0, 3.5]), st.sampled_from(["a", "a", "b"]))
    speeds = draw(st.lists(of_each, min_size=1, max_size=4))
    arrival_s, requests = 0.0, []
    for gap_s, prompt, output, prefix in draw(
        st.lists(
            st.tuples(st.floats(0.0, 0.15), st.integers(1, 90), st.integers(1, 30), st.integers(0, 3)),
            min_size=1,
            max_size=25,
        )
    ):
        arrival_s += gap_s
        shared = min(prompt, 48) if prefix else 0
        requests.append(
            TracedRequest(arrival_s, prompt, output, prefix=f"p{prefix}" if shared else "", prefix_tokens=shared)
        )
    faults = []
    if draw(st.booleans()):
        number = draw(st.integers(1, len(speeds)))
        faults.append(Fault(at_s=draw(st.floats(0.0, 1.0)), kind="kill_worker", name=f"target-{number}"))
    return speeds, draw(st.integers(1, 3)), draw(st.integers(0, 8)), requests, faults


@given(stories(), st.sampled_from(["never", "new_requests", "streams"]))
@settings(max_examples=50, deadline=None)
def test_simulator_and_daemon_decide_alike(
    story: tuple[list[tuple[float, str]], int, int, list[TracedRequest], list[Fault]], other_bits: OtherBits
) -> None:
    speeds, places, waiting, requests, faults = story
    placed = []
    for number, (speed, group) in enumerate(speeds, 1):
        costs = Costs(StepCost((1.0, 64.0), (4.0 * speed, 20.0 * speed)))
        kind = ReplicaKind(f"kind-{speed}", costs, CourseBook((), costs, most=0), places, 4096, load_s=0.2, group=group)
        placed.append(PlacedReplica(f"target-{number}", kind, f"host-{number}", "CPU"))
    limits = ControlLimits(places, waiting, 5, failover=FailoverRules(0.5, other_bits=other_bits))
    world = RecordingWorld(Fleet(tuple(placed), len(placed)), limits)
    world.open()
    world.start(60.0)
    world.play(requests, faults)
    daemon = ToldDaemon(world, limits)
    asyncio.run(daemon.hear(world.told))
    assert daemon.cluster.sent == world.sent
    assert sorted(daemon.refused) == sorted(world.refused)

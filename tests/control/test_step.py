"""Control's step over arbitrary sequences of events, in a world of workers that does as the actions say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from device_profiles.device_load import DeviceLoad
from orchestrator.daemon.control.actions import (
    Action,
    Deliver,
    EndStream,
    FinishRollout,
    Send,
    Settle,
    StartWorker,
    StopWorker,
    TellLacking,
    TellRefused,
    TellStarved,
)
from orchestrator.daemon.control.events import (
    ClusterFailed,
    ClusterOpened,
    ControlClosed,
    ControlEvent,
    DrainBegun,
    DrainOver,
    LoadObserved,
    PartHeld,
    RolloutAsked,
    RolloutDropped,
    StandbySpec,
    StreamClosed,
    StreamOpened,
    Woke,
    WorkerEnded,
    WorkerEnding,
    WorkerSaid,
    WorkersChosen,
    WorkerStarted,
)
from orchestrator.daemon.control.health.health import Part
from orchestrator.daemon.control.replicas.replicas import Rank, Replica
from orchestrator.daemon.control.routing.route_choice import TRIAL_PATIENCE_S, has_hope
from orchestrator.daemon.control.state import FAILED, RESTARTING, add_totals
from orchestrator.daemon.control.state import READY as READY_PHASE
from orchestrator.daemon.control.step import State, step
from orchestrator.daemon.control.streams.streams import Stream
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Cancel, Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Failed, FailureKind, Finished, Progress
from orchestrator.protocol.rounds import Delta, Gauges, Refused, RoundReport
from policies.serving.failover.blame import LOSS_KINDS, LossKind
from policies.serving.failover.health import LONGEST_OPEN_S, Health
from policies.serving.failover.standby import FailoverRules, OtherBits, Readiness
from tests.api.support import READY
from tests.support.ready import change_ready

MAX_TOKENS = 40
INDEXES = st.integers(0, 7)


def spec(name: str, kind: str = "fp32", build: int = 0, device: str = "DEV") -> WorkerSpec:
    """A worker of a kind. Those of one kind say the same tokens; `build` makes them differ otherwise."""
    return WorkerSpec(name, "no:where", {"kind": kind, "build": build}, device=device)


PREPARES = spec("prepare standby")


def report(deltas: list[Delta]) -> RoundReport:
    return RoundReport(deltas, len(deltas), len(deltas), 0, 0, 0, [], 1.0, 1.0, 0.0)


@dataclass
class Process:
    """A worker as the world knows it. `has`: by the id that it knows, how many tokens each request has there."""

    spec: WorkerSpec
    started: bool = False
    ready: bool = False
    stopping: bool = False
    has: dict[str, int] = field(default_factory=dict)


class World:
    """Workers and readers. Every action is checked against what has happened before."""

    def __init__(self, max_restarts: int, quarantine_s: float = 600.0) -> None:
        self.state = State(max_restarts, quarantine_s=quarantine_s)
        self.now_s = 0.0
        self.processes: dict[int, Process] = {}
        self.delivered: dict[str, list[int]] = {}  # of live streams; a token is its own position
        self.holder: dict[str, tuple[int, str]] = {}  # of live streams that were sent: the worker, the id there
        self.forgotten: list[tuple[int, str]] = []  # of streams that were taken back: the worker, the id there
        self.tokens = 0
        self.speaks = -1  # the worker that was heard last
        self.kinds: dict[str, str] = {}  # of live streams with tokens: what the last came from
        self.errors: list[str] = []
        self.changing = False
        self.settled = False
        self.outcome: FinishRollout | None = None

    def tell(self, event: ControlEvent) -> None:
        if isinstance(event, WorkerSaid):
            self.speaks = event.worker
        for action in step(self.state, event, self.now_s):
            self.do(action)

    def do(self, action: Action) -> None:
        match action:
            case StartWorker(worker, started, _, after_s):
                assert worker not in self.processes, "one process in a place at a time"
                assert 0.0 <= after_s <= LONGEST_OPEN_S + 1e-6
                self.processes[worker] = Process(started)
            case StopWorker(worker, _):
                assert not self.processes[worker].stopping
                self.processes[worker].stopping = True
                self.take_back(worker)
            case Send(worker, Submit() as submit):
                self.take(worker, submit)
            case Send(worker, Cancel(sent_id)):
                key = sent_id.partition("#")[0]
                assert self.holder.pop(key) == (worker, sent_id), "only who has a stream is told to forget it"
                self.processes[worker].has.pop(sent_id)
                self.forgotten.append((worker, sent_id))
            case Deliver(key, delta):
                got = self.delivered[key]
                assert delta.request_id == key
                assert delta.tokens == list(range(len(got), len(got) + len(delta.tokens))), "none twice, none skipped"
                if delta.tokens:
                    kind = self.processes[self.speaks].spec.options["kind"]
                    assert bool(delta.group) == (self.kinds.get(key) != kind), "a group is told when it is new"
                    self.kinds[key] = kind
                got += delta.tokens
                self.tokens += len(delta.tokens)
                if delta.finish:
                    self.end(key)
            case EndStream(key, error):
                self.errors.append(error.message)
                self.end(key)
            case FinishRollout():
                assert self.changing
                self.changing, self.outcome = False, action
            case Settle():
                self.settled = True
            case _:
                pass

    def take(self, worker: int, submit: Submit) -> None:
        key = submit.request_id.partition("#")[0]
        process = self.processes[worker]
        assert process.ready, "streams go to replicas that are ready"
        assert not process.stopping
        assert key not in self.holder, "a stream is in one place"
        assert submit.committed == self.delivered[key], "whoever goes on is told what was delivered"
        assert submit.request_id not in process.has
        self.holder[key] = (worker, submit.request_id)
        process.has[submit.request_id] = len(submit.committed)

    def end(self, key: str) -> None:
        del self.delivered[key]  # it was live
        self.kinds.pop(key, None)
        if held := self.holder.pop(key, None):
            self.processes[held[0]].has.pop(held[1], None)

    def take_back(self, worker: int) -> None:
        """Nobody believes a worker any more, whatever it still has."""
        for sent_id in self.processes[worker].has:
            if self.holder.get(key := sent_id.partition("#")[0]) == (worker, sent_id):
                del self.holder[key]
                self.forgotten.append((worker, sent_id))
        self.processes[worker].has.clear()

    def end_process(self, worker: int, cause: str = "killed", kind: LossKind = "killed") -> None:
        self.take_back(worker)
        process = self.processes.pop(worker)
        self.forgotten = [one for one in self.forgotten if one[0] != worker]
        if not process.stopping:
            self.tell(WorkerEnding(worker, cause, kind))
        self.tell(WorkerEnded(worker, cause, kind))

    def start(self, worker: int) -> None:
        self.processes[worker].started = True
        self.tell(WorkerStarted(worker, f"pid {worker}"))

    def make_ready(self, worker: int) -> None:
        process = self.processes[worker]
        process.ready = not process.stopping
        if process.spec.name == PREPARES.name:
            process.ready = False
            self.tell(WorkerSaid(worker, Finished()))
            return
        self.tell(WorkerSaid(worker, change_ready(READY, slots=2, activations=process.spec.options["kind"])))

    def decode(self, worker: int, counts: list[int]) -> None:
        """A round of a worker: tokens for what it has, each as many as `counts` says, until they have all."""
        deltas = []
        has = self.processes[worker].has
        for (sent_id, position), count in zip(list(has.items()), counts, strict=False):
            tokens = list(range(position, min(position + count, MAX_TOKENS)))
            has[sent_id] = position + len(tokens)
            deltas.append(Delta(sent_id, tokens, "length" if has[sent_id] == MAX_TOKENS else ""))
        self.tell(WorkerSaid(worker, report(deltas)))

    def numbers(self, **wanted: bool) -> list[int]:
        """Of processes that are as wanted."""
        return [
            number
            for number, process in self.processes.items()
            if all(getattr(process, name) == value for name, value in wanted.items())
        ]


class ControlMachine(RuleBasedStateMachine):
    """Anything may happen at any time, as often as it likes."""

    world: World
    other_bits: OtherBits = "new_requests"
    opened = 0
    closed = False

    @initialize(
        replicas=st.lists(st.sampled_from(["fp32", "fp32", "bf16"]), min_size=1, max_size=3),
        alike=st.booleans(),
        max_restarts=st.sampled_from([0, 2, 9]),
        count=st.integers(0, 5),
        standbys=st.lists(st.tuples(st.sampled_from(Readiness), st.sampled_from(["fp32", "bf16"])), max_size=2),
        other_bits=st.sampled_from(get_args(OtherBits)),
    )
    def begin(
        self,
        replicas: list[str],
        alike: bool,
        max_restarts: int,
        count: int,
        standbys: list[tuple[Readiness, str]],
        other_bits: OtherBits,
    ) -> None:
        self.world = World(max_restarts)
        wanted = [
            StandbySpec(spec("standby", kind, device="SPARE"), one, PREPARES if one is Readiness.WARM else None)
            for one, kind in standbys
        ]
        self.other_bits = other_bits
        rules = FailoverRules(2.0, 10.0, other_bits, alike)
        specs = [spec(f"t{number}", kind) for number, kind in enumerate(replicas)]
        self.world.tell(WorkersChosen(specs, [], wanted, rules))
        self.world.tell(ClusterOpened())
        if count:
            self.all_workers_become_ready()
            self.streams_open(count)

    def pick(self, index: int, **wanted: bool) -> int | None:
        numbers = self.world.numbers(**wanted)
        return numbers[index % len(numbers)] if numbers else None

    @rule(index=INDEXES)
    def a_process_starts(self, index: int) -> None:
        worker = self.pick(index, started=False, stopping=False)
        if worker is not None:
            self.world.start(worker)

    @rule(device=st.sampled_from(["here/DEV", "here/SPARE"]), others=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    def a_device_is_sampled(self, device: str, others: float) -> None:
        self.world.tell(LoadObserved({device: DeviceLoad(1.0, others, temperature_c=90.0, temperature_limit_c=90.0)}))

    @rule(index=INDEXES)
    def a_worker_is_ready(self, index: int) -> None:
        worker = self.pick(index, started=True, ready=False)
        if worker is not None:
            self.world.make_ready(worker)

    @rule()
    def all_workers_become_ready(self) -> None:
        for worker in self.world.numbers(started=False, stopping=False):
            self.world.start(worker)
        for worker in self.world.numbers(started=True, ready=False, stopping=False):
            if worker in self.world.processes:
                self.world.make_ready(worker)

    @rule(count=st.integers(1, 4))
    def streams_open(self, count: int) -> None:
        phases = {one.state.phase for one in self.world.state.replicas.serving}
        if not self.closed and phases & {READY_PHASE, RESTARTING}:  # else admission takes in none
            for _ in range(count):
                self.opened += 1
                key = f"r{self.opened}"
                self.world.delivered[key] = []
                self.world.tell(StreamOpened(Submit(key, [self.opened], MAX_TOKENS)))

    @rule(index=INDEXES)
    def a_reader_leaves(self, index: int) -> None:
        live = list(self.world.delivered)
        if live:
            key = live[index % len(live)]
            self.world.tell(StreamClosed(key))
            assert key not in self.world.holder, "its replica is told to forget it"
            del self.world.delivered[key]

    @rule(key=st.sampled_from(["r1", "r2", "r3"]))
    def an_id_in_use_is_refused(self, key: str) -> None:
        if key in self.world.delivered:
            with pytest.raises(RequestError, match=key):
                step(self.world.state, StreamOpened(Submit(key, [1], 1)), self.world.now_s)

    @rule(index=INDEXES, counts=st.lists(st.integers(0, 9), max_size=8))
    def a_worker_decodes(self, index: int, counts: list[int]) -> None:
        worker = self.pick(index, ready=True)
        if worker is not None:
            self.world.decode(worker, counts)

    @rule(count=st.integers(1, 9))
    def all_workers_decode(self, count: int) -> None:
        for worker in self.world.numbers(ready=True):
            self.world.decode(worker, [count] * 8)

    @rule(index=INDEXES, times=st.integers(2, 4), kind=st.sampled_from(LOSS_KINDS))
    def a_worker_is_lost_again_and_again(self, index: int, times: int, kind: LossKind) -> None:
        worker = self.pick(index, ready=True, stopping=False)
        for _ in range(times):
            if worker is not None and worker in self.world.numbers(stopping=False):
                self.world.end_process(worker, kind=kind)
                self.all_workers_become_ready()

    @rule(index=INDEXES)
    def a_worker_speaks_of_what_was_moved(self, index: int) -> None:
        if self.world.forgotten:
            worker, sent_id = self.world.forgotten[index % len(self.world.forgotten)]
            self.world.tell(WorkerSaid(worker, report([Delta(sent_id, [-1], "stop")])))
            self.world.tell(WorkerSaid(worker, Refused(sent_id, "late", "failed")))

    @rule(index=INDEXES, kind=st.sampled_from(["invalid", "failed", "not_finite"]))
    def a_worker_refuses_a_stream(self, index: int, kind: str) -> None:
        worker = self.pick(index, ready=True)
        if worker is not None and (has := self.world.processes[worker].has):
            sent_id = next(iter(has))
            if kind == "not_finite":
                del has[sent_id]
                self.world.holder.pop(sent_id.partition("#")[0])
            self.world.tell(WorkerSaid(worker, Refused(sent_id, "no", kind)))
            assert sent_id not in has

    @rule(index=INDEXES)
    def a_worker_tells_of_itself(self, index: int) -> None:
        worker = self.pick(index, started=True)
        if worker is not None:
            self.world.tell(WorkerSaid(worker, Progress("load", 0.5)))
            self.world.tell(WorkerSaid(worker, Gauges(0, 0, 1, 1, 0, 0, 0, 0)))

    @rule(index=INDEXES)
    def a_worker_is_lost(self, index: int) -> None:
        worker = self.pick(index, stopping=False)
        if worker is not None:
            self.world.end_process(worker)

    @rule(index=INDEXES)
    def a_worker_falls_silent(self, index: int) -> None:
        """It says nothing more, and is not cleared away yet."""
        worker = self.pick(index, started=True, stopping=False)
        if worker is not None:
            process = self.world.processes[worker]
            process.ready, process.stopping = False, True
            self.world.take_back(worker)
            self.world.tell(WorkerEnding(worker, "end of its words", "killed"))

    @rule(
        index=INDEXES,
        restartable=st.sampled_from([True, True, True, False]),
        kind=st.sampled_from(["unknown", "unknown", "device_lost", "ecc", "out_of_memory"]),
    )
    def a_worker_fails(self, index: int, restartable: bool, kind: FailureKind) -> None:
        worker = self.pick(index, started=True, stopping=False)
        if worker is not None:
            self.world.tell(WorkerSaid(worker, Failed("broken", restartable, kind)))
            self.world.end_process(worker)

    @rule(index=INDEXES)
    def a_worker_has_stopped(self, index: int) -> None:
        worker = self.pick(index, stopping=True)
        if worker is not None:
            self.world.end_process(worker, "stopped")

    @rule(seconds=st.sampled_from([0.3, 0.5, 3.0, 100.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.tell(Woke())
        live = self.world.state.streams.live()
        held = self.world.state.health.list_held(Health.CORDONED) + self.world.state.health.list_held(Health.DRAINING)
        if not held and seconds > TRIAL_PATIENCE_S and any(one.serving for one in self.world.state.replicas.serving):
            assert not live or any(stream.at or stream.group for stream in live), "of suspects one is tried"

    @rule(
        name=st.sampled_from(["DEV", "SPARE"]),
        held=st.sampled_from([None, None, None, Health.DRAINING, Health.CORDONED]),
    )
    def an_operator_holds_a_device(self, name: str, held: Health | None) -> None:
        self.world.tell(PartHeld(Part("device", f"here/{name}"), held))

    @precondition(lambda self: not self.world.changing and not self.closed)
    @rule(
        kinds=st.lists(st.sampled_from(["fp32", "fp32", "bf16"]), min_size=1, max_size=3),
        build=st.integers(0, 1),
        standbys=st.none() | st.lists(st.sampled_from(["fp32", "bf16"]), max_size=1),
    )
    def a_rollout_is_asked_for(self, kinds: list[str], build: int, standbys: list[str] | None) -> None:
        self.world.changing = True
        new = None
        if standbys is not None:
            new = [StandbySpec(spec("standby", kind, device="SPARE"), Readiness.HOT) for kind in standbys]
        self.world.tell(RolloutAsked([spec(f"new{n}", kind, build) for n, kind in enumerate(kinds)], [], new))

    @precondition(lambda self: self.world.changing)
    @rule()
    def nobody_waits_for_the_rollout(self) -> None:
        self.world.changing = False
        self.world.tell(RolloutDropped())

    @rule(chance=st.integers(0, 15))
    def the_server_drains_or_closes(self, chance: int) -> None:
        if chance == 0:
            self.closed = True
            self.world.tell(DrainBegun(10.0))
        elif self.closed:
            self.world.tell(DrainOver(10.0) if chance < 8 else ControlClosed())
            assert not self.world.delivered

    @invariant()
    def each_live_stream_waits_or_is_with_one_ready_replica(self) -> None:
        if not hasattr(self, "world"):
            return
        world, state = self.world, self.world.state
        assert {stream.key for stream in state.streams.live()} == set(world.delivered)
        for stream in state.streams.live():
            assert stream.committed == world.delivered[stream.key]
            having = [one for one in state.replicas.with_streams if one.name == stream.at]
            assert [(one.worker, stream.sent_id) for one in having] == (
                [world.holder[stream.key]] if stream.key in world.holder else []
            )
            assert bool(stream.at) == bool(having)
            for one in having:
                process = world.processes[one.worker]
                assert one.serving
                assert process.ready
        assert +state.streams.counts == +type(state.streams.counts)(
            stream.at for stream in state.streams.live() if stream.at
        )

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        if not hasattr(self, "world"):
            return
        streams = self.world.state.streams
        for stream in streams.live():
            if not stream.at and not streams.is_suspect(stream):
                assert not self.list_open_to(stream), f"{stream.key} could go there"

    def list_open_to(self, stream: Stream) -> list[str]:
        """The replicas that are ready and that nothing keeps from taking a stream that is no suspect."""
        state = self.world.state
        held = {*state.health.list_held(Health.DRAINING), *state.health.list_held(Health.CORDONED)}
        able = [one for one in state.replicas.with_streams if one.serving and not held.intersection(one.parts)]
        every = [replica for replica in state.replicas.with_streams if has_hope(replica)]
        alike = [replica for replica in every if stream.group and replica.group in (stream.group, "")]
        if alike and (self.other_bits != "streams" or self.is_awaited(stream, alike)):
            stay = [one for one in alike if one.rank is Rank.SERVING] or alike  # what retires is left where one stays
            able = [one for one in able if one in stay]
        else:
            able = [one for one in able if one.rank is Rank.SERVING]
        if {one.name for one in able} - set(stream.failed_at):
            able = [one for one in able if one.name not in stream.failed_at]
        trial = state.streams.on_trial()
        if any(state.streams.is_suspect(one) for one in state.streams.due()):
            return []  # a replica may be kept for it
        return [one.name for one in able if trial is None or one.name != trial.at]

    def is_awaited(self, stream: Stream, alike: list[Replica]) -> bool:
        """Whether one of a stream's group serves, or may within the 2 s that it waits for that."""
        if any(replica.serving for replica in alike):
            return True
        until_s = stream.due_s + 2.0
        soon = [replica for replica in alike if replica.state.due_s + replica.state.start_s <= until_s]
        return self.world.now_s < until_s and bool(soon)

    @invariant()
    def a_replica_that_is_ready_ends_the_wait_for_one_and_has_served(self) -> None:
        if hasattr(self, "world"):
            ready = [one for one in self.world.state.replicas.serving if one.serving]
            assert self.world.settled or not ready
            assert all(one.life.served for one in ready), "whatever becomes of it may come right again"
            joining = [one for one in self.world.state.replicas.list_ranked(Rank.JOINING) if one.serving]
            assert self.world.settled or not joining, "the first one waits for nobody"

    @invariant()
    def there_is_hope_while_other_replicas_come(self) -> None:
        if hasattr(self, "world") and self.world.state.given_up:
            assert not self.world.state.replicas.list_ranked(Rank.JOINING)

    @invariant()
    def every_token_is_counted_once(self) -> None:
        if hasattr(self, "world"):
            replicas = self.world.state.replicas
            totals = add_totals([replicas.gone, *(one.state.totals for one in replicas.serving)])
            assert totals.generated == self.world.tokens

    @invariant()
    def when_all_replicas_have_failed_no_stream_is_left(self) -> None:
        if not hasattr(self, "world") or self.world.state.standbys.can_help:
            return
        if self.world.state.replicas.list_ranked(Rank.JOINING):
            return
        if all(one.state.phase == FAILED for one in self.world.state.replicas.serving):
            assert self.world.settled
            assert not self.world.delivered

    def teardown(self) -> None:
        """Close, and let everything end: nothing is left."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.tell(ControlClosed())
        assert not world.delivered
        for worker in list(world.processes):
            assert world.processes[worker].stopping
            world.end_process(worker, "stopped")
        assert not world.processes
        assert not world.changing


TestControl = ControlMachine.TestCase
TestControl.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def serve(world: World, count: int) -> None:
    """Have so many replicas, all of them started."""
    world.tell(WorkersChosen([spec(f"t{number}") for number in range(count)], []))
    world.tell(ClusterOpened())
    for worker in range(count):
        world.start(worker)


def open_stream(world: World, key: str) -> None:
    world.delivered[key] = []
    world.tell(StreamOpened(Submit(key, [*key.encode()], MAX_TOKENS)))


def test_a_stream_does_not_wait_for_a_replica_that_is_being_started_beside_one_that_serves() -> None:
    world = World(max_restarts=1)
    serve(world, 2)
    world.make_ready(0)
    open_stream(world, "a")
    assert world.holder == {"a": (0, "a")}


def test_a_cluster_that_cannot_be_opened_fails_every_replica() -> None:
    world = World(max_restarts=1)
    world.tell(WorkersChosen([spec("t0"), spec("t1")], []))
    world.tell(ClusterFailed("no cluster there"))
    assert [one.state.phase for one in world.state.replicas.serving] == [FAILED, FAILED]
    assert world.settled
    assert not world.processes


def test_a_rollout_to_another_kind_lets_the_old_replica_finish_its_streams() -> None:
    world = World(max_restarts=1)
    serve(world, 1)
    world.make_ready(0)
    open_stream(world, "old")
    world.decode(0, [3])
    world.changing = True
    world.tell(RolloutAsked([spec("new", "bf16")], []))
    world.start(1)
    world.make_ready(1)
    open_stream(world, "late")
    assert world.holder == {"old": (0, "old"), "late": (1, "late")}
    world.end_process(0)
    assert "old" not in world.holder, "nobody else says what it says"
    world.start(0)
    world.make_ready(0)
    assert world.processes[0].has == {"old#2": 3}
    world.decode(0, [MAX_TOKENS])
    assert world.processes[0].stopping
    assert world.outcome is None
    world.end_process(0, "stopped")
    assert world.outcome == FinishRollout((0,))


def test_a_rollout_moves_the_streams_of_all_that_leave_in_one_step() -> None:
    world = World(max_restarts=1)
    serve(world, 2)
    for worker in range(2):
        world.make_ready(worker)
        open_stream(world, f"r{worker}")
    assert sorted(worker for worker, _ in world.holder.values()) == [0, 1]
    for worker in range(2):
        world.decode(worker, [3])
    world.changing = True
    world.tell(RolloutAsked([spec("new", build=1)], []))
    world.start(2)
    world.make_ready(2)
    assert world.processes[2].has == {"r0#2": 3, "r1#2": 3}
    for worker in range(2):
        world.end_process(worker, "stopped")
    assert world.outcome == FinishRollout((0,))
    (left,) = world.state.replicas.serving
    assert left.state.totals.generated + world.state.replicas.gone.generated == 6


def test_a_rollout_before_the_first_replica_is_ready_ends_the_wait_for_one() -> None:
    world = World(max_restarts=1)
    serve(world, 1)
    world.changing = True
    world.tell(RolloutAsked([spec("new", build=1)], []))
    world.start(1)
    world.make_ready(1)
    assert world.settled
    open_stream(world, "a")
    assert world.holder == {"a": (1, "a")}


def test_a_replica_that_fails_while_another_comes_in_its_place_is_no_reason_to_give_up() -> None:
    world = World(max_restarts=1)
    serve(world, 1)
    world.changing = True
    world.tell(RolloutAsked([spec("new", build=1)], []))
    world.start(1)
    world.tell(WorkerSaid(0, Failed("its runtime is not there", restartable=False)))
    world.end_process(0)
    assert not world.settled
    world.make_ready(1)
    assert world.outcome == FinishRollout((0,))
    open_stream(world, "a")
    assert world.holder == {"a": (1, "a")}


def test_all_is_given_up_where_the_replica_that_was_to_come_fails_too() -> None:
    world = World(max_restarts=1)
    serve(world, 1)
    world.changing = True
    world.tell(RolloutAsked([spec("new", build=1)], []))
    world.start(1)
    for worker in range(2):
        world.tell(WorkerSaid(worker, Failed("its runtime is not there", restartable=False)))
        world.end_process(worker)
    assert world.outcome is not None
    assert world.outcome.error
    assert world.settled


def test_a_worker_for_which_a_library_is_missing_is_told_to_whoever_plans_with_its_host() -> None:
    state = State(max_restarts=1)
    there = msgspec.structs.replace(spec("t0"), node="10.0.0.2")
    step(state, WorkersChosen([there], []), 0.0)
    step(state, ClusterOpened(), 0.0)
    step(state, WorkerStarted(0, "pid 1"), 0.0)
    step(state, WorkerSaid(0, Failed("onnxruntime is not installed", restartable=False, kind="not_installed")), 0.0)
    step(state, WorkerEnding(0, "it ended", "crashed"), 0.0)
    actions = step(state, WorkerEnded(0, "it ended", "crashed"), 0.0)
    why = "host 10.0.0.2: onnxruntime is not installed"
    assert TellLacking(there, why) in actions
    assert state.replicas.serving[0].state.detail == why


def fail_first(state: State, failed: Failed) -> list[Action]:
    """The first worker of a fleet loads, and fails."""
    step(state, ClusterOpened(), 0.0)
    step(state, WorkerStarted(0, "pid 1"), 0.0)
    step(state, WorkerSaid(0, failed), 0.0)
    step(state, WorkerEnding(0, "it ended", "crashed"), 0.0)
    return step(state, WorkerEnded(0, "it ended", "crashed"), 0.0)


@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_a_worker_that_will_never_serve_is_told_to_whoever_plans_where_its_place_is_why(kind: FailureKind) -> None:
    state = State(max_restarts=1)
    step(state, WorkersChosen([spec("t0"), spec("t1", device="OTHER")], []), 0.0)
    actions = fail_first(state, Failed("no", restartable=False, kind=kind))
    elsewhere_too = kind in ("not_installed", "model_replaced", "storage", "network", "endpoint")
    assert (TellRefused(spec("t0"), "no") in actions) is not elsewhere_too


@pytest.mark.parametrize("loads", [False, True])
def test_whoever_plans_hears_of_a_worker_that_found_no_memory_to_load_in(loads: bool) -> None:
    state = State(max_restarts=9)
    step(state, WorkersChosen([spec("t0")], []), 0.0)
    step(state, ClusterOpened(), 0.0)
    step(state, WorkerStarted(0, "pid 1"), 0.0)
    if loads:
        step(state, WorkerSaid(0, READY), 0.0)
    step(state, WorkerSaid(0, Failed("no room", restartable=True, kind="out_of_memory")), 0.0)
    step(state, WorkerEnding(0, "it ended", "crashed"), 0.0)
    actions = step(state, WorkerEnded(0, "it ended", "crashed"), 0.0)
    assert (TellStarved(spec("t0")) in actions) is not loads, "where it has served, a smaller KV cache may do"


def test_a_runtime_that_serves_on_a_device_is_not_why_a_second_worker_of_it_fails_there() -> None:
    state = State(max_restarts=1)
    step(state, WorkersChosen([spec("t0"), spec("t1")], []), 0.0)
    step(state, ClusterOpened(), 0.0)
    step(state, WorkerStarted(1, "pid 2"), 0.0)
    step(state, WorkerSaid(1, READY), 0.0)
    actions = fail_first(state, Failed("no room", restartable=False, kind="configuration"))
    assert state.replicas.serving[0].state.phase == FAILED
    assert not [one for one in actions if isinstance(one, TellRefused)]


def bring_back(world: World, *workers: int) -> None:
    for worker in workers:
        world.start(worker)
        world.make_ready(worker)


def try_suspect(world: World) -> int:
    """Have two replicas, of which one tries `suspect`; returns which."""
    serve(world, 2)
    world.make_ready(0)
    open_stream(world, "suspect")
    world.end_process(0, kind="crashed")
    world.make_ready(1)
    bring_back(world, 0)
    return world.holder["suspect"][0]


def test_a_request_that_is_cleared_of_its_deaths_keeps_nothing_away_any_more() -> None:
    world = World(max_restarts=9)
    serve(world, 2)
    world.make_ready(0)
    open_stream(world, "cleared")
    world.end_process(0)
    bring_back(world, 0)
    open_stream(world, "guilty")
    world.decode(0, [0, 16])
    world.end_process(0, kind="crashed")
    world.make_ready(1)
    bring_back(world, 0)
    tries, other = world.holder["cleared"][0], world.holder["guilty"][0]
    assert tries != other
    open_stream(world, "late")
    assert world.holder["late"][0] == other
    world.tell(StreamClosed("late"))
    del world.delivered["late"]
    world.end_process(other)
    bring_back(world, other)
    world.decode(tries, [1])
    world.end_process(other, kind="crashed")
    assert "guilty" not in world.delivered, "it is convicted, and that explains the deaths"
    open_stream(world, "last")
    assert world.holder["last"][0] == tries


def test_a_standby_that_has_the_targets_place_takes_what_the_target_does_not_while_it_tries_a_suspect() -> None:
    world = World(max_restarts=9)
    hot = StandbySpec(spec("standby", device="SPARE"), Readiness.HOT)
    world.tell(WorkersChosen([spec("t0")], [], [hot], FailoverRules()))
    world.tell(ClusterOpened())
    bring_back(world, 0, 1)
    open_stream(world, "suspect")
    world.end_process(0, kind="crashed")
    assert world.holder["suspect"][0] == 1
    bring_back(world, 0)
    world.end_process(1)
    assert world.holder["suspect"][0] == 0
    bring_back(world, 1)
    open_stream(world, "new")
    assert world.holder["new"][0] == 1


def test_a_stream_that_may_not_go_where_others_may_holds_up_none_of_them() -> None:
    world = World(max_restarts=9)
    tries = try_suspect(world)
    open_stream(world, "unlucky")
    worker, sent_id = world.holder.pop("unlucky")
    assert worker != tries
    del world.processes[worker].has[sent_id]
    world.tell(WorkerSaid(worker, Refused(sent_id, "no", "not_finite")))
    assert "unlucky" not in world.holder, "it waits for the other replica"
    open_stream(world, "new")
    assert world.holder["new"][0] == worker


def test_a_stream_goes_on_where_it_failed_when_an_operator_holds_all_others() -> None:
    world = World(max_restarts=9)
    world.tell(WorkersChosen([spec("t0"), spec("t1", device="HELD")], []))
    world.tell(ClusterOpened())
    bring_back(world, 0, 1)
    world.tell(PartHeld(Part("device", "here/HELD"), Health.CORDONED))
    open_stream(world, "unlucky")
    worker, sent_id = world.holder.pop("unlucky")
    del world.processes[worker].has[sent_id]
    world.tell(WorkerSaid(worker, Refused(sent_id, "no", "not_finite")))
    assert world.holder["unlucky"][0] == worker == 0


def test_a_replica_is_emptied_for_a_suspect_only_where_that_can_go() -> None:
    world = World(max_restarts=9)
    world.tell(WorkersChosen([spec("t0", device="HELD"), spec("t1")], []))
    world.tell(ClusterOpened())
    bring_back(world, 0)
    open_stream(world, "suspect")
    bring_back(world, 1)
    open_stream(world, "other")
    assert world.holder == {"suspect": (0, "suspect"), "other": (1, "other")}
    world.end_process(0, kind="crashed")
    world.tell(PartHeld(Part("device", "here/HELD"), Health.CORDONED))
    bring_back(world, 0)
    assert "suspect" not in world.holder
    world.now_s += TRIAL_PATIENCE_S + 1.0
    world.tell(Woke())
    assert world.holder["suspect"][0] == 1


def test_a_replica_is_kept_for_a_suspect_no_longer_than_until_that_is_sent() -> None:
    world = World(max_restarts=9)
    world.tell(WorkersChosen([spec("t1"), spec("t0")], []))  # the first is emptied, and of equals t0 is taken
    world.tell(ClusterOpened())
    bring_back(world, 0)
    open_stream(world, "suspect")
    world.end_process(0, kind="crashed")
    world.tell(PartHeld(Part("device", "here/DEV"), Health.CORDONED))
    bring_back(world, 0, 1)
    open_stream(world, "other")
    world.now_s += TRIAL_PATIENCE_S + 1.0
    world.tell(Woke())
    assert not world.holder
    world.tell(PartHeld(Part("device", "here/DEV"), None))
    assert sorted(world.holder) == ["other", "suspect"]

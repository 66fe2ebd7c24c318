"""Several models, and memory for some of them: over any sequence of events, in the worlds of control's own test."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.daemon.control.actions import Action, EndStream, StopWorker
from orchestrator.daemon.control.events import (
    ClusterOpened,
    ControlClosed,
    ModelLeaveAsked,
    ModelLoadAsked,
    RolloutAsked,
    StreamClosed,
    StreamOpened,
    WorkerSaid,
    WorkersChosen,
)
from orchestrator.daemon.control.replicas.residency import LOAD_TRIES, ResidencyTerms
from orchestrator.daemon.control.replicas.roster import Roster, SeenModel
from orchestrator.daemon.control.state import FAILED, UNLOADED
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.events import Failed
from policies.serving.residency import PATIENCE_S, Keep, Misfit, ModelStage, find_misfit
from tests.control.test_step import MAX_TOKENS, World, spec

DEVICE = "here/DEV"
INDEXES = st.integers(0, 7)
KEEPS: list[Keep] = ["on_demand", "on_demand", "while_used", "always"]


class ModelWorld(World):
    """One model. Its workers are stopped only where nothing runs there."""

    served = 0

    def do(self, action: Action) -> None:
        match action:
            case StopWorker(worker, _):
                assert self.state.replicas.closed or not self.processes[worker].has, "a stream lost its model"
            case EndStream():
                assert self.state.residency.stage is not ModelStage.LOADED or self.state.replicas.closed
            case _:
                pass
        super().do(action)

    def end(self, key: str) -> None:
        self.served += 1
        super().end(key)

    @property
    def stage(self) -> ModelStage:
        return self.state.residency.stage

    def see(self) -> SeenModel:
        streams, residency = self.state.streams, self.state.residency
        held = streams.held if residency.stage is not ModelStage.LOADED else 0
        return SeenModel(residency.stage, len(streams), held, streams.arrived, residency.load_s)

    def open(self, key: str) -> None:
        self.delivered[key] = []
        self.tell(StreamOpened(Submit(key, [*key.encode()], MAX_TOKENS)))


@dataclass
class Machine:
    """Models that share a device, and who decides over them."""

    keeps: list[Keep]
    needs: list[int]
    memory: int
    idle_s: float = 60.0
    now_s: float = 0.0
    worlds: list[ModelWorld] = field(default_factory=list)

    def __post_init__(self) -> None:
        terms = [
            ResidencyTerms(keep, self.idle_s, {DEVICE: need}) for keep, need in zip(self.keeps, self.needs, strict=True)
        ]
        start = [number for number, keep in enumerate(self.keeps) if keep != "on_demand"]
        self.roster = Roster(terms, {DEVICE: self.memory}, start, 0.0)
        for number, each in enumerate(terms):
            world = ModelWorld(max_restarts=99)
            self.worlds.append(world)
            world.tell(WorkersChosen([spec(f"m{number}")], []))
            if each.keep != "always":
                world.state.residency.manage(each)
            world.tell(ClusterOpened())
        self.look()

    def look(self) -> None:
        """Decide, and carry out what was decided, until nothing more follows."""
        for _ in range(20):
            before = [world.stage for world in self.worlds]
            steps = self.roster.decide_steps([world.see() for world in self.worlds], self.now_s)
            for number in steps.keep:
                self.worlds[number].tell(ModelLoadAsked())
            for number, room_for in steps.unload:
                self.worlds[number].tell(ModelLeaveAsked("" if room_for is None else f"m{room_for}"))
            if steps.load is not None:
                self.worlds[steps.load].tell(ModelLoadAsked())
            if before == [world.stage for world in self.worlds]:
                return
        raise AssertionError("models come and go without an event")

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for world in self.worlds:
            world.now_s = self.now_s
        self.look()

    def advance_workers(self) -> None:
        """Let every process do its next step: start, be ready, or end where it is to."""
        for world in self.worlds:
            for worker in world.numbers(stopping=True):
                world.end_process(worker, "stopped")
            for worker in world.numbers(started=True, ready=False):
                world.make_ready(worker)
            for worker in world.numbers(started=False):
                world.start(worker)
        self.look()

    def decode(self, count: int) -> None:
        for world in self.worlds:
            for worker in world.numbers(ready=True, stopping=False):
                world.decode(worker, [count] * 8)
        self.look()


class ModelMachine(RuleBasedStateMachine):
    """Requests for any model, workers that are lost at any time, readers that leave."""

    machine: Machine
    opened = 0

    @initialize(
        keeps=st.lists(st.sampled_from(KEEPS), min_size=2, max_size=4),
        needs=st.lists(st.integers(1, 3), min_size=4, max_size=4),
        spare=st.integers(0, 3),
    )
    def begin(self, keeps: list[Keep], needs: list[int], spare: int) -> None:
        needs = needs[: len(keeps)]
        pinned = sum(need for need, keep in zip(needs, keeps, strict=True) if keep == "always")
        others = [need for need, keep in zip(needs, keeps, strict=True) if keep != "always"]
        self.machine = Machine(keeps, needs, pinned + max(others, default=0) + spare)

    def world(self, index: int) -> ModelWorld:
        return self.machine.worlds[index % len(self.machine.worlds)]

    @rule(index=INDEXES, count=st.integers(1, 3))
    def requests_come(self, index: int, count: int) -> None:
        world = self.world(index)
        if world.stage is not ModelStage.FAILED and all(
            replica.state.phase != FAILED for replica in world.state.replicas.serving
        ):
            for _ in range(count):
                self.opened += 1
                world.open(f"r{self.opened}")
            self.machine.look()

    @rule(index=INDEXES)
    def a_reader_leaves(self, index: int) -> None:
        world = self.world(index)
        if live := list(world.delivered):
            world.tell(StreamClosed(live[-1]))
            del world.delivered[live[-1]]
            self.machine.look()

    @rule()
    def workers_get_on(self) -> None:
        self.machine.advance_workers()

    @rule(count=st.sampled_from([1, 9, MAX_TOKENS]))
    def workers_decode(self, count: int) -> None:
        self.machine.decode(count)

    @rule(index=INDEXES)
    def a_worker_is_lost(self, index: int) -> None:
        world = self.world(index)
        for worker in world.numbers(started=True):
            world.end_process(worker)
            self.machine.look()

    @rule(index=INDEXES)
    def a_reload_wants_other_workers(self, index: int) -> None:
        world = self.world(index)
        if not world.changing:
            world.changing = True
            world.tell(RolloutAsked([spec("other", build=self.opened)], []))
            self.machine.look()

    @rule(seconds=st.sampled_from([0.1, 3.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.machine.pass_time(seconds)

    @invariant()
    def one_model_is_loaded_at_a_time(self) -> None:
        if hasattr(self, "machine"):
            loading = [world for world in self.machine.worlds if world.stage is ModelStage.LOADING]
            assert len(loading) <= 1

    @invariant()
    def what_is_there_fits(self) -> None:
        if hasattr(self, "machine"):
            pairs = zip(self.machine.worlds, self.machine.needs, strict=True)
            loaded_needs = [need for world, need in pairs if world.processes]
            assert sum(loaded_needs) <= self.machine.memory

    @invariant()
    def a_model_that_is_gone_has_no_worker(self) -> None:
        for world in self.machine.worlds if hasattr(self, "machine") else []:
            if world.stage is ModelStage.UNLOADED:
                assert not world.processes
                assert all(replica.state.phase == UNLOADED for replica in world.state.replicas.serving)

    def teardown(self) -> None:
        """Let workers work, with more and more requests for one model: whatever waits is served nevertheless."""
        if not hasattr(self, "machine"):
            return
        machine = self.machine
        waited = [set(world.delivered) for world in machine.worlds]
        for number in range(120):
            if not any(world.delivered.keys() & keys for world, keys in zip(machine.worlds, waited, strict=True)):
                break
            machine.worlds[0].open(f"more{number}")
            machine.look()
            machine.pass_time(2.0)
            machine.advance_workers()
            machine.decode(9)
        assert not any(world.delivered.keys() & keys for world, keys in zip(machine.worlds, waited, strict=True))
        for world in machine.worlds:
            world.tell(ControlClosed())
            assert not world.delivered


TestModels = ModelMachine.TestCase
TestModels.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def three(idle_s: float = 60.0) -> Machine:
    """Three models on demand, and memory for two."""
    return Machine(["on_demand"] * 3, [1, 1, 1], 2, idle_s)


def load(machine: Machine, number: int) -> None:
    """Have a request for a model, and the model ready for it."""
    machine.worlds[number].open(f"first{number}.{machine.now_s}")
    machine.look()
    for _ in range(6):
        machine.advance_workers()


def finish(machine: Machine) -> None:
    machine.decode(MAX_TOKENS)


def stages(machine: Machine) -> list[str]:
    return [world.stage.value for world in machine.worlds]


def test_nothing_is_loaded_before_a_request_and_a_model_that_rests_is_unloaded() -> None:
    machine = three()
    machine.advance_workers()
    assert stages(machine) == ["not loaded"] * 3
    load(machine, 1)
    assert stages(machine) == ["not loaded", "loaded", "not loaded"]
    machine.pass_time(100.0)
    assert stages(machine)[1] == "loaded", "it has a request"
    finish(machine)
    machine.pass_time(59.0)
    assert stages(machine)[1] == "loaded"
    machine.pass_time(2.0)
    machine.advance_workers()
    assert stages(machine) == ["not loaded"] * 3
    assert machine.worlds[1].state.residency.unloads == {"idle": 1}


def test_the_least_used_model_gives_way() -> None:
    machine = three()
    for number in (0, 1, 0):
        load(machine, number)
        finish(machine)
        machine.pass_time(1.0)
    load(machine, 2)
    assert stages(machine) == ["loaded", "not loaded", "loaded"]
    assert machine.worlds[1].state.residency.unloads == {"room": 1}


def test_a_model_with_requests_has_them_to_the_end_and_those_behind_wait_for_its_return() -> None:
    machine = three()
    load(machine, 0)
    load(machine, 1)
    machine.worlds[2].open("wanted")
    machine.look()
    assert stages(machine) == ["loaded", "loaded", "not loaded"]
    machine.pass_time(PATIENCE_S + 0.1)
    assert stages(machine).count("leaving") == 1
    leaving = stages(machine).index("leaving")
    machine.worlds[leaving].open("late")
    machine.look()
    assert "late" not in machine.worlds[leaving].holder
    machine.decode(9)
    machine.advance_workers()
    assert stages(machine)[leaving] == "leaving", "its first request goes on"
    finish(machine)
    for _ in range(6):
        machine.advance_workers()
    assert stages(machine)[2] == "loaded"
    for _ in range(40):
        machine.pass_time(0.5)
        machine.advance_workers()
        finish(machine)
    assert not any(world.delivered for world in machine.worlds), "all were served"


def test_a_model_stays_where_the_one_that_wants_its_room_is_not_waited_for_any_more() -> None:
    machine = three()
    load(machine, 0)
    load(machine, 1)
    machine.worlds[2].open("wanted")
    machine.look()
    machine.pass_time(PATIENCE_S + 0.1)
    machine.worlds[2].tell(StreamClosed("wanted"))
    machine.look()
    assert stages(machine) == ["loaded", "loaded", "not loaded"]


def test_a_load_that_comes_to_nothing_tells_those_who_wait_and_lets_others_have_their_turn() -> None:
    machine = three()
    machine.worlds[0].open("vain")
    machine.worlds[1].open("behind")
    machine.look()
    for _ in range(LOAD_TRIES):
        assert machine.worlds[0].errors == []
        machine.worlds[0].start(0)
        machine.worlds[0].end_process(0)
    assert "could not be loaded" in machine.worlds[0].errors[0]
    for _ in range(6):
        machine.advance_workers()
    assert stages(machine)[:2] == ["not loaded", "loaded"]
    load(machine, 0)
    assert stages(machine)[0] == "loaded", "the next request tries again"


def test_a_model_that_can_never_be_loaded_is_not_tried_again() -> None:
    machine = three()
    world = machine.worlds[0]
    world.open("vain")
    machine.look()
    world.start(0)
    world.tell(WorkerSaid(0, Failed("no such device", restartable=False)))
    world.end_process(0)
    assert "no such device" in world.errors[0]
    assert world.stage is ModelStage.FAILED
    load(machine, 1)
    assert stages(machine)[:2] == ["failed", "loaded"]


def test_what_cannot_be_there_together_is_found_beforehand() -> None:
    needs = [{DEVICE: 3}, {DEVICE: 2}, {"here/OTHER": 9}]
    assert find_misfit(needs, [0], {DEVICE: 4}) == Misfit(DEVICE, (0, 1), 5, 4)
    assert find_misfit(needs, [], {DEVICE: 4}) is None
    assert find_misfit(needs, [0, 1], {DEVICE: 5}) is None
    assert find_misfit(needs, [], {DEVICE: 4, "here/OTHER": 8}) == Misfit("here/OTHER", (2,), 9, 8)

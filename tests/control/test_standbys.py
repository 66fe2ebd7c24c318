"""Standbys and health in control's step: who takes over, what streams may go where, what is started when."""

from __future__ import annotations

import pytest

from orchestrator.daemon.control.events import ClusterOpened, PartHeld, StandbySpec, Woke, WorkerSaid, WorkersChosen
from orchestrator.daemon.control.health.health import Part
from orchestrator.protocol.events import Failed, FailureKind
from policies.serving.failover.health import Health
from policies.serving.failover.standby import FailoverRules, OtherBits, Readiness
from tests.control.test_step import MAX_TOKENS, World, open_stream, spec

HOT, COLD = Readiness.HOT, Readiness.COLD


def serve(*standbys: StandbySpec, other_bits: OtherBits = "new_requests", targets: int = 1) -> World:
    """Have the target ready, its processes numbered from 0, and what stands by behind it."""
    world = World(max_restarts=5)
    rules = FailoverRules(2.0, 10.0, other_bits)
    world.tell(WorkersChosen([spec(f"t{number}") for number in range(targets)], [], standbys, rules))
    world.tell(ClusterOpened())
    for worker in range(targets):
        world.start(worker)
        world.make_ready(worker)
    return world


def stand_by(kind: str = "fp32", readiness: Readiness = HOT, device: str = "SPARE") -> StandbySpec:
    return StandbySpec(spec("standby", kind, device=device), readiness)


def pass_time(world: World, seconds: float) -> None:
    world.now_s += seconds
    world.tell(Woke())


def fail(world: World, worker: int, kind: FailureKind) -> None:
    world.tell(WorkerSaid(worker, Failed("broken", restartable=True, kind=kind)))
    world.end_process(worker)


def test_a_hot_standby_of_the_same_bits_takes_streams_over_at_once_and_gives_them_back() -> None:
    world = serve(stand_by())
    world.start(1)
    world.make_ready(1)
    open_stream(world, "a")
    world.decode(0, [3])
    world.end_process(0)
    assert world.holder == {"a": (1, "a#2")}
    world.decode(1, [3])
    world.start(0)
    world.make_ready(0)
    open_stream(world, "b")
    assert world.holder == {"a": (1, "a#2"), "b": (0, "b")}, "new requests go to the target at once"
    pass_time(world, 10.0)
    assert world.holder["a"] == (0, "a#3")
    world.decode(0, [MAX_TOKENS, MAX_TOKENS])
    assert not world.delivered
    assert world.state.standbys.taken == {"same": 1}
    assert [one.name for one in world.state.standbys.list_idle()] == ["standby"], "it stands by, loaded"


def test_a_cold_standby_is_loaded_when_the_target_stays_away() -> None:
    world = serve(stand_by(readiness=COLD))
    assert set(world.processes) == {0}
    open_stream(world, "a")
    world.end_process(0)
    pass_time(world, 1.9)
    assert set(world.processes) == {0}, "the target may come back first"
    pass_time(world, 0.2)
    assert set(world.processes) == {0, 1}
    world.start(1)
    world.make_ready(1)
    assert world.holder == {"a": (1, "a#2")}


@pytest.mark.parametrize("other_bits", ["never", "new_requests", "streams"])
def test_what_a_standby_of_other_bits_may_do_is_the_operators_choice(other_bits: OtherBits) -> None:
    world = serve(stand_by("bf16"), other_bits=other_bits)
    world.start(1)
    world.make_ready(1)
    open_stream(world, "begun")
    world.decode(0, [3])
    world.end_process(0)
    open_stream(world, "new")
    pass_time(world, 2.1)  # the target may come back first
    with_standby = {key for key, (worker, _) in world.holder.items() if worker == 1}
    assert with_standby == {"never": set(), "new_requests": {"new"}, "streams": {"begun", "new"}}[other_bits]
    world.start(0)
    world.make_ready(0)
    for worker in world.numbers(ready=True, stopping=False):
        world.decode(worker, [MAX_TOKENS] * 2)
    assert not world.delivered, "nothing is lost either way"


def test_the_next_standby_is_tried_where_the_first_cannot_be_loaded() -> None:
    world = serve(stand_by(readiness=COLD, device="A"), stand_by(readiness=COLD, device="B"))
    open_stream(world, "a")
    world.end_process(0)
    pass_time(world, 3.0)
    world.start(1)
    world.end_process(1)
    assert set(world.processes) == {0, 1, 2}
    world.start(2)
    world.make_ready(2)
    assert world.holder == {"a": (2, "a#2")}


def test_a_device_that_fails_again_and_again_is_left_alone_and_then_tried_with_one_stream() -> None:
    world = serve(stand_by())
    world.start(1)
    world.make_ready(1)
    for _ in range(2):
        fail(world, 0, "device_lost")
        if world.state.health.views(world.now_s)[0].state == "suspect":
            world.start(0)
            world.make_ready(0)
    [part] = world.state.health.views(world.now_s)
    assert (part.kind, part.name, part.state) == ("device", "here/DEV", "open")
    assert 9.0 < part.wait_s <= 10.0
    world.now_s += 10.0
    world.start(0)
    world.make_ready(0)
    for key in ("a", "b", "c"):
        open_stream(world, key)
    assert sorted(worker for worker, _ in world.holder.values()) == [0, 1, 1], "one is the trial"
    world.decode(0, [20])
    open_stream(world, "d")
    assert world.holder["d"][0] == 0
    assert world.state.health.views(world.now_s)[0].state == "suspect"


def test_a_part_that_drains_is_cordoned_when_it_has_finished() -> None:
    world = serve()
    open_stream(world, "a")
    world.decode(0, [3])
    part = Part("worker", "t0")
    world.tell(PartHeld(part, Health.DRAINING))
    open_stream(world, "b")
    assert "b" not in world.holder
    assert world.holder["a"][0] == 0, "nobody else goes on with it"
    world.decode(0, [MAX_TOKENS])
    assert world.state.health.judge([part], 0.0).state is Health.CORDONED
    world.tell(PartHeld(part, None))
    assert world.holder["b"][0] == 0


def test_a_suspect_replica_gets_what_the_healthy_one_has_no_place_for() -> None:
    world = World(max_restarts=5)
    world.tell(WorkersChosen([spec("t0", device="A"), spec("t1", device="B")], []))
    world.tell(ClusterOpened())
    for worker in (0, 1):
        world.start(worker)
        world.make_ready(worker)
    fail(world, 0, "device_lost")
    world.start(0)
    world.make_ready(0)
    assert {one.name: one.state for one in world.state.health.views(world.now_s)} == {"here/A": "suspect"}
    for key in ("a", "b", "c"):
        open_stream(world, key)
    assert {key: worker for key, (worker, _) in world.holder.items()} == {"a": 1, "b": 1, "c": 0}

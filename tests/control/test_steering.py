"""What operators ask of control's step: failovers that wait, that come back, and choices that outlive a worker."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.daemon.control.actions import LogLine, Send
from orchestrator.daemon.control.events import (
    DraftersChosen,
    FailoverAsked,
    FailoverUndone,
    PartHeld,
    RequestCancelled,
    RequestQuarantined,
    RolloutAsked,
    Woke,
    WorkerSaid,
)
from orchestrator.daemon.control.health.health import Part
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.streams.admission import ControlLimits, check_room
from orchestrator.daemon.control.streams.request_history import RequestHistories, RequestHistory, belongs_to
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import ChooseDrafters
from orchestrator.protocol.events import Failed
from orchestrator.protocol.rounds import Delta, RequestStats
from policies.serving.failover.health import Health
from policies.serving.failover.standby import Readiness
from tests.control.test_standbys import COLD, HOT, serve, stand_by
from tests.control.test_step import World, open_stream, spec


def test_a_failover_to_a_cold_standby_waits_until_it_serves_and_comes_back() -> None:
    world = serve(stand_by(readiness=COLD))
    open_stream(world, "a")
    world.decode(0, [3])
    world.tell(FailoverAsked("t0", "standby"))
    assert world.holder == {"a": (0, "a")}, "the standby is only being loaded"
    world.start(1)
    world.make_ready(1)
    assert world.holder == {"a": (1, "a#2")}
    open_stream(world, "b")
    assert world.holder["b"][0] == 1, "new ones go there, too"
    world.tell(FailoverUndone("t0"))
    assert world.holder["a"] == (0, "a#3")


def test_a_failover_goes_to_the_replica_that_was_named_though_the_other_one_is_free() -> None:
    world = serve(targets=3)
    for key in ("x", "y", "z"):
        open_stream(world, key)
    source, target = sorted({worker for worker, _ in world.holder.values()})[:2]
    moving = [key for key, (worker, _) in world.holder.items() if worker == source]
    world.tell(FailoverAsked(f"t{source}", f"t{target}"))
    assert {world.holder[key][0] for key in moving} == {target}
    world.tell(PartHeld(Part("worker", f"t{source}"), None))
    assert {world.holder[key][0] for key in moving} == {target}, "who only uncordons leaves streams where they are"
    assert world.state.steering.list_failovers() == {}


def test_a_standby_that_was_called_while_the_target_serves_keeps_its_place_until_it_is_undone() -> None:
    world = serve(stand_by(), targets=2)
    world.start(2)
    world.make_ready(2)
    for key in ("a", "b"):
        open_stream(world, key)
    kept = next(key for key, (worker, _) in world.holder.items() if worker == 1)
    world.tell(FailoverAsked("t0", "standby"))
    assert {key: worker for key, (worker, _) in world.holder.items()} == {"a": 2, "b": 2} | {kept: 1}
    world.now_s += 60.0
    open_stream(world, "c")
    assert world.holder["c"][0] == 1, "new ones go to the target, which serves"


@pytest.mark.parametrize("readiness", [HOT, COLD])
def test_while_the_other_side_of_a_failover_is_away_its_worker_takes_requests(readiness: Readiness) -> None:
    world = serve(stand_by(readiness=readiness))
    world.tell(FailoverAsked("t0", "standby"))
    world.start(1)
    world.make_ready(1)
    open_stream(world, "a")
    world.decode(1, [3])
    assert world.holder == {"a": (1, "a")}
    for life in range(3):
        world.end_process(1)
        open_stream(world, f"b{life}")
        assert {worker for worker, _ in world.holder.values()} == {0}, "nobody waits for the standby"
        check_taken_in(world)
        world.start(1)
        world.make_ready(1)
        assert {worker for worker, _ in world.holder.values()} == {1}, "the failover lasts until it is undone"
    failed = Failed("no such device", restartable=False, kind="model_replaced")
    world.tell(WorkerSaid(1, failed))
    world.end_process(1)
    check_taken_in(world)
    assert {worker for worker, _ in world.holder.values()} == {0}


@pytest.mark.parametrize("first", ["failover", "cordon"])
def test_who_keeps_work_from_a_worker_besides_is_not_overruled_by_a_failover_whose_other_side_is_away(
    first: str,
) -> None:
    world = serve(targets=2)
    asked: list[FailoverAsked | PartHeld] = [FailoverAsked("t0", "t1"), PartHeld(Part("worker", "t0"), Health.CORDONED)]
    for event in asked if first == "failover" else reversed(asked):
        world.tell(event)
    world.end_process(1)
    open_stream(world, "a")
    assert world.holder == {}
    assert world.state.health.judge((), world.now_s, "t0").held


NAMES = ("t0", "t1", "standby")
HAPPENINGS = st.one_of(
    st.tuples(st.just("fail over"), st.permutations(NAMES)),
    st.tuples(st.sampled_from(["undo", "lose", "fail", "be ready", "open"]), st.permutations(NAMES)),
)


@given(st.lists(HAPPENINGS, max_size=30))
def test_no_failover_keeps_requests_from_all_that_serve(happenings: list[tuple[str, list[str]]]) -> None:
    world = serve(stand_by(), targets=2)
    world.start(2)
    world.make_ready(2)
    for number, (what, (name, other, _)) in enumerate(happenings):
        world.now_s += 30.0
        serving = {world.processes[worker].spec.name: worker for worker in world.numbers(ready=True, stopping=False)}
        coming = {world.processes[worker].spec.name: worker for worker in world.numbers(ready=False, stopping=False)}
        match what:
            case "fail over" if {name, other} <= serving.keys() and name != "standby":  # else it is refused
                world.tell(FailoverAsked(name, other))
            case "undo" if name in world.state.steering.list_failovers():
                world.tell(FailoverUndone(name))
            case "lose" if name in serving:
                world.end_process(serving[name])
            case "fail" if name in serving:
                world.tell(WorkerSaid(serving[name], Failed("gone", restartable=False, kind="model_replaced")))
                world.end_process(serving[name])
            case "be ready" if name in coming:
                world.start(coming[name])
                world.make_ready(coming[name])
            case "open":
                open_stream(world, f"r{number}")
        if any(replica.serving for replica in world.state.replicas.serving):
            check_taken_in(world)


def check_taken_in(world: World) -> None:
    """See that a request would be taken in, and not for want of a better view of the replicas."""

    def look() -> StateView:
        raise AssertionError("no replica takes requests")

    check_room(world.state, ControlLimits(99, 99, 5), look, world.now_s)


def test_a_choice_of_drafters_outlives_the_worker_that_it_was_told() -> None:
    world = serve(targets=2)
    world.tell(DraftersChosen([1], ()))
    world.end_process(1)
    world.start(1)
    world.make_ready(1)
    assert world.state.steering.chosen == {1: ()}
    replica = world.state.replicas.serving[1]
    assert world.state.steering.observe_ready(replica, []) == [Send(replica.worker, ChooseDrafters([]))]
    assert world.state.steering.observe_ready(world.state.replicas.serving[0], []) == []
    world.tell(DraftersChosen([0, 1], None))
    assert world.state.steering.observe_ready(replica, []) == []


def test_a_choice_of_a_drafter_that_is_gone_is_over_in_the_worker_too() -> None:
    world = serve(targets=1)
    world.tell(DraftersChosen([0], ("suffix",)))
    replica = world.state.replicas.serving[0]
    line, sent = world.state.steering.observe_ready(replica, ["model"])
    assert isinstance(line, LogLine)
    assert sent == Send(replica.worker, ChooseDrafters(None))
    assert world.state.steering.chosen == {}


@pytest.mark.parametrize("asked", [PartHeld(Part("worker", "t0"), Health.DRAINING), FailoverAsked("t0", "t1")])
def test_what_was_asked_of_a_worker_that_is_gone_does_not_meet_its_namesake(asked: PartHeld | FailoverAsked) -> None:
    world = serve(targets=2)
    world.tell(asked)
    assert world.state.health.judge((), world.now_s, "t0").held
    for build, names in enumerate((["t0.2", "t1.2"], ["t0", "t1"]), start=1):
        world.changing = True
        world.tell(RolloutAsked([spec(name, build=build) for name in names], []))
        for worker in (2 * build, 2 * build + 1):
            world.start(worker)
            world.make_ready(worker)
        for worker in (2 * build - 2, 2 * build - 1):
            world.end_process(worker)
        assert [one.name for one in world.state.replicas.serving] == names
        assert not world.state.health.judge((), world.now_s, "t0").held
        assert world.state.steering.list_failovers() == {}


def test_a_failover_that_is_aimed_anew_calls_off_its_first_standby() -> None:
    world = serve(stand_by(), targets=2)
    world.start(2)
    world.make_ready(2)
    open_stream(world, "a")
    world.tell(FailoverAsked("t0", "standby"))
    world.tell(FailoverAsked("t0", "t1"))
    world.now_s += 60.0
    world.tell(Woke())
    assert [one.name for one in world.state.standbys.list_idle()] == ["standby"]


def test_a_cancelled_and_a_quarantined_stream_leave_their_worker() -> None:
    world = serve(targets=1)
    for key in ("a", "b"):
        open_stream(world, key)
    world.tell(RequestCancelled(["a", "gone"]))
    assert set(world.holder) == {"b"}
    stream = world.state.streams.find_live("b")
    assert stream is not None
    world.tell(RequestQuarantined(stream.digest, "b", 1, world.now_s + 60.0))
    assert world.holder == {}
    assert [one.deaths for one in world.state.blame.list_quarantined(world.now_s)] == [0]


def test_a_history_keeps_a_bounded_number_of_stretches_and_every_token() -> None:
    history = RequestHistory(key="a", prompt_tokens=3, opened_s=0.0)
    history.observe_sent("t0", 1.0)
    stats = RequestStats(3, 0, 0, 0, 0, 5.0, 7.0)
    for number in range(1, 1001):
        stats = msgspec.structs.replace(stats, drafted=2 * number, accepted=number)
        history.observe_delta(Delta("a", [1, 2], stats=stats), 1.0 + number)
    view = history.view(1002.0)
    assert len(view.rounds) <= 64
    assert sum(one.tokens for one in view.rounds) == view.tokens == 2000
    assert (sum(one.drafted for one in view.rounds), sum(one.accepted for one in view.rounds)) == (2000, 1000)
    assert (view.depth, view.queue_ms, view.prefill_ms) == (2.0, 1005.0, 7.0)
    history.observe_recalled("its worker was lost", 1003.0)
    history.observe_sent("t1", 1004.0)
    history.observe_delta(Delta("a", [1], stats=RequestStats(3, 1, 1, 4, 1, 0.0, 1.0)), 1005.0)
    view = history.view(1006.0)
    assert sum(one.drafted for one in view.rounds) == 2004, "the next worker counts from 0"
    assert [(one.replica, one.why) for one in view.moves] == [("t0", "its worker was lost")]


def test_histories_of_ended_requests_are_bounded_and_found_by_id_and_digest() -> None:
    book = RequestHistories()
    for number in range(2000):
        book.open(Submit(f"r{number}", [1], 4), 0.0).digest = f"d{number}"
        book.end(f"r{number}", "stop", 1.0)
    assert book.find_choices("r0") == []
    assert [one.key for one in book.find_choices("r1999")] == ["r1999"]
    found = book.find_like("d1998")
    assert found is not None
    assert (found.key, found.view(2.0).state) == ("r1998", "ended")


def test_a_choice_of_an_answer_belongs_to_it_and_no_other_answers_does() -> None:
    assert all(belongs_to(key, "cmpl-a-0") for key in ("cmpl-a-0", "cmpl-a-1", "cmpl-a-11"))
    assert belongs_to("cmpl-a-1", "cmpl-a")
    assert not belongs_to("cmpl-ab", "cmpl-a")
    assert not belongs_to("cmpl-a-x", "cmpl-a-0")

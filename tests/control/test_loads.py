"""The live state of devices in control: it moves requests and drafts, falls away when it is old, and is told."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.device_load import CoreLoad, DeviceLoad
from orchestrator.daemon.control.actions import LogLine, TellLoads
from orchestrator.daemon.control.events import ClusterOpened, LoadObserved, Woke, WorkerSaid, WorkersChosen
from orchestrator.daemon.control.routing.loads import STALE_S, LoadBoard, name_device
from orchestrator.daemon.control.routing.surroundings import Surroundings
from orchestrator.daemon.control.step import step
from orchestrator.daemon.control.streams.request_history import RouteBook
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import Delta, Gauges, RoundReport
from policies.serving.replica_load import PairPaces, SeenRound
from policies.serving.routing import ReplicaState, RoutedRequest, route
from tests.control.test_step import World, open_stream, spec
from tests.support.ready import change_ready

PINNED = [msgspec.structs.replace(spec(f"t{core}", device="CPU"), cores=[core]) for core in (0, 1)]


def load(*others: float) -> DeviceLoad:
    """A processor whose cores are taken so far by other programs."""
    cores = {core: CoreLoad(0.0, share) for core, share in enumerate(others)}
    return DeviceLoad(sum(others) / len(others), sum(others) / len(others), cores, 100, 80)


def serve_two(specs: list[WorkerSpec]) -> World:
    world = World(max_restarts=1)
    world.tell(WorkersChosen(specs, []))
    world.tell(ClusterOpened())
    for worker in range(2):
        world.start(worker)
        world.make_ready(worker)
    return world


def sample(world: World, name: str, seen: DeviceLoad, seconds: int = 1) -> None:
    for _ in range(seconds):
        world.now_s += 1.0
        world.tell(LoadObserved({name: seen}))


def send(world: World, key: str) -> int:
    """Return the worker that a new request goes to; it is over then."""
    open_stream(world, key)
    worker, sent_id = world.holder[key]
    while key in world.delivered:
        world.decode(worker, [40])
    assert sent_id.startswith(key)
    return worker


def test_requests_leave_a_core_that_is_taken_and_come_back() -> None:
    world = serve_two(PINNED)
    sample(world, "here/CPU", load(0.0, 0.0), 3)
    assert send(world, "a") == 0, "of equals the first"
    sample(world, "here/CPU", load(0.5, 0.0), 2)
    assert send(world, "b") == 1
    sample(world, "here/CPU", load(0.0, 0.0), 8)
    assert send(world, "c") == 0


@pytest.mark.parametrize(("rivals", "lost"), [(None, 0.5), (1.0, 0.5), (3.0, 0.75), (8.0, 8 / 9)])
def test_work_that_rests_is_not_planned_where_many_want_the_processor(rivals: float | None, lost: float) -> None:
    """A draft that was switched off there takes no time, so nobody sees how little it would get."""
    board = LoadBoard()
    board.observe_samples({"here/CPU": DeviceLoad(1.0, 0.95, rivals=rivals)}, {}, 1.0)
    assert board.list_loads()["here/CPU"].others == pytest.approx(lost)


def test_samples_of_another_host_come_the_same_way() -> None:
    far = [msgspec.structs.replace(spec(f"t{number}", device="CUDA:0"), node=f"host-{number}") for number in (0, 1)]
    world = serve_two(far)
    assert send(world, "a") == 0
    sample(world, "host-0/CUDA:0", DeviceLoad(0.9, 0.7), 3)
    assert send(world, "b") == 1


def test_a_hot_device_is_slower_and_not_lost() -> None:
    world = serve_two([spec("t0", device="CUDA:0"), spec("t1", device="CUDA:1")])
    hot = DeviceLoad(0.1, 0.0, temperature_c=90.0, temperature_limit_c=90.0)
    sample(world, "here/CUDA:0", hot)
    assert send(world, "a") == 1
    world.end_process(1)
    assert send(world, "b") == 0


def test_a_sample_that_is_old_counts_no_more_and_that_is_said_once() -> None:
    world = serve_two(PINNED)
    sample(world, "here/CPU", load(0.5, 0.0), 2)
    assert send(world, "a") == 1
    world.now_s += STALE_S + 1.0
    told = step(world.state, Woke(), world.now_s)
    assert [one.text % one.values for one in told if isinstance(one, LogLine)] == [
        "device here/CPU: nothing was heard of its load for 10 s, it counts no more"
    ]
    assert send(world, "b") == 0
    world.now_s += 2.0
    assert not [one for one in step(world.state, Woke(), world.now_s) if isinstance(one, LogLine)]


@pytest.mark.parametrize("others", [0.0, 0.5])
def test_rounds_are_learnt_without_what_others_took_of_them(others: float) -> None:
    """So a replica that was slow for a while is not believed to be slow for good."""
    world = serve_two(PINNED)
    sample(world, "here/CPU", load(others, others), 4)
    open_stream(world, "a")
    done = RoundReport([Delta("a", [0])], 1, 2, 0, 0, 0, [], 10.0 / (1.0 - others), 5.0, 0.0)
    world.tell(WorkerSaid(0, done))
    replica = world.state.replicas.serving[0]
    assert replica.paces.plain.tpot_ms(1) == 0.0, "not before it is known"
    world.now_s += 1.0
    told = step(world.state, LoadObserved({"here/CPU": load(others, others)}), world.now_s)
    assert replica.paces.plain.tpot_ms(1) == pytest.approx(10.0)
    assert isinstance(told[-1], TellLoads)


def test_where_a_device_does_not_say_whose_its_time_is_our_rounds_are_taken_off() -> None:
    board, target = LoadBoard(), spec("t0", device="CUDA:0")
    for second in range(6):
        board.observe_samples({"here/CUDA:0": DeviceLoad(0.9, None)}, {}, float(second))
        board.observe_round(target, 600.0)
    (device,) = board.view(6.0)
    assert device.load.others == pytest.approx(0.3, abs=0.02)


def with_draft(world: World, worker: int, state: str = "ok") -> None:
    """Its worker says that a draft works there; a token takes 5 ms with it and 12 without."""
    replica = world.state.replicas.serving[worker]
    assert replica.state.ready is not None
    replica.state.replace_ready(change_ready(replica.state.ready, drafters=["small"]))
    gauges = Gauges(0, 0, 1024, 1024, 0, 0, 0, 0, drafters=[DrafterState("small", "model", state)])
    world.tell(WorkerSaid(worker, gauges))
    paces = PairPaces()
    for _ in range(60):
        paces = paces.observe(SeenRound(1, 3, 4, 2, 15.0, 3.0, "small"))
    replica.paces = paces


def test_a_request_goes_to_the_pair_with_a_working_draft_whose_device_is_free() -> None:
    world = serve_two([spec("t0", device="A"), spec("t1", device="B")])
    with_draft(world, 0)
    with_draft(world, 1, "lost")
    assert send(world, "a") == 0
    with_draft(world, 1)
    drafts = {"t0": [spec("d0", device="C")], "t1": [spec("d1", device="D")]}
    world.state.around.list_drafts = drafts.__getitem__
    assert send(world, "b") == 0
    sample(world, "here/C", DeviceLoad(0.5, 0.5), 3)
    assert send(world, "c") == 1, "drafting for the first takes twice as long now"
    (told,) = world.state.router.book.find_routes("c", world.now_s)
    assert (told.replica, told.draft) == ("t1", "small")
    sample(world, "here/C", DeviceLoad(0.0, 0.0), 8)
    assert send(world, "d") == 0


def test_a_request_that_waits_stays_where_a_move_saves_little() -> None:
    around = Surroundings(hysteresis=0.2)
    busy = ReplicaState("a", 4, 1, 4, 10_000, 10_000, 0, 10.0, 1.0)
    found = route([busy, replace(busy, name="b", waiting=0)], RoutedRequest(10, 100))
    assert 0.0 < found.saves("a") < around.hysteresis
    idle = route([busy, replace(busy, name="b", waiting=0, running=0)], RoutedRequest(10, 100))
    assert idle.saves("a") > around.hysteresis


def test_a_request_is_explained_with_all_candidates_and_the_last_attempt_first() -> None:
    world = serve_two(PINNED)
    sample(world, "here/CPU", load(0.5, 0.0), 3)
    open_stream(world, "a")
    world.end_process(world.holder["a"][0])
    found = world.state.router.book.find_routes("a", world.now_s)
    assert [(one.attempt, one.replica) for one in found] == [(2, "t0"), (1, "t1")]
    assert [one.name for one in found[1].rated] == ["t1", "t0"]
    assert "most of it load: other programs take" in found[1].rated[1].why_not
    assert found[0].rated[1].why_not == "restarting"


def test_a_request_that_nothing_takes_is_explained_too() -> None:
    world = World(max_restarts=1)
    world.tell(WorkersChosen(PINNED, []))
    open_stream(world, "a")
    (told,) = world.state.router.book.find_routes("a", world.now_s)
    assert (told.replica, told.reason) == ("", "no replica serves: t0: starting; t1: starting")


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 100)), max_size=60))
def test_the_book_is_bounded_by_requests_and_candidates(sent: list[tuple[int, int]]) -> None:
    book = RouteBook()
    for attempt, (number, count) in enumerate(sent):
        states = [ReplicaState(f"r{one}", 0, 0, 1, 0, 0, 0, 1.0, 1.0) for one in range(count)]
        book.note(f"id-{number}", attempt, route(states, RoutedRequest(1, 1)), float(attempt))
    assert book._rated == sum(len(one.route.rated) for noted in book._noted.values() for one in noted)
    assert all(len(noted) <= 8 for noted in book._noted.values())
    if sent:
        assert book.find_routes(f"id-{sent[-1][0]}", 0.0)[0].attempt == len(sent) - 1


def test_choices_of_one_request_are_found_by_its_id() -> None:
    book = RouteBook()
    found = route([ReplicaState("r", 0, 0, 1, 0, 0, 0, 1.0, 1.0)], RoutedRequest(1, 1))
    for key in ("chatcmpl-1-0", "chatcmpl-1-1", "chatcmpl-12"):
        book.note(key, 1, found, 0.0)
    for asked in ("chatcmpl-1", "chatcmpl-1-0"):
        assert [one.request_id for one in book.find_routes(asked, 0.0)] == ["chatcmpl-1-0", "chatcmpl-1-1"]


def test_a_worker_without_host_is_on_this_one() -> None:
    assert name_device(spec("t0", device="CPU")) == "here/CPU"


def test_a_deadline_is_what_is_left_of_it() -> None:
    world = serve_two([spec("t0"), spec("t1")])
    world.state.around.request_timeout_s, world.state.around.ttft_ms = 10.0, 500.0
    world.delivered["a"] = []
    world.now_s = 3.0
    world.state.streams.open(Submit("a", [1], 40), now_s=1.0)
    world.tell(Woke())
    (told,) = world.state.router.book.find_routes("a", world.now_s)
    assert told.request.ends_in_ms == pytest.approx(8000.0)
    assert told.request.first_in_ms == pytest.approx(-1500.0)


def test_ten_thousand_devices_are_kept_and_shown() -> None:
    board = LoadBoard()
    for host in range(1000):
        seen = {f"host-{host}/CUDA:{number}": DeviceLoad(0.9, 0.5) for number in range(10)}
        board.observe_samples(seen, {}, 1.0)
        assert len(board.list_loads(seen)) == 10, "each host's alone"
    assert len(board.view(1.0)) == 10_000
    assert board.view(1.1) is board.view(1.2), "not put together for each request"
    assert len(board.forget_stale(2.0 + STALE_S)) == 10_000
    assert board.view(2.0 + STALE_S) == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_errors_of_a_devices_memory_are_faults_where_they_grow(growth: list[int]) -> None:
    """What was counted before the daemon came is old, and what is counted since is a fault once."""
    board, errors, name = LoadBoard(), 7, "here/CUDA:0"
    for number, more in enumerate(growth):
        errors += more
        samples = {name: DeviceLoad(memory_errors=errors)}
        faults = board.find_faults(samples)
        board.observe_samples(samples, {}, float(number))
        assert bool(faults) == (number > 0 and more > 0)
    for second in range(3):
        lost = {name: DeviceLoad(fault="GPU is lost")}
        assert board.find_faults(lost) == {name: "GPU is lost"}
        board.observe_samples(lost, {}, float(len(growth) + second))

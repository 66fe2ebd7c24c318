"""Who is blamed for the deaths of workers, by control's step without processes."""

from __future__ import annotations

import pytest

from orchestrator.daemon.control.events import QuarantineReleased, StreamOpened, Woke, WorkerSaid
from orchestrator.daemon.control.routing.route_choice import TRIAL_PATIENCE_S
from orchestrator.daemon.control.step import step
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Refused
from policies.sampling import Sampling
from policies.serving.failover.blame import SETTLED_TOKENS, LossKind
from tests.control.test_step import MAX_TOKENS, World, open_stream, serve


def serve_streams(replicas: int, *keys: str) -> World:
    """Replicas that are ready, with these streams."""
    world = World(max_restarts=9, quarantine_s=600.0)
    serve(world, replicas)
    for worker in range(replicas):
        world.make_ready(worker)
    for key in keys:
        open_stream(world, key)
    return world


def lose(world: World, worker: int, kind: LossKind = "crashed", *, restart: bool = True) -> None:
    world.end_process(worker, kind=kind)
    if restart:
        world.start(worker)
        world.make_ready(worker)


def list_held(world: World, worker: int = 0) -> list[str]:
    return [sent_id.partition("#")[0] for sent_id in world.processes[worker].has]


def test_a_crash_makes_whoever_just_began_a_suspect_that_runs_alone_first() -> None:
    world = serve_streams(1, "old", "new")
    world.decode(0, [SETTLED_TOKENS, 1])
    lose(world, 0)
    assert list_held(world) == ["new"], "the other one waits until it has shown that it harms nobody"
    world.decode(0, [SETTLED_TOKENS])
    assert list_held(world) == ["new", "old"]
    assert not world.errors


def test_a_crash_alone_in_a_worker_of_its_own_convicts_and_clears_everybody_else() -> None:
    world = serve_streams(1, "old", "bad")
    world.decode(0, [SETTLED_TOKENS, 0])
    lose(world, 0)
    lose(world, 0)
    (message,) = world.errors
    assert message.startswith("this request ended 2 worker processes, alone in the last")
    assert list_held(world) == ["old"]
    assert not world.state.blame.has_records
    budget = world.state.replicas.serving[0].life.budget
    assert not budget.made, "what a conviction explains spends nothing"
    world.decode(0, [MAX_TOKENS])
    assert not world.delivered


def test_whoever_sends_it_again_is_refused_until_it_is_released() -> None:
    world = serve_streams(1, "old", "bad")
    world.decode(0, [SETTLED_TOKENS, 0])
    lose(world, 0)
    lose(world, 0)
    again = Submit("again", [*b"bad"], MAX_TOKENS, Sampling(seed=7))
    with pytest.raises(RequestError, match="outrider quarantine release") as refused:
        step(world.state, StreamOpened(again), world.now_s)
    assert (refused.value.status, refused.value.headers) == (422, {"x-should-retry": "false"})
    (found,) = world.state.blame.list_quarantined(world.now_s)
    other = Submit("other", [*b"bad"], MAX_TOKENS, Sampling(temperature=0.5))
    world.delivered["other"] = []
    world.tell(StreamOpened(other))
    world.tell(QuarantineReleased([found.digest]))
    world.delivered["again"] = []
    world.tell(StreamOpened(again))
    assert set(list_held(world)) == {"old", "other", "again"}


def test_quarantine_ends_by_itself() -> None:
    world = serve_streams(1, "old", "bad")
    world.decode(0, [SETTLED_TOKENS, 0])
    lose(world, 0)
    lose(world, 0)
    world.now_s += 601.0
    world.delivered["again"] = []
    world.tell(StreamOpened(Submit("again", [*b"bad"], MAX_TOKENS)))
    assert not world.state.blame.list_quarantined(world.now_s)


def test_a_worker_killed_from_outside_moves_its_streams_at_once_and_blames_nobody() -> None:
    world = serve_streams(2, "a", "b")
    for _ in range(3):
        lose(world, 0, "killed", restart=False)
        assert sorted(list_held(world, 1)) == ["a", "b"]
        world.start(0)
        world.make_ready(0)
        world.decode(1, [SETTLED_TOKENS // 4] * 2)
    assert not world.errors


def test_of_a_device_that_may_be_broken_more_proof_is_asked() -> None:
    """Nobody else had a token: whatever is asked for may kill the worker."""
    world = serve_streams(1, "first")
    lose(world, 0)
    assert list_held(world) == ["first"], "it was alone, and may still be innocent"
    lose(world, 0)
    assert len(world.errors) == 1


def test_two_replicas_one_goes_on_while_the_other_tries_a_suspect() -> None:
    world = serve_streams(2, "a", "bad", "c", "d")
    at = world.holder["bad"][0]
    other = 1 - at
    for worker in range(2):
        world.decode(worker, [0 if key == "bad" else SETTLED_TOKENS for key in list_held(world, worker)])
    beside = [key for key in list_held(world, at) if key != "bad"]
    world.end_process(at, kind="crashed")
    assert "bad" not in world.holder, "it does not end the other replica too"
    assert set(beside) <= set(list_held(world, other))
    world.start(at)
    world.make_ready(at)
    assert list_held(world, at) == ["bad"]
    world.end_process(at, kind="crashed")
    assert len(world.errors) == 1
    assert sorted(list_held(world, other)) == ["a", "c", "d"]


def test_the_same_request_from_several_clients_never_begins_on_two_replicas() -> None:
    world = serve_streams(2)
    for number in range(4):
        key = f"same{number}"
        world.delivered[key] = []
        world.tell(StreamOpened(Submit(key, [7], MAX_TOKENS, Sampling(seed=number))))
    assert list(world.holder) == ["same0"]
    worker = world.holder["same0"][0]
    world.decode(worker, [1])
    assert len(world.holder) == 4, "once it had a token it is like any other"


def test_where_no_worker_comes_up_a_replica_is_emptied_for_a_suspect() -> None:
    world = serve_streams(2, "a", "bad")
    at = world.holder["bad"][0]
    other = 1 - at
    world.decode(other, [SETTLED_TOKENS])
    world.end_process(at, kind="crashed")
    assert list_held(world, other) == ["a"]
    world.now_s += TRIAL_PATIENCE_S + 1.0
    world.tell(Woke())
    assert list_held(world, other) == ["bad"]
    world.decode(other, [SETTLED_TOKENS])
    assert list_held(world, other) == ["bad", "a"]


def test_what_a_worker_cannot_hold_is_refused_in_the_words_of_the_api() -> None:
    world = serve_streams(1, "long")
    worker, sent_id = world.holder["long"]
    world.tell(WorkerSaid(worker, Refused(sent_id, "too many", "too_long", most_tokens=7)))
    (text,) = world.errors
    assert text.startswith("This model's maximum context length is 7 tokens. However, you requested ")
    assert text.endswith("(context_length_exceeded)")


def test_a_row_that_is_not_finite_is_tried_on_another_replica_and_then_given_up() -> None:
    world = serve_streams(2, "odd")
    worker, sent_id = world.holder.pop("odd")
    world.processes[worker].has.clear()
    world.tell(WorkerSaid(worker, Refused(sent_id, "a row is not a number", "not_finite")))
    second, sent_id = world.holder["odd"]
    assert second != worker
    world.tell(WorkerSaid(second, Refused(sent_id, "a row is not a number", "not_finite")))
    assert world.errors == ["a row is not a number, twice"]

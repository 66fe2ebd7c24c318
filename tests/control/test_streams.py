"""What streams keep: what was delivered, how long requests take, and what is counted."""

from __future__ import annotations

import pytest

from orchestrator.daemon.control.port import Totals
from orchestrator.daemon.control.state import TargetState, fold_round
from orchestrator.daemon.control.streams.streams import Stream, Streams
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.events import Progress
from orchestrator.protocol.rounds import Delta, RequestStats, RoundReport


def open_streams(count: int) -> tuple[Streams, list[Stream]]:
    streams = Streams()
    return streams, [streams.open(Submit(f"r{number}", [number], 100)) for number in range(count)]


def test_a_stream_is_resumed_behind_what_was_delivered() -> None:
    streams = Streams()
    stream = streams.open(Submit("a", [1], 10, committed=[5, 6]))
    streams.send(stream, "one")
    streams.deliver(Delta("a", [7, 8]), 0.0)
    assert stream.resumption() == Submit("a", [1], 10, committed=[5, 6, 7, 8])
    last = streams.deliver(Delta("a", [9], "stop", RequestStats(6, 1, 1, 0, 0, 0.0, 0.0)), 0.0)
    assert len(streams) == 0
    assert last is not None
    assert last.delta.stats == RequestStats(1, 5, 1, 0, 0, 0.0, 0.0)  # counted over all workers


@pytest.mark.parametrize(
    ("ends_s", "expected"),
    [([], 1), ([5.0], 1), ([0.0, 0.1, 0.2], 1), ([0.0, 4.0, 9.0], 5), ([0.0, 900.0], 30)],
)
def test_retry_after_follows_the_pace_at_which_streams_end(ends_s: list[float], expected: int) -> None:
    streams, opened_streams = open_streams(len(ends_s))
    for stream, now_s in zip(opened_streams, ends_s, strict=True):
        streams.send(stream, "one")
        streams.deliver(Delta(stream.key, [1], "stop"), now_s)
    assert streams.promise_place(ends_s[-1] if ends_s else 0.0, 1) == expected


def test_before_anything_has_ended_a_place_is_promised_by_the_pace_of_what_runs() -> None:
    streams = Streams()
    for key, most in (("long", 10_000), ("short", 40)):
        streams.send(streams.open(Submit(key, [1], most), now_s=0.0), "one")
        streams.deliver(Delta(key, [1]), 1.0)
        streams.deliver(Delta(key, [1] * 9), 6.0)
    assert streams.promise_place(6.0, 2) == 15  # 30 tokens at half a second
    assert streams.promise_place(6.0, 2) == 30  # the next place is another's already
    assert Streams().promise_place(6.0, 2) == 1


def test_before_a_first_token_a_place_is_not_expected_sooner_than_one_was_waited_for() -> None:
    streams = Streams()
    streams.send(streams.open(Submit("slow", [1], 10), now_s=0.0), "one")
    assert streams.promise_place(9.0, 1) == 9


def test_totals_add_up_over_rounds() -> None:
    round_ = RoundReport([], 2, 8, 2, 6, 3, [2, 1], 1.0, 1.0, 1.0)
    totals = fold_round(fold_round(Totals(), round_, 5), RoundReport([], 1, 2, 1, 1, 1, [1], 1.0, 1.0, 1.0), 2)
    assert totals == Totals(drafts=3, drafted=7, accepted=4, accepted_per_position=(3, 1), generated=7, rounds=2)


def test_progress_is_told_with_its_share_where_it_is_known() -> None:
    state = TargetState("target")
    state.observe_event(Progress("convert", 0.25))
    assert state.detail == "convert 25%"
    state.observe_event(Progress("load", -1.0))
    assert state.view(engine=0, streams=0).detail == "load"


def test_who_ran_when_a_replica_died_are_the_oldest_and_those_it_admits_before_them() -> None:
    streams, opened = open_streams(3)
    served = [streams.open(Submit(key, [ord(key)], 100, committed=[5, 6])) for key in "xyz"]
    for stream in (*opened, *served):
        streams.send(stream, "one")
    ran = streams.recall_replica("one", 2, pure=False, progressed=set(), now_s=0.0)
    assert [one.submit.request_id for one in ran] == ["r0", "r1", "x", "y"]  # either pair may have had the two places
    assert {stream.key for stream in streams.due()} == {"r0", "r1", "r2", "x", "y", "z"}

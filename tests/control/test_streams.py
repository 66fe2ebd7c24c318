"""The decisions behind a restart, without processes: who is blamed, who is sent, how long to wait."""

from __future__ import annotations

import pytest

from orchestrator.control.port import Totals
from orchestrator.control.state import MAX_BACKOFF_S, RESTART_WINDOW_S, RestartBudget, TargetState, fold_round
from orchestrator.control.streams import Stream, Streams
from orchestrator.workers.messages import Delta, Progress, RequestStats, RoundReport, Submit


def open_streams(count: int) -> tuple[Streams, list[Stream]]:
    streams = Streams()
    return streams, [streams.open(Submit(f"r{number}", [number], 100)) for number in range(count)]


def send_due(streams: Streams) -> list[str]:
    """Send what is due as control does with one replica, which a suspect has for itself."""
    due = streams.due()
    alone = [stream for stream in due if stream.crashes.suspect] or ([] if streams.in_quarantine() else due)
    return [streams.send(stream, "one").request_id.partition("#")[0] for stream in alone]


def find_sent_id(streams: Streams, key: str) -> str:
    """The id that the worker has for a stream."""
    return next(stream.sent_id for stream in streams.at("one") if stream.key == key)


def test_a_lone_stream_is_guilty_at_the_second_death() -> None:
    streams, (lone,) = open_streams(1)
    assert send_due(streams) == ["r0"]
    assert streams.recall_replica("one", 4) is None
    assert send_due(streams) == ["r0"]
    assert streams.recall_replica("one", 4) is lone


def test_a_token_between_two_deaths_acquits() -> None:
    streams, _ = open_streams(1)
    for _ in range(5):
        send_due(streams)
        streams.deliver(Delta(find_sent_id(streams, "r0"), [1]), 0.0)
        assert streams.recall_replica("one", 4) is None


def test_whoever_merely_waited_is_not_blamed() -> None:
    streams, (first, second) = open_streams(2)
    send_due(streams)
    assert streams.recall_replica("one", 1) is None
    send_due(streams)
    assert streams.recall_replica("one", 1) is first
    assert second.crashes.crash_count == 0


def test_a_death_before_anything_was_sent_blames_nobody() -> None:
    streams, (lone,) = open_streams(1)
    for _ in range(4):
        assert streams.recall_replica("one", 4) is None
    assert lone.crashes.crash_count == 0


def test_several_suspects_are_tried_one_by_one() -> None:
    streams, (_, bad, _, late) = open_streams(4)
    for _ in range(2):
        assert send_due(streams) == ["r0", "r1", "r2", "r3"]
        assert streams.recall_replica("one", 3) is None
    assert send_due(streams) == ["r0"]
    assert send_due(streams) == []  # the trial is on
    streams.deliver(Delta(find_sent_id(streams, "r0"), [1]), 0.0)
    assert send_due(streams) == ["r1"]
    assert streams.recall_replica("one", 3) is bad
    streams.drop(bad)
    assert send_due(streams) == ["r2"]
    streams.deliver(Delta(find_sent_id(streams, "r2"), [1]), 0.0)
    assert send_due(streams) == ["r0", "r3"]
    assert late.crashes.crash_count == 0


def test_a_trial_that_is_cancelled_lets_the_others_go_on() -> None:
    streams, (first, _) = open_streams(2)
    for _ in range(2):
        send_due(streams)
        streams.recall_replica("one", 4)
    assert send_due(streams) == ["r0"]
    streams.drop(first)
    assert send_due(streams) == ["r1"]


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
    assert streams.latency.promise_place(ends_s[-1] if ends_s else 0.0) == expected


def test_the_budget_backs_off_and_ends_within_its_window() -> None:
    budget = RestartBudget(limit=8)
    delays = [budget.spend("out of memory" if n == 0 else "device busy", float(n)) for n in range(8)]
    assert delays[:3] == [0.2, 0.4, 0.8]
    assert delays[-1] == MAX_BACKOFF_S
    assert budget.spend("device busy", 9.0) is None
    assert budget.describe_exhaustion("device busy") == (
        "gave up after 8 restarts within ten minutes: device busy; the first time: out of memory"
    )
    assert budget.spend("late", RESTART_WINDOW_S + 100.0) == 0.2


def test_totals_add_up_over_rounds() -> None:
    round_ = RoundReport([], 2, 8, 2, 6, 3, [2, 1], 1.0, 1.0, 1.0)
    totals = fold_round(fold_round(Totals(), round_, 5), RoundReport([], 1, 2, 1, 1, 1, [1], 1.0, 1.0, 1.0), 2)
    assert totals == Totals(drafts=3, drafted=7, accepted=4, accepted_per_position=(3, 1), generated=7, rounds=2)


def test_progress_is_told_with_its_share_where_it_is_known() -> None:
    state = TargetState("target")
    state.observe(Progress("convert", 0.25))
    assert state.detail == "convert 25%"
    state.observe(Progress("load", -1.0))
    assert state.view(engine=0, streams=0).detail == "load"

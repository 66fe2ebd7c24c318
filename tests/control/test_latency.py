"""What the last streams of a target tell of the next ones."""

from __future__ import annotations

from orchestrator.daemon.control.streams.request_history import RecentLatency, Running
from orchestrator.protocol.rounds import RequestStats


def test_streams_that_end_at_once_are_no_reason_to_ask_again_at_once() -> None:
    latency = RecentLatency()
    for _ in range(3):
        latency.observe_end(7.0, None, 5)
    assert latency.promise_place(7.0, Running(1, 7.0)) == 1


def test_a_queue_in_which_nothing_ends_promises_nothing_soon() -> None:
    latency = RecentLatency()
    for now_s in (0.0, 0.1, 0.2):  # short ones, long ago
        latency.observe_end(now_s, now_s, 5)
    assert latency.promise_place(100.0, Running(4, 88.0)) == 12


def test_a_pause_without_requests_is_no_slow_pace() -> None:
    latency = RecentLatency()
    for now_s in (0.0, 900.0):
        latency.observe_first_token(RequestStats(1, 1, 1, 0, 0, 0.0, 500.0))
        latency.observe_end(now_s, now_s - 1.5, 5)
    assert latency.promise_place(900.0, Running(1, 900.0)) == 2


def test_whoever_wants_many_places_is_promised_them_later() -> None:
    latency = RecentLatency()
    for now_s in (0.0, 2.0, 4.0):
        latency.observe_end(now_s, now_s, 5)
    assert latency.promise_place(4.0, Running(1, 4.0), wanted=5) == 10

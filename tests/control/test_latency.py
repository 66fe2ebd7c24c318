"""What the last streams of a target tell of the next ones."""

from __future__ import annotations

from orchestrator.control.latency import RecentLatency


def test_streams_that_end_at_once_are_no_reason_to_ask_again_at_once() -> None:
    latency = RecentLatency()
    for _ in range(3):
        latency.observe_end(7.0, None, 5)
    assert latency.promise_place(7.0) == 1

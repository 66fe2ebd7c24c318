"""What objectives do to admission and routing: nobody is refused for one unless the operator asks for that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.daemon.control.event_log import describe_slo_change
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.state import TargetState, effective_places, whole
from orchestrator.daemon.control.streams.admission import ControlLimits, refuse_or_pass
from orchestrator.daemon.control.streams.request_history import TypicalTimes
from orchestrator.daemon.control.streams.streams import Streams
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, Gauges, RequestStats, SloState
from policies.serving.slo import Objective
from tests.api.support import READY

TTFT = Objective(500.0)


def slo(max_running: int, *levers: str) -> SloState:
    return SloState(None, None, 1.0, 1.0, max_running, list(levers or ["nothing"]), "because")


def gauges(state: SloState | None) -> Gauges:
    return Gauges(0, 0, 1, 1, 0, 0, 0, 0, slo=state)


def serve_streams(decode_s: float, prefill_ms: float, *, ends: int = 3) -> Streams:
    """Streams of which some have ended, so long after their first tokens."""
    streams, now_s = Streams(), 0.0
    for number in range(ends):
        stream = streams.open(Submit(f"old{number}", [1], 2))
        streams.send(stream, "one")
        stats = RequestStats(1, 1, 1, 0, 0, 0.0, prefill_ms)
        streams.deliver(Delta(stream.key, [1], "", stats), now_s)
        now_s += decode_s
        streams.deliver(Delta(stream.key, [2], "length", stats), now_s)
    return streams


def view(live: int, *, running: int | None = None) -> StateView:
    """A replica of READY's four slots, of which objectives leave so many."""
    state = TargetState("one")
    state.observe_event(READY)
    state.observe_event(gauges(slo(running) if running is not None else None))
    return whole([state.view(0, live)], "local", streams=live, uptime_s=1.0, draining=False)


def refuse_or_none(live: int, limits: ControlLimits, *, running: int | None = None) -> RequestError | None:
    """Return why one more request is refused; a request takes 2 s, and 100 ms to its first token."""
    try:
        refuse_or_pass(view(live, running=running), limits, serve_streams(1.9, 100.0), 0.0)
    except RequestError as error:
        return error
    return None


def test_a_late_request_is_served_unless_the_operator_asks_otherwise():
    queueing = ControlLimits(4, 100, 1, ttft=TTFT)
    assert all(refuse_or_none(live, queueing) is None for live in (0, 4, 50))


def test_where_late_requests_are_refused_they_are_told_when_to_come_back():
    limits = ControlLimits(4, 100, 1, ttft=TTFT, refuse_late=True)
    assert refuse_or_none(3, limits) is None  # a place is free
    assert refuse_or_none(9, limits, running=None) is not None
    found = refuse_or_none(4, limits)  # one ends every half second, so the first token comes after 600 ms
    assert found is not None
    assert (found.status, found.code, found.retry_after_s) == (429, "slo_ttft", 1)
    assert "0.6 s, later than slo.ttft_ms (500 ms)" in found.message
    assert refuse_or_none(3, limits, running=2) is not None  # objectives leave two of four places


def test_a_full_queue_says_when_a_request_can_be_in_time():
    found = refuse_or_none(20, ControlLimits(4, 16, 1, ttft=TTFT))
    assert found is not None
    assert (found.code, found.retry_after_s) == ("queue_full", 9)  # 17 ends of 0.5 s, less what may be waited
    without = refuse_or_none(20, ControlLimits(4, 16, 1))
    assert without is not None
    assert without.retry_after_s == 1  # four places, and 2 s for each stream


def test_before_any_request_has_ended_nobody_is_refused():
    limits = ControlLimits(4, 100, 1, ttft=TTFT, refuse_late=True)
    refuse_or_pass(view(90), limits, Streams(), 0.0)


@given(st.integers(0, 200), st.integers(1, 64), st.floats(0.0, 1e4), st.floats(0.0, 1e3))
def test_more_requests_never_promise_an_earlier_token_and_more_places_never_a_later_one(live, places, decode, prefill):
    usual = TypicalTimes(prefill, decode)
    expected = usual.ttft_ms(live, places)
    assert expected >= prefill
    assert usual.ttft_ms(live + 1, places) >= expected
    assert usual.ttft_ms(live, places + 1) <= expected + 1e-6


@pytest.mark.parametrize(("state", "places"), [(None, 4), (slo(2), 2), (slo(9), 4)])
def test_a_replica_has_as_many_places_as_its_objectives_leave(state, places):
    assert effective_places(READY, gauges(state)) == places
    assert effective_places(READY, None) == READY.slots


def test_moves_are_told_once():
    moved = gauges(slo(2, "admission_gives_way"))
    assert describe_slo_change(None, gauges(slo(4))) == ""
    assert describe_slo_change(None, moved) == "because"
    assert describe_slo_change(moved, moved) == ""
    assert describe_slo_change(moved, gauges(slo(4))) == "because"
    assert describe_slo_change(moved, gauges(None)) == ""

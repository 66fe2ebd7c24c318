"""Endpoints whose servers have requests of others, too: these count in where ours go, and in what is learned there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.daemon.control.control_state import State
from orchestrator.daemon.control.events import WorkerSaid
from orchestrator.daemon.control.routing.route_choice import count_shared
from orchestrator.daemon.control.step import step
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import Gauges, ServerLoad
from policies.serving.narrowing import PRICED_ALL
from tests.api.support import READY
from tests.control.test_unlike_devices import DRAFT, build_fleet, device, run_rounds, send

COUNTS = st.integers(0, 40)


def tell_load(state: State, worker: int, load: ServerLoad) -> None:
    blocks = READY.kv.blocks
    drafters = [DrafterState(DRAFT, "model", "ok")]
    step(state, WorkerSaid(worker, Gauges(0, 0, blocks, blocks, 0, 0, 0, 0, drafters=drafters, server=load)), 1.0)


@pytest.mark.parametrize("more", [0, PRICED_ALL])
def test_a_request_goes_where_others_leave_it_a_place(more: int) -> None:
    state = build_fleet([device("server", 10.0), device("server", 10.0), *[device("slow", 400.0)] * more])
    tell_load(state, 0, ServerLoad(4, 0, others_running=4, slots=4))
    tell_load(state, 1, ServerLoad(1, 0, others_running=1, slots=4))
    assert send(state, "one") == "r001"
    tell_load(state, 0, ServerLoad(0, 0, slots=4))
    assert send(state, "two") == "r000"


@pytest.mark.parametrize("load", [ServerLoad(untold="HTTP 404"), ServerLoad(2, 0, slots=4)])
def test_a_server_that_tells_nothing_or_has_ours_alone_is_as_any_replica(load: ServerLoad) -> None:
    state = build_fleet([device("server", 10.0)] * 2)
    tell_load(state, 0, load)
    assert [send(state, key) for key in ("one", "two")] == ["r000", "r001"]


def test_what_a_token_takes_beside_others_is_no_price_of_ours_alone() -> None:
    """A server makes tokens for four, three of them others', in 20 ms. Once they are gone it is not taken for slow."""
    state = build_fleet([device("server"), device("server")])
    tell_load(state, 0, ServerLoad(4, 0, others_running=3))
    run_rounds(state, 0, 20.0, count=60)
    shared = state.replicas.list_all()[0].paces.plain
    run_rounds(state, 1, 20.0, count=60)
    alone = state.replicas.list_all()[1].paces.plain
    assert shared.tpot_ms(4) == pytest.approx(alone.tpot_ms(1)) == pytest.approx(20.0)
    assert shared.tpot_ms(1) < shared.tpot_ms(4)


@given(COUNTS, st.integers(1, 16), COUNTS, COUNTS, st.integers(0, 16), st.booleans())
def test_more_of_others_never_make_more_room(
    live: int, places: int, running: int, waiting: int, slots: int, one_runs: bool
) -> None:
    def count_left(load: ServerLoad) -> tuple[int, int]:
        runs, waits, most, _ = count_shared(live, places, load)
        assert 0 <= runs <= most
        assert not waits or runs == most
        return waits, runs - most

    load = ServerLoad(others_running=running, others_waiting=waiting, slots=slots)
    more = ServerLoad(others_running=running + one_runs, others_waiting=waiting + (not one_runs), slots=slots)
    if slots or not one_runs:  # a server that does not tell its slots may have more
        assert count_left(more) >= count_left(load)

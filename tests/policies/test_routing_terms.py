"""What decides where a request goes: every term, told with its figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.routing import ReplicaState, RoutedRequest, route

IDLE = ReplicaState("a", 0, 0, 4, 10_000, 10_000, 0, 10.0, 1.0)
REQUEST = RoutedRequest(500, 100)


@st.composite
def states(draw: st.DrawFn) -> tuple[ReplicaState, ...]:
    return tuple(
        ReplicaState(
            f"replica-{number}",
            draw(st.integers(0, 6)),
            draw(st.integers(0, 3)),
            4,
            10_000,
            draw(st.integers(0, 10_000)),
            draw(st.integers(0, 700)),
            draw(st.floats(1.0, 50.0)),
            draw(st.floats(0.0, 2.0)),
            serving=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 5)))
    )


@given(states())
def test_prices_are_in_order_and_the_sums_of_their_terms(replicas: tuple[ReplicaState, ...]) -> None:
    chosen = route(replicas, REQUEST)
    prices = [rated.price_ms for rated in chosen.rated]
    assert prices == sorted(prices)
    assert all(rated.price_ms == sum(term.cost_ms for term in rated.terms) for rated in chosen.rated if rated.terms)


@given(states())
def test_more_of_the_prompt_in_its_cache_never_makes_a_replica_dearer(replicas: tuple[ReplicaState, ...]) -> None:
    before = {rated.name: rated.price_ms for rated in route(replicas, REQUEST).rated}
    warmer = [replace(one, cached_prompt_tokens=one.cached_prompt_tokens + 100) for one in replicas]
    for rated in route(warmer, REQUEST).rated:
        assert rated.price_ms <= before[rated.name]


@pytest.mark.parametrize(
    ("worse", "term"),
    [
        ({"waiting": 2}, "queue"),
        ({"running": 4}, "queue"),
        ({"kv_free_tokens": 700}, "kv_pressure"),
        ({"prefill_ms_per_token": 1.5}, "prefix_affinity"),
        ({"tpot_ms": 12.0}, "tpot"),
    ],
)
def test_each_term_can_decide_and_says_so(worse: dict[str, Any], term: str) -> None:
    chosen = route([replace(IDLE, name="a", **worse), replace(IDLE, name="b")], REQUEST)
    assert chosen.replica == "b"
    assert f"most of it {term}" in chosen.rated[1].why_not


def test_a_cached_prefix_outweighs_a_slower_replica_as_long_as_it_saves_more() -> None:
    warm = replace(IDLE, name="warm", cached_prompt_tokens=480, tpot_ms=13.0)
    cold = replace(IDLE, name="cold")
    assert route([warm, cold], REQUEST).replica == "warm"
    assert route([replace(warm, tpot_ms=16.0), cold], REQUEST).replica == "cold"


def test_where_nothing_serves_the_reason_names_all() -> None:
    lost = replace(IDLE, name="lost", serving=False, why_not="restarting")
    draining = replace(IDLE, name="out", serving=False, why_not="draining")
    chosen = route([draining, lost], REQUEST)
    assert chosen.replica is None
    assert chosen.reason == "no replica serves: lost: restarting; out: draining"

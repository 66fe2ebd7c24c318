"""Each term of a pair's price turns the choice alone, without its weight it does not; pairs by length and deadline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.device_load import Stretch
from policies.serving.routing import EVEN_WEIGHTS, ReplicaState, RoutedRequest, RoutingWeights, route

PLAIN = RoutedRequest(400, 100)
HURRIED = RoutedRequest(400, 100, first_in_ms=1.0)

alike = st.builds(
    ReplicaState,
    name=st.just("a"),
    running=st.integers(0, 3),
    waiting=st.just(0),
    places=st.just(4),
    kv_tokens=st.just(10_000),
    kv_free_tokens=st.integers(9000, 10_000),
    cached_prompt_tokens=st.integers(0, 200),
    tpot_ms=st.floats(2.0, 100.0),
    prefill_ms_per_token=st.floats(0.1, 2.0),
    draft=st.just("small"),
    draft_saves_ms=st.floats(0.0, 1.0),
    stretch=st.builds(Stretch, st.floats(1.0, 2.0)),
)
"""A replica that has no term at its worst."""

WORSE: dict[str, dict[str, Any]] = {
    "queue": {"waiting": 3},
    "kv_pressure": {"kv_free_tokens": 600},
    "memory": {"free_share": 0.01},
    "load": {"stretch": Stretch(3.0, "other programs take 67%")},
    "health": {"risk": "it failed"},
    "deadline": {"waiting": 3},
    "prefix_affinity": {"cached_prompt_tokens": 0, "prefill_ms_per_token": 2.5},
    "tpot": {"tpot_ms": 120.0},
    "draft": {"draft": "", "draft_saves_ms": 0.0},
}
ONLY = {name: replace(RoutingWeights(*[0.0] * len(WORSE)), **{name: 1.0}) for name in WORSE}


def better(state: ReplicaState, term: str) -> ReplicaState:
    """The same with something to lose in that term."""
    changes: dict[str, Any] = {"draft": {"draft_saves_ms": 1.0}, "prefix_affinity": {"cached_prompt_tokens": 100}}
    return replace(state, **changes.get(term, {}))


def worse(state: ReplicaState, term: str) -> ReplicaState:
    return replace(state, name="a", **WORSE[term])


def choose_request(term: str) -> RoutedRequest:
    return HURRIED if term == "deadline" else PLAIN


@pytest.mark.parametrize("term", list(WORSE))
@given(state=alike)
def test_each_term_alone_turns_the_choice(term: str, state: ReplicaState) -> None:
    good = replace(better(state, term), name="z")
    assert route([good, worse(good, term)], choose_request(term), ONLY[term]).replica == "z"
    twin = replace(good, name="a")
    assert route([good, twin], choose_request(term), ONLY[term]).replica == "a", "equals go by name"


@pytest.mark.parametrize("term", list(WORSE))
@given(state=alike)
def test_a_term_without_weight_turns_nothing(term: str, state: ReplicaState) -> None:
    good = replace(better(state, term), name="z")
    bad = worse(good, term)
    chosen = route([good, bad], choose_request(term), replace(RoutingWeights(*[0.0] * len(WORSE)), **{term: 0.0}))
    costs = {rated.name: {own.name: own.cost_ms for own in rated.terms}[term] for rated in chosen.rated}
    assert costs == {"a": 0.0, "z": 0.0}
    assert {rated.price_ms for rated in chosen.rated} == {0.0}


@pytest.mark.parametrize("term", list(WORSE))
@given(state=alike, weight=st.floats(1.5, 50.0))
def test_more_weight_never_makes_what_a_term_speaks_against_cheaper(
    term: str, state: ReplicaState, weight: float
) -> None:
    good = replace(better(state, term), name="z")
    pair = [good, worse(good, term)]

    def lead(weights: RoutingWeights) -> float:
        prices = {rated.name: rated.price_ms for rated in route(pair, choose_request(term), weights).rated}
        return prices["a"] - prices["z"]

    assert lead(replace(EVEN_WEIGHTS, **{term: weight})) >= lead(EVEN_WEIGHTS) - 1e-6


FAST_DRAFT = ReplicaState("drafted", 4, 2, 4, 10_000, 10_000, 0, 20.0, 0.5, draft="small", draft_saves_ms=12.0)
NO_DRAFT = ReplicaState("plain", 1, 0, 4, 10_000, 10_000, 0, 20.0, 0.5)


@given(st.integers(1, 4), st.integers(1500, 4000))
def test_long_answers_go_to_the_fast_draft_and_short_ones_where_they_begin_soonest(short: int, long: int) -> None:
    waiting = replace(FAST_DRAFT, running=3, waiting=0, prefill_ms_per_token=0.8)
    assert route([waiting, NO_DRAFT], RoutedRequest(400, short)).replica == "plain"
    assert route([waiting, NO_DRAFT], RoutedRequest(400, long)).replica == "drafted"


@given(st.integers(50, 4000))
def test_a_request_without_drafts_looks_at_none(tokens: int) -> None:
    slower = replace(FAST_DRAFT, running=0, waiting=0, tpot_ms=20.5)
    assert route([slower, NO_DRAFT], RoutedRequest(10, tokens)).replica == "drafted"
    chosen = route([slower, NO_DRAFT], RoutedRequest(10, tokens, drafts=False))
    assert chosen.replica == "plain"
    assert "it asks for none" in str(chosen.rated[1].terms)


@given(st.integers(8, 12))
def test_a_near_deadline_prefers_what_begins_soonest(tokens: int) -> None:
    """The drafted pair ends first, but its first token comes late."""
    queued = replace(FAST_DRAFT, running=4, waiting=0, places=16, prefill_ms_per_token=2.0, draft_saves_ms=19.0)
    soon = replace(NO_DRAFT, prefill_ms_per_token=0.5, tpot_ms=20.0)
    request = RoutedRequest(100, tokens)
    assert route([queued, soon], request).replica == "drafted"
    assert route([queued, soon], replace(request, first_in_ms=60.0)).replica == "plain"


def test_what_a_move_saves_is_a_share_of_the_price_there() -> None:
    chosen = route([replace(NO_DRAFT, name="slow", tpot_ms=40.0), NO_DRAFT], RoutedRequest(0, 100))
    assert chosen.replica == "plain"
    assert chosen.saves("slow") == pytest.approx(0.5)
    assert chosen.saves("plain") == 0.0

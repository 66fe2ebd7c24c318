"""Which branches are verified: those that are worth their rows and forks, as long as they come true."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from policies.speculation.allocation import MOST_CERTAIN
from policies.speculation.branching import (
    MOST_BRANCHES,
    MOST_ROW_RATIO,
    BranchOffer,
    BranchState,
    RoundBranches,
    choose_branches,
    compare_rows,
    explain_branches,
    observe_branches,
)
from policies.speculation.calibration import chance
from policies.speculation.cost_model import start_cost_model
from policies.speculation.types import RoundContext, RoundSequence

FLAT = StepCost((1.0, 64.0), (30.0, 31.0), 0.05)
UNIT = st.floats(0.0, 1.0)
COSTS = st.builds(
    lambda row_ms, sequence_ms: StepCost((1.0, 64.0), (30.0, 30.0 + 63 * row_ms), sequence_ms),
    st.floats(0.0, 6.0),
    st.floats(0.0, 3.0),
)


@st.composite
def rounds(draw):
    """A round with its drafts' depths and chances, and what is offered."""
    reached = draw(st.lists(st.lists(UNIT, max_size=5).map(lambda c: sorted(c, reverse=True)), min_size=1, max_size=3))
    depths = [draw(st.integers(0, len(chances))) for chances in reached]
    places = [RoundSequence(str(number), 8) for number in range(len(reached))]
    now = RoundContext(places, len(reached), sum(depths) + draw(st.integers(0, 30)))
    offer = st.builds(
        lambda number, place, share, more, sampled: BranchOffer(number, place, 7, share, more, place + 2, sampled),
        st.integers(0, len(reached) - 1),
        st.integers(0, 5),
        UNIT,
        st.lists(UNIT, max_size=4),
        st.booleans(),
    )
    return now, depths, reached, draw(st.lists(offer, max_size=12))


def expect(state, reached, offer, further):
    """The tokens that a branch adds to its round on the average."""
    chances = reached[offer.number]
    missed = (chances[offer.place - 1] if offer.place else 1.0) - chances[offer.place]
    likely = tokens = missed * chance(state.sampled if offer.sampled else state.greedy, offer.share)
    for confidence in offer.confidences[:further]:
        likely *= min(confidence, MOST_CERTAIN)
        tokens += likely
    return tokens


@given(rounds(), COSTS, st.floats(0.0, 9.0), st.floats(0.01, 0.3))
def test_chosen_branches_fit_and_bring_more_than_they_take(of_round, cost, fork_ms, value):
    now, depths, reached, offers = of_round
    state, known = BranchState(fork_ms=fork_ms), start_cost_model(cost)
    chosen = choose_branches(state, known, now, depths, reached, offers, value)
    assert len({choice.offer for choice in chosen}) == len(chosen) <= MOST_BRANCHES
    assert all(offers[choice.offer].place < depths[offers[choice.offer].number] for choice in chosen)
    added = sum(offers[choice.offer].rows + choice.further for choice in chosen)
    assert added <= now.room - sum(depths)
    rows, sequences = now.base_rows + sum(depths), len(depths)
    more_ms = known.ms(rows + added, sequences + len(chosen)) - known.ms(rows, sequences)
    tokens = sum(expect(state, reached, offers[choice.offer], choice.further) for choice in chosen)
    assert tokens >= value * (more_ms + fork_ms * len(chosen)) - 1e-9
    if compare_rows(cost) >= MOST_ROW_RATIO:
        assert explain_branches(cost).startswith("none: 16 rows take")


@given(rounds(), st.floats(0.01, 0.3))
def test_with_free_rows_and_forks_the_likeliest_are_taken(of_round, value):
    now, depths, reached, offers = of_round
    now, free = now._replace(room=500), start_cost_model(StepCost((1.0, 64.0), (30.0, 30.0)))
    chosen = choose_branches(BranchState(), free, now, depths, reached, offers, value)
    verified = [offer for offer in offers if offer.place < depths[offer.number]]
    firsts = sorted((expect(BranchState(), reached, offer, 0) for offer in verified), reverse=True)
    taken = sorted((expect(BranchState(), reached, offers[choice.offer], 0) for choice in chosen), reverse=True)
    likely = [first for first in firsts if first >= 0.03]
    assert taken[: len(likely)] == pytest.approx(likely[:MOST_BRANCHES])


def test_branches_that_never_come_true_stop_and_begin_again():
    now = RoundContext([RoundSequence("a", 8)], 1, 60)
    offers, cost = [BranchOffer(0, 0, 7, 0.5, (), 2)], start_cost_model(FLAT)

    def is_chosen(state: BranchState) -> bool:
        return bool(choose_branches(state, cost, now, [2], [[0.6, 0.5]], offers, 1 / 30))

    state = BranchState()
    assert is_chosen(state)
    for _ in range(150):
        state = observe_branches(state, RoundBranches(1, 2, 0.2, [(offers[0], False)]))
    assert not is_chosen(state)
    assert is_chosen(state._replace(greedy=BranchState().greedy)), "it is the outcomes, not the time of forks"
    for _ in range(80):  # nobody is forked for it: the target's choice says so without
        state = observe_branches(state, RoundBranches(verdicts=[(offers[0], True)]))
    assert is_chosen(state)


def test_dear_forks_stop_and_are_tried_again():
    now = RoundContext([RoundSequence("a", 8)], 1, 60)
    offers, cost, state = [BranchOffer(0, 0, 7, 0.5, (), 2)], start_cost_model(FLAT), BranchState()
    for _ in range(10):
        state = observe_branches(state, RoundBranches(1, 2, 30.0))
    assert not choose_branches(state, cost, now, [2], [[0.6, 0.5]], offers, 1 / 30)
    for _ in range(1000):
        state = observe_branches(state, RoundBranches())
    assert choose_branches(state, cost, now, [2], [[0.6, 0.5]], offers, 1 / 30)


def test_what_is_said_of_a_device_names_the_figure_and_the_bound():
    flat = "up to 4 a round, by the rules greedy and coupled: 16 rows take 1.01 times as long as one"
    assert explain_branches(FLAT) == flat
    steep = StepCost((1.0, 16.0), (10.0, 22.0))
    assert explain_branches(steep) == "none: 16 rows take 2.20 times as long as one, and less than 1.4 times is needed"

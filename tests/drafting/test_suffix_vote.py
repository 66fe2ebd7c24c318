"""Votes are weighed by how often their like were right: that changes what a draft promises, and no token of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clock import SystemClock
from orchestrator.worker.drafting.port import Ask, Draft
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.drafting.suffix_vote import VotedDraft, VoteRates, find_vote
from policies.sampling import Sampling

TOKENS = st.integers(0, 5)
SPLIT = [1, 2, 7, 1, 2, 8, 5, 1, 2]
"""7 and 8 came behind 1 and 2."""


def drafter(beside: SuffixDrafter | None = None) -> SuffixDrafter:
    return SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock(), beside=beside)


def draft(own: SuffixDrafter, text: Sequence[int], limit: int = 4) -> Draft:
    own.begin("a", text, Sampling())
    return own.propose([Ask("a", limit)])[0]


def teach(own: SuffixDrafter, token: int, times: int) -> None:
    for _ in range(times):
        draft(own, SPLIT, limit=1)
        own.extend("a", [token])
        own.end("a", keep=False)


def test_votes_that_are_always_wrong_promise_little_and_those_that_are_right_much():
    fresh = draft(drafter(), SPLIT, limit=1)
    wrong, right = drafter(), drafter()
    teach(wrong, 4, 40)
    teach(right, fresh.tokens[0], 40)
    low, high = draft(wrong, SPLIT, limit=1), draft(right, SPLIT, limit=1)
    assert low.tokens == high.tokens == fresh.tokens
    assert low.confidences[0] < 0.1 < fresh.confidences[0] < 0.8 < high.confidences[0]


def test_votes_of_another_kind_keep_their_promise():
    own = drafter()
    teach(own, 4, 40)
    agreed = [1, 2, 7, 1, 2, 7, 1, 2, 7, 5, 1, 2]
    assert draft(own, agreed).confidences == draft(drafter(), agreed).confidences


def test_drafters_of_several_flights_count_together():
    first = drafter()
    second = drafter(beside=first)
    teach(first, 4, 40)
    assert draft(second, SPLIT, limit=1).confidences[0] < 0.1


@given(
    st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=12), st.lists(TOKENS, max_size=6)), max_size=30),
    st.lists(TOKENS, min_size=1, max_size=12),
)
def test_what_is_counted_changes_no_token_and_every_chance_is_one(rounds, text):
    own = drafter()
    for before, committed in rounds:
        draft(own, before)
        own.extend("a", committed)
        own.end("a", keep=False)
    counted, fresh = draft(own, text), draft(drafter(), text)
    assert counted.tokens == fresh.tokens
    assert len(counted.confidences) == len(counted.tokens)
    assert all(0.0 <= chance <= 1.0 for chance in counted.confidences)


def test_behind_the_first_wrong_token_nothing_is_learned():
    voters = [(1.0, [1, 2, 3], 1, True)]
    votes = [find_vote(voters, 3, 0), find_vote(voters, 3, 1)]
    learned, other = VoteRates(), VoteRates()
    learned.learn(VotedDraft([2, 3], votes), [9, 3])
    other.learn(VotedDraft([2], votes[:1]), [9])
    for vote in votes:
        assert vote is not None
        assert learned.weigh(vote) == other.weigh(vote)


def test_the_vote_that_was_not_worth_a_token_is_learned_from():
    vote = find_vote([(1.0, [1, 2], 1, True)], 3, 0)
    assert vote is not None
    rates = VoteRates()
    before = rates.weigh(vote).chance
    rates.learn(VotedDraft([], [vote]), [2])
    assert rates.weigh(vote).chance > before

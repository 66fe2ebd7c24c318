"""Drafts that are made beside the target, by whom it knows little: they are left alone where they do not pay."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.speculation import DraftComparison, DraftSummary, Rest, RoundContext, RoundSequence, RoundTimes
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import TYPICAL, start_cost_model
from policies.speculation.policy import RoundOutcome

PLAIN_MS = 40.0
TOKENS = 600


@dataclass
class Pair:
    """A target, and a drafter beside it that makes its rounds take `slowed` times as long while it drafts. A draft of
    two tokens is there in a round with the chance `ready_chance`, and each token is right with the chance `right`. A
    row more takes the share `row` of a round."""

    slowed: float
    ready_chance: float
    right: float
    row: float


def decode(pair: Pair, seed: int, noise: float = 0.15) -> tuple[float, bool]:
    """Return how many times as long as plain decoding a text takes, and whether drafts are left alone at its end."""
    drawn = random.Random(seed)
    policy = Adaptive(start_cost_model(TYPICAL))
    policy.begin("r", 4)
    made, spent_ms = 0, 0.0
    while made < TOKENS:
        now = RoundContext([RoundSequence("r", 4)], 1, 64)
        limits = policy.decide_draft_limits(now)
        allowed = any(limits.limits) and not limits.cheap_only and limits.round_ms > 0.0
        drafted = allowed and drawn.random() < pair.ready_chance
        draft = DraftSummary(2, (pair.right, pair.right)) if drafted else DraftSummary()
        depth = policy.decide_depths(now, [draft])[0]
        right = next((count for count in range(draft.tokens) if drawn.random() >= pair.right), draft.tokens)
        accepted = min(depth, right)
        forward_ms = PLAIN_MS * (1.0 + pair.row * depth) * (pair.slowed if allowed else 1.0)
        forward_ms *= drawn.uniform(1.0 - noise, 1.0 + noise)
        compared = min(draft.tokens, right + 1)
        policy.observe_round(
            now,
            RoundOutcome(
                [draft],
                [depth],
                [accepted],
                [DraftComparison(right, compared)],
                RoundTimes(forward_ms, 0.1, beside=allowed),
                1 + accepted,
            ),
        )
        made, spent_ms = made + 1 + accepted, spent_ms + forward_ms
    return spent_ms / (PLAIN_MS * made), policy.rest is not Rest.NONE


@settings(max_examples=40)
@given(st.floats(1.4, 2.5), st.floats(0.0, 0.3), st.floats(0.1, 0.5), st.integers(0, 99))
def test_what_takes_more_than_it_brings_costs_next_to_nothing(slowed, ready_chance, right, seed) -> None:
    took, rests = decode(Pair(slowed, ready_chance, right, 0.3), seed)
    assert rests
    assert took <= 1.0 + (8 + 4 + 8) * (slowed - 1.0) / TOKENS + 0.03


@settings(max_examples=40)
@given(st.floats(1.0, 1.1), st.floats(0.7, 0.9), st.integers(0, 99))
def test_what_pays_is_kept(slowed, right, seed) -> None:
    took, rests = decode(Pair(slowed, 0.9, right, 0.05), seed)
    assert took < 0.85
    assert not rests

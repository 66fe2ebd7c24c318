"""When drafting pays, whoever drafts, and the running mean that its figures are kept in.

Let T be the time of a round without drafts, c the time that drafts add to it and a the mean number of accepted drafts
per sequence. A round with drafts then yields 1 + a tokens per sequence in T + c, and one without yields 1 in T. Drafts
pay while (T + c) / (1 + a) < T, so while c < a T (the condition of Leviathan et al., arXiv 2211.17192, section 3.5, in
measured times). Within a draft, one token more pays while the chance that it is accepted, times T, is above what it
takes.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEWEST = 0.1  # least weight of the newest observation
KNOWN_ROUNDS = 4
"""So many rounds without drafts are measured before any decision rests on what they take."""
_DRAFTED = 0.05  # of a round: what takes longer than that to draft is a model


MANY = 1_000
"""So many observations, or any other number that is not few."""


def mean(before: float, newest: float, seen: int = MANY) -> float:
    """Return a running mean after one more observation, `seen` (>= 0) before it: of all while they are few."""
    return before + (newest - before) * max(_NEWEST, 1.0 / (seen + 1))


def worth_ms(accepted: float, round_ms: float) -> float:
    """Return what drafts with so many accepted tokens per sequence may add to a round of `round_ms` at most."""
    return accepted * round_ms


def token_price(step_ms: float, round_ms: float) -> float:
    """Return the chance of being accepted below which a further token is not worth what it takes (0 ms: unknown)."""
    return step_ms / round_ms if round_ms > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Running means: the target's part of a round without drafts, and what a row of a draft adds to it, in ms
    (0: not measured). `plain_rounds` counts the former. Only rounds without prompts count."""

    round_ms: float = 0.0
    row_ms: float = 0.0
    plain_rounds: int = 0

    @property
    def known_ms(self) -> float:
        """`round_ms` once it can be relied on, else 0. Of the first rounds it is the shortest, because the one behind a
        prompt takes longer than those that follow. A round that seems dear makes any draft seem worth it."""
        return self.round_ms if self.plain_rounds >= KNOWN_ROUNDS else 0.0


def observe_round_cost(cost: RoundCost, *, draft_rows: int, forward_ms: float, drafting_ms: float = 0.0) -> RoundCost:
    """Take in a forward with so many rows of drafts that nothing else would have paid for, after `drafting_ms` of
    drafting.

    One with drafts takes no less than one without, so it bounds what that takes now. A model that drafted before it may
    have slowed it, whatever its rows: its threads still spin, and its weights lie in the caches."""
    plain = draft_rows == 0 and drafting_ms <= _DRAFTED * forward_ms
    if cost.round_ms == 0.0 or (plain and cost.plain_rounds < KNOWN_ROUNDS):
        least_ms = min(cost.round_ms or forward_ms, forward_ms)
        return RoundCost(least_ms, cost.row_ms, cost.plain_rounds + plain)
    if plain or forward_ms < cost.round_ms:
        return RoundCost(mean(cost.round_ms, forward_ms), cost.row_ms, cost.plain_rounds)
    if draft_rows == 0:
        return cost
    row_ms = mean(cost.row_ms, (forward_ms - cost.round_ms) / draft_rows)
    return RoundCost(cost.round_ms, row_ms, cost.plain_rounds)

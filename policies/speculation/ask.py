"""How many tokens drafters are asked for, if at all."""

from __future__ import annotations

from policies.speculation import switching
from policies.speculation.cost_model import KNOWN_ROUNDS
from policies.speculation.probe import Probe
from policies.speculation.state import SpeculationState, base_ms, worth_per_ms
from policies.speculation.types import Rest, RoundContext

# Drafting that takes less than this share of a forward costs nothing. ADR 0028. Not tuned: a suffix lookup takes 0.3 %
# of a round (ADR 0001), a step of a draft model 10 % and more.
NOTICED = 0.01
# Sequences: see `_choose_probe`. ADR 0039: from 8 sequences on a pause asks in one round of 20.
MANY = 8
# ADR 0037, 0039: pauses are worth 0.2 % in the mean, 4.6 % with bad drafts, -2.4 % with good ones (ADR 0043).
SELDOM, SELDOM_OF_MANY = Probe(12), Probe(20)
# Of the rounds from one such ask to the next so many are looked at: they are all alike. ADR 0037: one round in six is
# looked at, at 0.06 ms a round at most (ADR 0039).
REST_LOOKS = 2
# Of what asking takes, judging what came and learning from it take as much again. ADR 0039: 1.1 is the mean of rounds,
# 0.75 the median.
_LEARNING = 1.1
# Drafting that takes more than this share of a forward is the switch's to leave alone. ADR 0036. Bounded by a suffix
# lookup below it and a draft model's step above.
_CHEAP = 0.1


def decide_draft_limits(state: SpeculationState, now: RoundContext) -> list[int]:
    """Return how many tokens to ask the drafter for, for each place."""
    if _pauses(state, now):
        return [place.max_draft_tokens if place.fixed else 0 for place in now.places]
    if state.step_ms <= NOTICED * base_ms(state, now):
        return [place.max_draft_tokens for place in now.places]
    return [
        place.max_draft_tokens
        if place.fixed
        else min(place.max_draft_tokens, max(state.requests[place.key].pid.depth, place.free))
        for place in now.places
    ]


def _choose_probe(sequences: int) -> Probe:
    """Return when drafters are asked whose drafts bring less than asking takes. Asking takes more of a round of many,
    and more is learned of it."""
    return SELDOM if sequences < MANY else SELDOM_OF_MANY


def choose_pause_probe(sequences: int) -> Probe:
    """Return when a round of a pause is looked at, if only for its time."""
    return Probe(_choose_probe(sequences).interval // REST_LOOKS)


def _pauses(state: SpeculationState, now: RoundContext) -> bool:
    """Return whether to ask for nothing in this round, since drafts bring less than asking for them takes. Drafters
    that take long are not meant: the switch leaves those alone, and they would have a text to read each time."""
    return not _choose_probe(len(now.places)).is_due(state.rounds) and is_unprofitable(state, now)


def is_unprofitable(state: SpeculationState, now: RoundContext) -> bool:
    """Return whether drafts of drafters that cost little bring less than asking for them takes."""
    worth, round_ms = now.row_price * max(1.0, state.gain), base_ms(state, now)
    sequences = len(now.places)
    if sequences * state.ask_ms > _CHEAP * round_ms:
        return False
    return state.brought * round_ms < worth * sequences * state.ask_ms * (1.0 + _LEARNING)


def find_rest(state: SpeculationState, now: RoundContext) -> Rest:
    """Return who is left alone in rounds like `now`, the last one."""
    if state.cost.seen < KNOWN_ROUNDS or any(place.fixed and place.max_draft_tokens for place in now.places):
        return Rest.NONE
    if is_unprofitable(state, now):
        return Rest.ALL
    return Rest.NONE if switching.active(state.switch) else Rest.DEAR


def decide_pause(state: SpeculationState, now: RoundContext) -> int:
    """Return how many rounds like `now`, the last one, need neither be asked about nor looked at from here on."""
    left = choose_pause_probe(len(now.places)).count_left(state.rounds)
    kept_up = 0 < state.shape.last != now.base_rows  # rows are kept for what may be proposed next
    if (
        left == 0
        or kept_up
        or state.cost.seen < KNOWN_ROUNDS
        or any(place.fixed and place.max_draft_tokens for place in now.places)
    ):
        return 0
    nobody_may = not any(place.max_draft_tokens for place in now.places)
    return left if nobody_may or is_unprofitable(state, now) else 0


def observe_pause(state: SpeculationState, now: RoundContext, rounds: int, rows: int) -> SpeculationState:
    """Take in that so many rounds much like `now` were run without a word, the last of them with `rows` (0: it
    prefilled)."""
    switch = state.switch
    if not switching.active(switch):
        switch = switching.observe_plain_rounds(switch, float(rounds))
    shape = state.shape
    if rows != shape.last:
        shape = shape._replace(last=rows, last_base=rows, regret=0.0)
    return state._replace(rounds=state.rounds + rounds, switch=switch, shape=shape)


def least_chance(state: SpeculationState, now: RoundContext) -> float:
    """Return the chance, all before included, below which a drafter that takes time for each token may stop.

    Such a token would not be worth its row and its step of drafting, which all sequences of a round share.
    """
    before = now.base_rows + now.filling_rows
    row_ms = state.cost.estimate_added_ms(before, 1, len(now.places), now.context_tokens)[0]
    return min(1.0, worth_per_ms(state, now) * (row_ms + state.step_ms / len(now.places)))

"""How many tokens of each draft are verified."""

from __future__ import annotations

from collections.abc import Sequence

from policies.speculation import shape_hysteresis
from policies.speculation.allocation import (
    LEAST_CHANCE,
    allocate_depths,
    allocate_depths_in_widths,
    cumulate_acceptance,
    floor_of,
    rank_candidates,
    worth_taking,
)
from policies.speculation.ask import least_chance
from policies.speculation.probe import Probe
from policies.speculation.state import SpeculationState, worth_per_ms
from policies.speculation.types import DepthDecision, DraftSummary, RoundContext
from policies.speculation.widths import pad_to_width

# ADR 0029: drawn tokens that are worth nothing are verified so seldom: 1.6 % of their rows. Not tuned.
_UNWORTHY_DRAWS = Probe(64)
_FORCED = 1e6  # the chance of a token that is verified whatever it costs


def decide_depths(state: SpeculationState, now: RoundContext, proposals: Sequence[DraftSummary]) -> DepthDecision:
    before, last = now.base_rows + now.filling_rows, state.shape.last
    nothing = not any(proposal.tokens for proposal in proposals)
    if nothing and (now.widths or before >= last or state.shape.change_ms <= 0.0):
        count, regret = len(proposals), state.shape.regret if before == last else 0.0
        return DepthDecision([0] * count, [[]] * count, regret=regret)
    value = worth_per_ms(state, now)
    floor = floor_of(state.cost, before, value)
    cumulative_acceptance: list[list[float]] = []
    longest, forced, drawn, requests = 0, False, False, state.requests
    for place, proposal in zip(now.places, proposals, strict=True):
        key, most, known, free, fixed = place
        request = requests[key]
        believed = proposal.confidences
        if fixed:
            chances, forced = [_FORCED] * min(len(believed), most), True
        else:
            depth = request.pid.depth
            depth = depth if depth > free else free
            if now.widths:
                depth = pad_to_width(known + depth, now.widths) - known
            most = most if most < depth else depth
            if proposal.drawn:
                drawn = True
                chances = _worth_drawing(state, now, believed, request.odds.factor, most, free)
            else:
                chances = cumulate_acceptance(believed, request.odds.factor, most, free or 1, floor)
        longest += len(chances)
        cumulative_acceptance.append(chances)
    if not longest and now.widths:
        return DepthDecision([0] * len(cumulative_acceptance), cumulative_acceptance, forced)
    bids = cumulative_acceptance
    if drawn:
        bids = [
            [_FORCED] * len(chances) if proposal.drawn else chances
            for chances, proposal in zip(cumulative_acceptance, proposals, strict=True)
        ]
    if now.widths:
        added_ms = state.cost.estimate_added_ms(before, now.room, len(cumulative_acceptance), now.context_tokens)
        depths = allocate_depths_in_widths(
            bids, [place.num_query_tokens for place in now.places], now.widths, added_ms, value
        )
        return DepthDecision(depths, cumulative_acceptance, forced)
    most = min(now.room, max(longest, last - before))
    added_ms = (
        state.cost.estimate_added_ms(before, most, len(cumulative_acceptance), now.context_tokens) if most > 0 else []
    )
    paid_for = [place.free for place in now.places]
    candidates = rank_candidates(bids, paid_for)
    best = worth_taking(candidates, added_ms, value)
    taken, filling, regret = shape_hysteresis.decide_shape(state.shape, before, candidates, added_ms, value, best)
    depths = allocate_depths(bids, paid_for, candidates, taken)
    if filling and not _pad_depths(now, depths, filling):
        depths, regret = allocate_depths(bids, paid_for, candidates, best), 0.0
    return DepthDecision(depths, cumulative_acceptance, forced, regret)


def _pad_depths(now: RoundContext, depths: list[int], filling: int) -> bool:
    """Make drafts longer by so many tokens in all, where they may be. False: they may not, and are as they were."""
    room = [
        0 if place.fixed else place.max_draft_tokens - max(depth, place.free)
        for place, depth in zip(now.places, depths, strict=True)
    ]
    if sum(room) < filling:
        return False
    for index, more in enumerate(room):
        count = min(more, filling)
        if count > 0:
            depths[index] = max(depths[index], now.places[index].free) + count
            filling -= count
    return True


def _worth_drawing(
    state: SpeculationState, now: RoundContext, believed: Sequence[float], factor: float, most: int, free: int
) -> list[float]:
    """Return the chances of the drawn tokens that are verified: each while it is worth its row by itself, which was
    known before it was drawn. What is behind it and in other drafts does not count. One now and then is verified
    whatever it promises: a drawn token that is not verified cannot be compared with anything."""
    sure = max(free, _UNWORTHY_DRAWS.is_due(state.rounds))
    return cumulate_acceptance(believed, factor, most, sure, max(LEAST_CHANCE, least_chance(state, now)))

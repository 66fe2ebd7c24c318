"""Every round's depths: one PID controller for each request, under the guard of goodput, behind switches.

    asked -> (the drafter drafts) -> decided -> (the target verifies) -> observed

Each request's PID controller holds its acceptance rate at a set point: the configured one, or what its drafts lead to
expect where that is less, so that it cuts drafts that keep less than they promise and leaves alone those that are only
hard (ADR 0028). The guard then takes from all drafts the tokens that are worth their rows. Verdicts correct each
request's chances (policies.odds), rounds correct the costs (policies.measured_cost), and the switches leave drafters
alone whose drafts do not pay for what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from policies import depth as pid
from policies import measured_cost, odds, positions, same_rows, seeds, switching
from policies.depth import GAINS, Gains, Limits, Pid
from policies.goodput import (
    LEAST_CHANCE,
    floor_of,
    given,
    offered,
    reach,
    shared_out_in_widths,
    worth_taking,
)
from policies.measured_cost import MeasuredCost
from policies.odds import Odds
from policies.positions import Positions
from policies.rows import filled
from policies.same_rows import SameRows
from policies.seeds import COLD, ClassKey, Course, Seed
from policies.switching import ON, Switch

USUAL_DRAFT = 4.0
"""So many judged tokens are one dt of the controller."""
_PROMISE_KEPT = 0.5  # a set point below the configured one is this share of what the drafts promise
_NEWEST_VALUE = 0.05  # weight of the newest round in the mean worth of time
_NEWEST_DRAFT = 0.2  # the same of what drafting takes
_NOTICED = 0.01  # drafting that takes less than this share of a forward costs nothing
_TAKEN_IN = 5  # verdicts a round: it keeps the time that policies take small where there are many sequences
_LOOK_EVERY = 64
_FORCED = 1e6  # the chance of a token that is verified whatever it costs


class Place(NamedTuple):
    """One request's share of a round. `most`: the most drafts it may have. `known`: its rows before the draft. `free`:
    drafts whose rows are run anyway. `fixed`: the request fixed its depth, and gets `most` whatever it costs."""

    key: str
    most: int
    known: int = 1
    free: int = 0
    fixed: bool = False


class Round(NamedTuple):
    """A round before its drafts. `base_rows`: what is charged without any. `room`: rows that may be added.
    `context_tokens`: positions held, on the average of the sequences. `widths`: see Capabilities.static_widths.
    `filling_rows`: what prefills run in the same forward. `row_price`: what a row of a draft is to be worth, in what
    it costs: above 1 drafts give way to something else, below 1 they are wanted (policies.slo)."""

    places: Sequence[Place]
    base_rows: int
    room: int
    context_tokens: float = 0.0
    widths: Sequence[int] = ()
    filling_rows: int = 0
    row_price: float = 1.0


class Proposal(NamedTuple):
    """A draft as the policies see it: how many tokens, and how sure of each the drafter is (none: it does not say).
    `drawn`: its tokens were drawn from distributions, so whether one is verified must not depend on what was drawn
    there or behind it."""

    tokens: int = 0
    confidences: Sequence[float] = ()
    drawn: bool = False


class Decision(NamedTuple):
    """`depths[s]`: tokens of draft s to verify; where it has fewer, the rest is filled up with any tokens, so that the
    forward has as many rows as the one before. `reaches[s]`: the chances of its tokens, all before included, as far
    as they were looked at: its first one at least. `forced`: some request fixed its depth. `given_up`: see SameRows."""

    depths: list[int]
    reaches: list[list[float]]
    forced: bool = False
    given_up: float = 0.0


class Verdict(NamedTuple):
    """Of the leading draft tokens, `compared` could be compared with what the target chose, `accepted` of them were
    equal: those that were not verified are compared too, as far as the target went their way without them."""

    accepted: int = 0
    compared: int = 0


class Times(NamedTuple):
    """What a round took: making its drafts, and its forward with all else that goes with its rows."""

    forward_ms: float
    draft_ms: float = 0.0


class Request(NamedTuple):
    """What is known of one request. `limits` of its controller. `evidence`: draft tokens that were judged."""

    of: ClassKey
    limits: Limits
    pid: Pid
    odds: Odds
    evidence: int = 0


class Speculation(NamedTuple):
    """All that is known. `cold`: what is taken to be usual in a class of which nothing is. `gain`: tokens that a round
    makes to those of plain decoding in the same time, on the average: the worth of time. `draft_ms`, `step_ms`: what
    drafting takes in a round, and each token of its longest draft."""

    cost: MeasuredCost
    gains: Gains = GAINS
    requests: Mapping[str, Request] = MappingProxyType({})
    seeds: Mapping[ClassKey, Seed] = MappingProxyType({})
    cold: Seed = COLD
    usual: Mapping[ClassKey, Positions] = MappingProxyType({})
    switch: Switch = ON  # of drafters that take time
    gain: float = 1.0
    draft_ms: float = 0.0
    step_ms: float = 0.0
    rounds: int = 0
    same: SameRows = SameRows()


def begun(state: Speculation, key: str, of: ClassKey, most: int) -> Speculation:
    """A request begins (or goes on after it gave way: then it is known). `most`: the most drafts it may ever have."""
    if key in state.requests:
        return state
    running = [_course(known) for known in state.requests.values() if known.of == of]
    seed = seeds.with_running(state.seeds.get(of, state.cold), running)
    limits = Limits(min(1, most), most)
    request = Request(of, limits, pid.begun(seed.depth, limits), odds.begun(seed.log_factor))
    return state._replace(requests={**state.requests, key: request})


def ended(state: Speculation, key: str) -> Speculation:
    """A request ended; an unknown one is ignored."""
    request = state.requests.get(key)
    if request is None:
        return state
    left = {other: known for other, known in state.requests.items() if other != key}
    seed = seeds.ended(state.seeds.get(request.of, state.cold), _course(request))
    return state._replace(requests=left, seeds=seeds.remembered(state.seeds, request.of, seed))


def asked(state: Speculation, now: Round) -> list[int]:
    """Return how many tokens to ask the drafter for, for each place."""
    if state.step_ms <= _NOTICED * state.cost.ms(now.base_rows, len(now.places), now.context_tokens):
        return [place.most for place in now.places]
    least = least_chance(state, now)
    return [place.most if place.fixed else _worth_asking(state, place, least) for place in now.places]


def _worth_asking(state: Speculation, place: Place, least: float) -> int:
    """Return how many tokens to ask a drafter for to which each takes time: one that is sure of nothing does not stop
    by itself."""
    request = state.requests[place.key]
    most = min(place.most, max(request.pid.depth, place.free))
    usual = state.usual.get(request.of)
    if usual is None:
        return most
    return len(reach(usual.chances(most), request.odds.factor, most, max(place.free, 1), least))


def worth_per_ms(state: Speculation, now: Round) -> float:
    """Return what a row of a draft has to bring: the tokens per ms that decoding makes on the average, at this round's
    load and price."""
    sequences = len(now.places)
    return (
        now.row_price * max(1.0, state.gain) * sequences / state.cost.ms(now.base_rows, sequences, now.context_tokens)
    )


def least_chance(state: Speculation, now: Round) -> float:
    """Return the chance, all before included, below which a drafter that takes time for each token may stop: such a
    token would not be worth its row and its step of drafting, which all sequences of a round share."""
    before = now.base_rows + now.filling_rows
    row_ms = state.cost.added_ms(before, 1, len(now.places), now.context_tokens)[0]
    return min(1.0, worth_per_ms(state, now) * (row_ms + state.step_ms / len(now.places)))


def decided(state: Speculation, now: Round, proposals: Sequence[Proposal]) -> Decision:
    """Return how many tokens of each draft to verify."""
    value, before = worth_per_ms(state, now), now.base_rows + now.filling_rows
    floor = floor_of(state.cost, before, value)
    reaches: list[list[float]] = []
    longest, forced, drawn, requests = 0, False, False, state.requests
    for place, proposal in zip(now.places, proposals, strict=True):
        key, most, known, free, fixed = place
        request = requests[key]
        believed = proposal.confidences or _usual(state, request, proposal.tokens)
        if fixed:
            chances, forced = [_FORCED] * min(len(believed), most), True
        else:
            depth = request.pid.depth
            depth = depth if depth > free else free
            if now.widths:
                depth = filled(known + depth, now.widths) - known
            most = most if most < depth else depth
            if proposal.drawn:
                drawn = True
                chances = _worth_drawing(state, now, believed, request.odds.factor, most, free)
            else:
                chances = reach(believed, request.odds.factor, most, free or 1, floor)
        longest += len(chances)
        reaches.append(chances)
    if not longest and now.widths:
        return Decision([0] * len(reaches), reaches, forced)
    bids = reaches
    if drawn:
        bids = [
            [_FORCED] * len(chances) if proposal.drawn else chances
            for chances, proposal in zip(reaches, proposals, strict=True)
        ]
    if now.widths:
        added_ms = state.cost.added_ms(before, now.room, len(reaches), now.context_tokens)
        depths = shared_out_in_widths(bids, [place.known for place in now.places], now.widths, added_ms, value)
        return Decision(depths, reaches, forced)
    most = min(now.room, max(longest, state.same.last - before))
    added_ms = state.cost.added_ms(before, most, len(reaches), now.context_tokens) if most > 0 else []
    paid_for = [place.free for place in now.places]
    offers = offered(bids, paid_for)
    best = worth_taking(offers, added_ms, value)
    taken, filling, given_up = same_rows.kept(state.same, before, offers, added_ms, value, best)
    depths = given(bids, paid_for, offers, taken)
    if filling and not _filled_up(now, depths, filling):
        depths, given_up = given(bids, paid_for, offers, best), 0.0
    return Decision(depths, reaches, forced, given_up)


def _filled_up(now: Round, depths: list[int], filling: int) -> bool:
    """Make drafts longer by so many tokens in all, where they may be. False: they may not, and are as they were."""
    room = [
        0 if place.fixed else place.most - max(depth, place.free)
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
    state: Speculation, now: Round, believed: Sequence[float], factor: float, most: int, free: int
) -> list[float]:
    """Return the chances of the drawn tokens that are verified: each while it is worth its row by itself, which was
    known before it was drawn. What is behind it and in other drafts does not count. One now and then is verified
    whatever it promises: a drawn token that is not verified cannot be compared with anything."""
    look = 1 if state.rounds % _LOOK_EVERY == 0 else 0
    return reach(believed, factor, most, max(free, look), max(LEAST_CHANCE, least_chance(state, now)))


def _usual(state: Speculation, request: Request, tokens: int) -> Sequence[float]:
    return state.usual.get(request.of, Positions()).chances(tokens) if tokens else ()


def observed(
    state: Speculation,
    now: Round,
    proposals: Sequence[Proposal],
    decision: Decision,
    verdicts: Sequence[Verdict],
    *,
    times: Times | None,
    tokens_made: int,
) -> Speculation:
    """Take in a round of these `times`; None where it did more than decode: a prefill in it would be counted as the
    cost of rows."""
    requests, usual = dict(state.requests), state.usual
    for index in _looked_at(state.rounds, len(now.places)):
        place, (accepted, compared), chances = now.places[index], verdicts[index], decision.reaches[index]
        if not compared or not chances or place.fixed:
            continue
        request = requests[place.key]
        if not proposals[index].confidences:
            before = usual.get(request.of, Positions())
            judged_now = positions.judged(before, accepted, compared)
            known = request.of in usual  # then nothing has to give way, which is quicker
            usual = {**usual, request.of: judged_now} if known else seeds.remembered(usual, request.of, judged_now)
        judged = max(decision.depths[index], compared)
        requests[place.key] = _moved(request, state.gains, chances[:judged], accepted, compared)
    if times is None:
        rows = now.filling_rows + now.base_rows + added_rows(now, decision.depths)
        same = same_rows.observed(state.same, rows, 0.0, None)
        return state._replace(requests=requests, usual=usual, rounds=state.rounds + 1, same=same)
    drafted = max((proposal.tokens for proposal in proposals), default=0) if times.draft_ms else 0
    return _timed(state, now, requests, usual, decision, drafted, times, tokens_made)


def _looked_at(rounds: int, sequences: int) -> range:
    """Return the places whose verdicts are taken in: where there are many, each in its turn, whatever came of it (to
    pick those that turned out right would teach that drafts are better than they are)."""
    every = 1 + (sequences - 1) // _TAKEN_IN
    return range(rounds % every, sequences, every)


def _moved(request: Request, gains: Gains, chances: Sequence[float], accepted: int, compared: int) -> Request:
    """Let a request's controllers take in a verdict on draft tokens with these chances (all before included)."""
    of, limits, controller, learned, evidence = request
    tokens = len(chances)
    gap = float(min(accepted, tokens))
    rate = gap / tokens
    variance = 0.0
    before = 1.0
    for chance in chances[:compared]:
        alone = chance / before  # if all before it are accepted
        gap -= alone
        variance += alone * (1.0 - alone)
        before = chance
    kept = _PROMISE_KEPT * sum(chances) / tokens
    set_point = kept if kept < gains.set_point else gains.set_point
    controller, _ = pid.stepped(controller, rate, tokens / USUAL_DRAFT, limits, gains, set_point)
    return Request(of, limits, controller, odds.judged(learned, gap, variance), evidence + tokens)


def _timed(
    state: Speculation,
    now: Round,
    requests: Mapping[str, Request],
    usual: Mapping[ClassKey, Positions],
    decision: Decision,
    drafted: int,
    times: Times,
    tokens: int,
) -> Speculation:
    """Return what is known of costs and of what speculation gains after a round."""
    sequences = len(now.places)
    rows = now.base_rows + added_rows(now, decision.depths)
    expected_ms = state.cost.ms(rows, sequences, now.context_tokens)
    change_ms = max(0.0, state.same.change_ms) if rows != state.same.last else 0.0
    cost = measured_cost.observed(
        state.cost,
        times.forward_ms * expected_ms / (expected_ms + change_ms),
        rows=rows,
        sequences=sequences,
        context_tokens=now.context_tokens,
    )
    over_ms = min(times.forward_ms - expected_ms, expected_ms) if state.cost.seen else None
    same = same_rows.observed(state.same, rows, decision.given_up, over_ms)
    spent_ms = times.forward_ms + times.draft_ms
    gain = tokens / sequences * cost.ms(now.base_rows, sequences, now.context_tokens) / spent_ms
    draft_ms, step_ms, switch = state.draft_ms, state.step_ms, state.switch
    if drafted and switching.active(switch):
        draft_ms += _NEWEST_DRAFT * (times.draft_ms - draft_ms)
        step_ms += _NEWEST_DRAFT * (times.draft_ms / drafted - step_ms)
    mean = state.gain
    if not decision.forced:  # what was forced says nothing of what was chosen
        mean += _NEWEST_VALUE * (gain - mean)
    if not switching.active(switch):
        switch = switching.rested(switch, spent_ms)
    elif not decision.forced and (switch.trial or times.draft_ms > _NOTICED * times.forward_ms):
        switch = switching.speculated(switch, gain, spent_ms)
    return Speculation(
        *(cost, state.gains, requests, state.seeds, state.cold, usual, switch, mean, draft_ms, step_ms),
        rounds=state.rounds + 1,
        same=same,
    )


def added_rows(now: Round, depths: Sequence[int]) -> int:
    """Return the rows that these depths add to what is run anyway."""
    if not now.widths:
        return sum(depths) - sum(
            [min(place.free, depth) for place, depth in zip(now.places, depths, strict=True) if place.free]
        )
    return sum(
        filled(place.known + depth, now.widths) - filled(place.known, now.widths)
        for place, depth in zip(now.places, depths, strict=True)
    )


def _course(request: Request) -> Course:
    return Course(request.pid.integral, request.odds.log_factor, request.evidence)

"""What a round teaches: of requests, of costs, and of what speculation brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.running_mean import update_mean
from policies.speculation import cost_model, odds, pid, shape_hysteresis, switching
from policies.speculation.ask import NOTICED, choose_pause_probe
from policies.speculation.branching import NO_BRANCHES, RoundBranches
from policies.speculation.cost_model import KNOWN_ROUNDS
from policies.speculation.pid import PidSettings
from policies.speculation.state import RequestState, SpeculationState, base_ms, worth_per_ms
from policies.speculation.types import (
    DepthDecision,
    DraftComparison,
    DraftSummary,
    RoundContext,
    RoundTimes,
    count_added_rows,
)

USUAL_DRAFT = 4.0
"""So many judged tokens are one dt of the controller. ADR 0028. It is the unit of `speculation.pid`'s gains: to change
it is to change those."""
# Weight of the newest round in the mean worth of time. ADR 0028: the worth of time is worth 0.1 % in the mean, 0.7 % at
# most (ADR 0043). A faster one swung more (ADR 0039).
_NEWEST_VALUE = 0.05
_NEWEST_DRAFT = 0.2  # the same of what drafting takes. Not tuned.
# So many times as long as alone a forward takes beside a drafter that takes its time. Not tuned: one on another core of
# the target's machine made it 1.03 to 1.15 times, and paid (ADR 0118).
_SLOWS = 1.25
# The same of what asking brings: where drafts begin to be right, they often go on so. ADR 0039. Not tuned apart from
# pauses (ADR 0043).
_BETTER, _WORSE = 0.25, 0.15


def observe_round(
    state: SpeculationState,
    now: RoundContext,
    proposals: Sequence[DraftSummary],
    decision: DepthDecision,
    verdicts: Sequence[DraftComparison],
    *,
    times: RoundTimes | None,
    tokens_made: int,
    branches: RoundBranches = NO_BRANCHES,
) -> SpeculationState:
    """Take in a round of these `times`; None where it did more than decode: a prefill in it would be counted as the
    cost of rows."""
    moved: dict[str, RequestState] = {}
    if any(decision.cumulative_acceptance):
        outcomes = zip(now.places, verdicts, decision.cumulative_acceptance, decision.depths, strict=True)
        for place, (accepted, compared), chances, depth in outcomes:
            if compared and chances and not place.fixed:
                judged = chances[: max(depth, compared)]
                moved[place.key] = _step_controllers(
                    state.requests[place.key], state.settings, judged, accepted, compared
                )
    requests = {**state.requests, **moved} if moved else state.requests
    if times is None:
        shape = state.shape._replace(last=0, last_base=0, regret=0.0)
        return state._replace(requests=requests, rounds=state.rounds + 1, shape=shape)
    unasked = not decision.asks and not choose_pause_probe(len(now.places)).is_due(state.rounds)
    if unasked and state.cost.seen >= KNOWN_ROUNDS and switching.active(state.switch):
        rows = now.base_rows + count_added_rows(now, decision.depths)
        shape = state.shape._replace(last=rows, last_base=now.base_rows, regret=decision.regret)
        return state._replace(requests=requests, rounds=state.rounds + 1, shape=shape)
    return _observe_times(state, now, requests, decision, proposals, times, tokens_made, branches)


def _step_controllers(
    request: RequestState, settings: PidSettings, chances: Sequence[float], accepted: int, compared: int
) -> RequestState:
    """Let a request's controllers take in a verdict on draft tokens with these chances (all before included)."""
    limits, controller, learned = request
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
    promised = sum(chances) / tokens
    controller, _ = pid.step_pid(controller, rate, tokens / USUAL_DRAFT, limits, settings, promised)
    return RequestState(limits, controller, odds.observe_acceptance_gap(learned, gap, variance))


def _observe_times(
    state: SpeculationState,
    now: RoundContext,
    requests: Mapping[str, RequestState],
    decision: DepthDecision,
    proposals: Sequence[DraftSummary],
    times: RoundTimes,
    tokens: int,
    branches: RoundBranches,
) -> SpeculationState:
    sequences, context, shape = len(now.places), now.context_tokens, state.shape
    more = count_added_rows(now, decision.depths)
    rows = now.base_rows + more
    plain_ms = base_ms(state, now)
    even_ms = state.cost.ms(rows, sequences, context) if more else plain_ms
    branches_ms = 0.0
    if branches.forks:
        chain_ms = even_ms
        even_ms = state.cost.ms(rows + branches.rows, sequences + branches.forks, context)
        branches_ms = even_ms - chain_ms
    slowed = times.beside or cost_model.is_slowed(times.draft_ms, times.forward_ms)
    expected_ms = even_ms * state.cost.slowdown if slowed else even_ms
    change_ms = max(0.0, shape.change_ms) if state.cost.seen and rows != shape.last else 0.0
    steady_ms = times.forward_ms * expected_ms / (expected_ms + change_ms)
    cost = cost_model.observe_forward(
        *(state.cost, steady_ms),
        rows=rows + branches.rows,
        sequences=sequences + branches.forks,
        context_tokens=context,
        expected_ms=even_ms,
        slowed=slowed,
        plain=more == 0 and not slowed and not branches.forks,
    )
    spent_ms = times.forward_ms + times.draft_ms + branches.fork_ms
    gain = tokens / sequences * cost.scale / state.cost.scale * plain_ms / spent_ms
    mean, brought = state.gain, state.brought
    if not decision.forced:  # what was forced says nothing of what was chosen
        mean = update_mean(mean, gain, _NEWEST_VALUE)
        if decision.asks:
            drafts = zip(decision.cumulative_acceptance, decision.depths, strict=True) if any(decision.depths) else ()
            likely = sum([sum(chances[:depth]) for chances, depth in drafts])
            more_ms = expected_ms - branches_ms - plain_ms
            more_ms += shape_hysteresis.more_ms(shape, now.base_rows, more)
            newest = (likely - worth_per_ms(state, now) * more_ms) / decision.asks
            brought = update_mean(brought, newest, _BETTER if newest > brought else _WORSE)
    if state.cost.seen:
        over_ms = times.forward_ms - expected_ms
        shape = shape_hysteresis.observe_shape(shape, now.base_rows, rows, decision.regret, over_ms, expected_ms)
    else:
        shape = shape._replace(last=rows, last_base=now.base_rows)
    ask_ms, step_ms = _drafting(state, decision, proposals, times)
    switch = state.switch
    if not switching.active(switch):
        switch = switching.observe_plain_rounds(switch)
    elif not decision.forced and _tells_worth(state, decision, times):
        won = (gain - 1.0) * spent_ms / plain_ms
        switch = switching.observe_speculative_round(switch, won, reading=times.reading)
    return state._replace(
        cost=cost,
        requests=requests,
        switch=switch,
        gain=mean,
        step_ms=step_ms,
        rounds=state.rounds + 1,
        shape=shape,
        ask_ms=ask_ms,
        brought=brought,
    )


def _tells_worth(state: SpeculationState, decision: DepthDecision, times: RoundTimes) -> bool:
    """Return whether a round says what drafts are worth that take time and have no gate: one that waited for them, and
    one in which somebody was asked who slows the target down beside it."""
    if times.draft_ms - times.gated_ms > NOTICED * times.forward_ms:
        return True
    return times.beside and decision.asks > 0 and state.cost.slowdown >= _SLOWS


def _drafting(
    state: SpeculationState, decision: DepthDecision, proposals: Sequence[DraftSummary], times: RoundTimes
) -> tuple[float, float]:
    """Return `ask_ms` and `step_ms` after a round."""
    ask_ms, step_ms = state.ask_ms, state.step_ms
    if decision.asks:
        ask_ms = update_mean(ask_ms, times.draft_ms / decision.asks, _NEWEST_DRAFT)
    drafted = max([proposal.tokens for proposal in proposals]) if times.draft_ms else 0
    if drafted and switching.active(state.switch):
        step_ms = update_mean(step_ms, times.draft_ms / drafted, _NEWEST_DRAFT)
    return ask_ms, step_ms

"""This project's depth policy: policies.speculation behind the interface that the decode loop and the replay share."""

from __future__ import annotations

from collections.abc import Sequence

from policies.speculation import (
    DepthDecision,
    DraftSummary,
    Rest,
    RoundContext,
    SpeculationState,
    decide_depths,
    decide_draft_limits,
    decide_pause,
    end_request,
    find_rest,
    least_chance,
    observe_pause,
    observe_round,
    start_request,
)
from policies.speculation.branching import (
    MOST_ROW_RATIO,
    BranchOffer,
    BranchState,
    ChosenBranch,
    choose_branches,
    compare_rows,
    observe_branches,
)
from policies.speculation.cost_model import CostModel
from policies.speculation.pid import DEFAULTS, PidSettings
from policies.speculation.policy import DraftLimits, RoundOutcome
from policies.speculation.shape_hysteresis import ShapeHysteresis
from policies.speculation.state import COLD_DEPTH, base_ms, worth_per_ms
from policies.speculation.switching import ON, active


class Adaptive:
    """See policies.speculation. `cost`: what is known of rounds before the first; `first_depth`: where requests
    begin."""

    name = "adaptive"

    def __init__(self, cost: CostModel, settings: PidSettings = DEFAULTS, first_depth: float = COLD_DEPTH) -> None:
        self.state = SpeculationState(
            cost, settings, first_depth=first_depth, shape=ShapeHysteresis(changed_ms=cost.fit.changing_ms)
        )
        self.branches = compare_rows(cost.fit) < MOST_ROW_RATIO
        self._branching = BranchState()
        self._decision = DepthDecision([], [])
        self._asks = 0
        self._last: RoundContext | None = None
        self._draftable: RoundContext | None = None  # the last one in which somebody might be drafted for

    @property
    def cost(self) -> CostModel:
        return self.state.cost

    @property
    def rest(self) -> Rest:
        return find_rest(self.state, self._draftable) if self._draftable is not None else Rest.NONE

    def begin(self, key: str, most: int, *, sure: bool = False) -> None:
        self.state = start_request(self.state, key, most, sure=sure)

    def end(self, key: str) -> None:
        self.state = end_request(self.state, key)

    def reset_gain(self) -> None:
        self.state = self.state._replace(switch=ON)

    def decide_draft_limits(self, now: RoundContext) -> DraftLimits:
        limits = decide_draft_limits(self.state, now)
        self._asks = sum([limit > 0 for limit in limits])
        if not self._asks:
            return DraftLimits(limits)
        least, cheap_only = least_chance(self.state, now), not active(self.state.switch)
        if not self.cost.known:
            return DraftLimits(limits, least, cheap_only)
        row_ms = self.cost.estimate_added_ms(now.base_rows, 1, len(now.places), now.context_tokens)[0]
        return DraftLimits(limits, least, cheap_only, base_ms(self.state, now), row_ms, max(1.0, self.state.gain))

    def decide_depths(self, now: RoundContext, proposals: Sequence[DraftSummary]) -> list[int]:
        self._decision = decide_depths(self.state, now, proposals)
        return self._decision.depths

    def choose_branches(
        self, now: RoundContext, depths: Sequence[int], offers: Sequence[BranchOffer]
    ) -> list[ChosenBranch]:
        chances, value = self._decision.cumulative_acceptance, worth_per_ms(self.state, now)
        return choose_branches(self._branching, self.cost, now, depths, chances, offers, value)

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None:
        if self.branches:
            self._branching = observe_branches(self._branching, done.branches)
        decision = self._decision._replace(depths=list(done.depths), asks=self._asks)
        self.state = observe_round(
            *(self.state, now, done.proposals, decision, done.verdicts),
            times=done.times,
            tokens_made=done.tokens,
            branches=done.branches,
        )
        self._last = now
        if any(place.max_draft_tokens for place in now.places):
            self._draftable = now

    def decide_pause(self) -> int:
        return decide_pause(self.state, self._last) if self._last is not None else 0

    def observe_pause(self, rounds: int, rows: int) -> None:
        if self._last is not None:
            self.state = observe_pause(self.state, self._last, rounds, rows)

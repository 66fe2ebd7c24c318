"""What is compared, by name, and a policy whose time is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from device_profiles.cost import StepCost
from outrider_lab.replay.fixed import FixedDepth
from policies.speculation import DraftSummary, Rest, RoundContext
from policies.speculation.adaptive import Adaptive
from policies.speculation.branching import BranchOffer, ChosenBranch
from policies.speculation.cost_model import CostModel, start_cost_model
from policies.speculation.policy import BranchingPolicy, DepthPolicy, DraftLimits, RoundOutcome

PLAIN, CONTROL, ADAPTIVE = "plain", "control", "adaptive"
FIXED_DEPTHS = tuple(range(1, 9))
_T = TypeVar("_T")


def name_fixed_depth(depth: int) -> str:
    return f"fixed-{depth}"


FIXED = tuple(name_fixed_depth(depth) for depth in FIXED_DEPTHS)


def policy_of(arm: str, known: StepCost) -> DepthPolicy:
    """Return a new policy of that name. Adaptive begins with the costs that are `known` as a worker starts. Raises
    KeyError for a name that is none."""
    if arm == ADAPTIVE:
        return Adaptive(start_cost_model(known))
    depths = dict(zip((PLAIN, *FIXED), (0, *FIXED_DEPTHS), strict=True))
    return FixedDepth(depths[arm])


@dataclass(slots=True)
class Timed:
    """A policy, and the processor time that it took, all in all."""

    policy: DepthPolicy
    spent_s: float = 0.0

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def cost(self) -> CostModel:
        return self.policy.cost

    @property
    def rest(self) -> Rest:
        return self.policy.rest

    def begin(self, key: str, most: int, *, sure: bool = False) -> None:
        self.policy.begin(key, most, sure=sure)

    def end(self, key: str) -> None:
        self.policy.end(key)

    def reset_gain(self) -> None:
        self.policy.reset_gain()

    def decide_draft_limits(self, now: RoundContext) -> DraftLimits:
        return self._take_time(self.policy.decide_draft_limits, now)

    def decide_depths(self, now: RoundContext, proposals: Sequence[DraftSummary]) -> list[int]:
        return self._take_time(self.policy.decide_depths, now, proposals)

    @property
    def branches(self) -> bool:
        return isinstance(self.policy, BranchingPolicy) and self.policy.branches

    def choose_branches(
        self, now: RoundContext, depths: Sequence[int], offers: Sequence[BranchOffer]
    ) -> list[ChosenBranch]:
        assert isinstance(self.policy, BranchingPolicy)  # noqa: S101
        return self._take_time(self.policy.choose_branches, now, depths, offers)

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None:
        self._take_time(self.policy.observe_round, now, done)

    def decide_pause(self) -> int:
        return self._take_time(self.policy.decide_pause)

    def observe_pause(self, rounds: int, rows: int) -> None:
        self._take_time(self.policy.observe_pause, rounds, rows)

    def _take_time(self, method: Callable[..., _T], *arguments: Any) -> _T:
        began_s = time.thread_time()
        result = method(*arguments)
        self.spent_s += time.thread_time() - began_s
        return result

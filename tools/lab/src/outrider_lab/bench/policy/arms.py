"""What is compared, by name, and a policy whose time is taken."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from device_profiles.cost import StepCost
from outrider_lab.replay.batch_table import BatchTable, table_of
from outrider_lab.replay.fixed import FixedDepth
from outrider_lab.replay.hill_climber import HillClimber
from outrider_lab.replay.recorded import Costs
from policies.speculation import DraftSummary, Rest, RoundContext
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import CostModel, start_cost_model
from policies.speculation.policy import DepthPolicy, DraftLimits, RoundOutcome

PLAIN, CONTROL, ADAPTIVE, CLIMBER, TABLE = "plain", "control", "adaptive", "hill-climber", "batch-table"
FIXED_DEPTHS = tuple(range(1, 9))
MOST_FIXED = max(FIXED_DEPTHS)
_FIRST_DEPTH = 4  # where the hill-climber begins


def name_fixed_depth(depth: int) -> str:
    """Return the name of a fixed depth's variant."""
    return f"fixed-{depth}"


FIXED = tuple(name_fixed_depth(depth) for depth in FIXED_DEPTHS)


def policy_of(arm: str, costs: Costs, known: StepCost) -> DepthPolicy:
    """Return a new policy of that name. Adaptive begins with the costs that are `known` as a worker starts, only the
    table is made of the true ones. Raises KeyError for a name that is none."""
    if arm == ADAPTIVE:
        return Adaptive(start_cost_model(known))
    if arm == CLIMBER:
        return HillClimber(_FIRST_DEPTH, MOST_FIXED)
    if arm == TABLE:
        return BatchTable(table_of(costs, most=MOST_FIXED))
    depths = dict(zip((PLAIN, *FIXED), (0, *FIXED_DEPTHS), strict=True))
    return FixedDepth(depths[arm])


@dataclass(slots=True)
class Timed:
    """A policy, and the processor time that it took, all in all."""

    policy: DepthPolicy
    spent_s: float = 0.0

    @property
    def name(self) -> str:
        """See the port."""
        return self.policy.name

    @property
    def cost(self) -> CostModel:
        """See the port."""
        return self.policy.cost

    @property
    def rest(self) -> Rest:
        """See the port."""
        return self.policy.rest

    def begin(self, key: str, most: int, *, sure: bool = False) -> None:
        """See the port."""
        self.policy.begin(key, most, sure=sure)

    def end(self, key: str) -> None:
        """See the port."""
        self.policy.end(key)

    def reset_gain(self) -> None:
        """See the port."""
        self.policy.reset_gain()

    def decide_draft_limits(self, now: RoundContext) -> DraftLimits:
        """See the port."""
        began_s = time.thread_time()
        found = self.policy.decide_draft_limits(now)
        self.spent_s += time.thread_time() - began_s
        return found

    def decide_depths(self, now: RoundContext, proposals: Sequence[DraftSummary]) -> list[int]:
        """See the port."""
        began_s = time.thread_time()
        found = self.policy.decide_depths(now, proposals)
        self.spent_s += time.thread_time() - began_s
        return found

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None:
        """See the port."""
        began_s = time.thread_time()
        self.policy.observe_round(now, done)
        self.spent_s += time.thread_time() - began_s

    def decide_pause(self) -> int:
        """See the port."""
        began_s = time.thread_time()
        found = self.policy.decide_pause()
        self.spent_s += time.thread_time() - began_s
        return found

    def observe_pause(self, rounds: int, rows: int) -> None:
        """See the port."""
        began_s = time.thread_time()
        self.policy.observe_pause(rounds, rows)
        self.spent_s += time.thread_time() - began_s

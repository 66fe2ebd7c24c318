"""What is compared, by name, and a policy whose time is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from device_profiles.cost import StepCost
from outrider_lab.replay.fixed import FixedDepth
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import start_cost_model
from policies.speculation.policy import DepthPolicy

PLAIN, CONTROL, ADAPTIVE = "plain", "control", "adaptive"
FIXED_DEPTHS = tuple(range(1, 9))
_ROUND_CALLS = ("decide_", "choose_", "observe_")
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


class Timed:
    """A policy, of which each call of a round is timed from now on: the processor time that they took, all in all."""

    def __init__(self, policy: DepthPolicy) -> None:
        self.policy, self.spent_s = policy, 0.0
        for name in dir(policy):
            if name.startswith(_ROUND_CALLS):
                setattr(policy, name, partial(self._take_time, getattr(policy, name)))

    def _take_time(self, method: Callable[..., _T], *arguments: Any) -> _T:
        began_s = time.thread_time()
        result = method(*arguments)
        self.spent_s += time.thread_time() - began_s
        return result

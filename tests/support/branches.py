"""Loops that verify branches: over models on which rows are nearly free, with a drafter that knows other ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.contract import LoadedModel
from adapters.simulated.script import Script
from device_profiles.cost import StepCost
from orchestrator.protocol.rounds import RequestStats, RoundReport
from orchestrator.worker.drafting.port import Alternative, Ask, Draft, Drafter
from orchestrator.worker.engine.loop import DecodeLoop
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import start_cost_model
from tests.support.drafters import KnowingDrafter
from tests.support.loops import loop_over
from tests.support.simulated_time import SimulatedClock, TimedModel

FLAT = StepCost((1.0, 512.0), (30.0, 32.0))


class TurningDrafter(KnowingDrafter):
    """Where its draft errs it knows another way, which is the target's own but for every third time."""

    def _draft(self, ask: Ask) -> Draft:
        draft, every, self._wrong_every = super()._draft(ask), self._wrong_every, 0
        right, self._wrong_every = super()._draft(ask).tokens, every
        if not ask.alternatives:
            return draft
        ways = [
            Alternative(place, right[place : place + 3] if place % 3 else (7, 7), (0.9,) * min(3, len(right) - place))
            for place, (own, token) in enumerate(zip(draft.tokens, right, strict=True))
            if own != token
        ]
        doubted = tuple(0.6 if own != token else 0.9 for own, token in zip(draft.tokens, right, strict=True))
        return Draft(draft.tokens, doubted, self.name, alternatives=tuple(ways))


class FlatModel(TimedModel):
    """The simulated model, of that cost: by default of a device on which rows are nearly free."""

    def __init__(self, cost: StepCost = FLAT, script: str = "", clock: SimulatedClock | None = None) -> None:
        self.clock = clock or SimulatedClock()
        super().__init__(self.clock)
        self._cost, self._script = cost, Script.parse(script)


def branching_loop(
    model: LoadedModel, drafter: Drafter, cost: StepCost = FLAT, *, branches: bool = True, **settings: Any
) -> DecodeLoop:
    """A loop in the model's time; where it has none forwards take no time, and costs stay as they are. Without
    `branches` it has chains alone."""
    clock, policy = model.clock if isinstance(model, FlatModel) else SimulatedClock(), Adaptive(start_cost_model(cost))
    policy.branches = policy.branches and branches
    return loop_over(model, drafter, policy=policy, clock=clock, **settings)


def last_stats(rounds: Sequence[RoundReport]) -> list[RequestStats]:
    stats = {delta.request_id: delta.stats for done in rounds for delta in done.deltas}
    return [of_request for of_request in stats.values() if of_request is not None]


def count_branches(rounds: Sequence[RoundReport]) -> tuple[int, int]:
    stats = last_stats(rounds)
    return sum(one.branches for one in stats), sum(one.branches_taken for one in stats)

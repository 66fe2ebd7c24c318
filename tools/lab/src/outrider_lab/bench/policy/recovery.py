"""Acceptance that steps up, on the costs of this machine: how fast depth follows, and whether it swings where it stays.

Drafts are right as often as they are to be, in every few places. Their drafter is as sure of
each token, which is calibrated as in a chain of drafters: all that is learned is learned from verdicts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import mean

from device_profiles.cost import StepCost
from outrider_lab.replay.fixed_rates import cap, curve
from outrider_lab.replay.recorded import Costs, RecordedDraft, RecordedRequest
from outrider_lab.replay.run import replay
from policies.speculation import RoundContext
from policies.speculation.adaptive import Adaptive
from policies.speculation.calibration import Calibration, observe_draft_outcome
from policies.speculation.calibration import chance as calibrated
from policies.speculation.cost_model import start_cost_model
from policies.speculation.policy import RoundOutcome

LOW, HIGH = 0.1, 0.9
_SPREAD = 20
_CONFIDENCE = 0.5
BEFORE, AFTER = 120, 1200
"""Output tokens at either acceptance."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """`depths[r]`: of round r. `turned`: the first round at the high acceptance. `rounds`: how many after it depth
    is within one of `best` (None: never). `worth`: what the depths from the tenth on are worth on the average, in
    shares of what the best one brings. `swing`: largest less smallest depth of the second half at it."""

    depths: tuple[int, ...]
    turned: int
    best: int
    rounds: int | None
    worth: float
    swing: int


class _Watched(Adaptive):
    """Remembers the depth of each round, and how many tokens were committed before it."""

    def __init__(self, known: StepCost) -> None:
        super().__init__(start_cost_model(known))
        self.depths: list[int] = []
        self.places: list[int] = []

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None:
        """See the port."""
        super().observe_round(now, done)
        self.depths.append(done.depths[0])
        self.places.append((self.places[-1] if self.places else 0) + done.tokens)


def recovery(costs: Costs, known: StepCost, most: int) -> Recovery:
    """Play a text whose acceptance steps from LOW to HIGH."""
    policy = _Watched(known)
    replay([evenly([LOW] * BEFORE + [HIGH] * AFTER, most)], policy, costs, concurrency=1, most=most)
    turned = next(index for index, tokens in enumerate(policy.places) if tokens >= BEFORE) + 1
    context = BEFORE + AFTER / 2
    rates = curve((HIGH,), start_cost_model(costs.forward), sequences=1, context_tokens=context, most=most)
    best = cap(rates)
    depths = policy.depths[:-most]  # the last ones are bounded by the text's end
    rounds = next((index for index, depth in enumerate(depths[turned:]) if abs(depth - best) <= 1), None)
    worth = mean(rates[depth] / rates[best] for depth in depths[turned + 10 :])
    steady = depths[(turned + len(depths)) // 2 :]
    return Recovery(tuple(depths), turned, best, rounds, worth, max(steady) - min(steady))


def evenly(chances: Sequence[float], most: int) -> RecordedRequest:
    """Return a request whose drafts are right as often as the chances of their places say.

    A draft has k right tokens or more with chance^k: quantiles of that, each once in _SPREAD places, in an order
    that is drawn anew for the next ones. In a regular order a depth may come by the same ones over and over."""
    draws = random.Random(_SPREAD)  # noqa: S311  # an order, not a secret
    drafts, shares = [], []  # type: list[RecordedDraft], list[float]
    known = Calibration()
    for chance in chances:
        if not shares:
            shares = [(place + 0.5) / _SPREAD for place in range(_SPREAD)]
            draws.shuffle(shares)
        right = min(most, int(log(shares.pop()) / log(chance)))
        drafts.append(RecordedDraft(most, (calibrated(known, _CONFIDENCE),) * most, right))
        known = observe_draft_outcome(known, [1] * most, [_CONFIDENCE] * most, [1] * right + [0])
    return RecordedRequest("even", tuple(drafts))

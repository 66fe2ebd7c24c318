"""How far below a draft's own probability the target's may be: found during a warm-up, then kept.

The warm-up loses nothing: drafts are judged by rejection, and their gaps (see `judge`) are remembered. The tolerance is
then the least with which the wanted share of them would have been accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ToleranceGoal:
    """`acceptance_rate`: the wanted share of judged drafts (those with all before them accepted) that is accepted.
    `warmup_tokens`: judged drafts to learn from. `max_delta`: the most that the tolerance may be, in nats."""

    acceptance_rate: float
    warmup_tokens: int
    max_delta: float


@dataclass(frozen=True, slots=True)
class ToleranceState:
    """`gaps` of the warm-up so far; `delta` is None until it is over."""

    gaps: tuple[float, ...] = ()
    delta: float | None = None


def calibrate_tolerance(
    state: ToleranceState, gaps: Iterable[float], goal: ToleranceGoal, *, greedy: bool
) -> ToleranceState:
    """Return the state behind more judged drafts.

    With a tolerance d, drafts of a gap up to d are accepted, other drafts with the chance p(x) / q(x) = exp(-gap),
    greedily with none. `delta` is 0 where that is enough for the wanted rate (nothing is lost then). Else it is the
    least of the gaps with which the rate is reached, at most `max_delta`.
    """
    if state.delta is not None:
        return state
    seen = (*state.gaps, *gaps)
    if len(seen) < goal.warmup_tokens:
        return ToleranceState(seen)
    order = np.maximum(np.sort(np.array(seen)), 0.0)
    otherwise = np.zeros_like(order) if greedy else np.exp(-order)
    # Accepted with the tolerance order[i], of those in order: the first i + 1, and the chance of the rest.
    accepted = np.arange(1, len(order) + 1) + (otherwise.sum() - np.cumsum(otherwise))
    lossless = float(np.where(order == 0.0, 1.0, otherwise).sum())
    wanted = goal.acceptance_rate * len(order) - 1e-9
    delta = 0.0 if lossless >= wanted else float(order[int((accepted >= wanted).argmax())])
    return ToleranceState((), min(goal.max_delta, delta))

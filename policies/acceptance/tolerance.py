"""How far below a draft's own probability the target's may be: found during a warm-up, then kept.

The warm-up loses nothing: drafts are judged by rejection, and their gaps (see `judge`) are remembered. The tolerance is
then the gap that the wanted share of them stayed within.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


def calibrated(state: ToleranceState, gaps: Iterable[float], goal: ToleranceGoal) -> ToleranceState:
    """Return the state behind more judged drafts.

    delta = the `acceptance_rate` quantile of the gaps (the smallest gap that as many stayed within), between 0 (the
    rule is never stricter than p(x) >= q(x)) and `max_delta`.
    """
    if state.delta is not None:
        return state
    seen = (*state.gaps, *gaps)
    if len(seen) < goal.warmup_tokens:
        return ToleranceState(seen)
    order = sorted(seen)
    # Rounded before it is rounded up: 0.7 * 10 is a little above 7.
    within = -int(-round(goal.acceptance_rate * len(order), 9) // 1)
    return ToleranceState((), min(goal.max_delta, max(0.0, order[max(0, within - 1)])))

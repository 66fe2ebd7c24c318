"""How far below a draft's own probability the target's may be: set, or found during a warm-up and followed.

The warm-up loses nothing: drafts are judged by rejection, and their gaps (see `judge`) are remembered. The tolerance is
then the least with which the wanted share of them would have been accepted. It is held against the drafts that it
judges, block by block. Where their acceptance has drifted from the wanted one, it is found anew from the newest block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 512
"""A learned tolerance is held against so many judged drafts at a time, or the warm-up's number where that is less. ADR
0019: three standard deviations of a rate of 0.7 are then 0.06, about the drift that counts."""
DRIFT_BLOCKS = 2
"""So many blocks on end, all too high or all too low, are a drift. ADR 0019. Not tuned: one block may be a single
text."""
# ADR 0019: a smaller drift of acceptance is not worth another tolerance.
_LEAST_DRIFT = 0.05
# ADR 0019: standard deviations; chance alone gives two such blocks on end in 4 of a million cases.
_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class ToleranceGoal:
    """`acceptance_rate`: the wanted share of judged drafts (those with all before them accepted) that is accepted.
    `warmup_tokens`: judged drafts to learn from. `max_delta`: the most that the tolerance may be, in nats.
    `fixed_delta`: the tolerance itself, in nats, where it is not to be learned (None: it is)."""

    acceptance_rate: float
    warmup_tokens: int
    max_delta: float
    fixed_delta: float | None = None


@dataclass(frozen=True, slots=True)
class ToleranceState:
    """`gaps` of the warm-up so far, and then of the block so far; `delta` is None until the warm-up is over. `drift`:
    the blocks on end that were accepted too often, or less than 0: too rarely. `recalibrations`: how often `delta`
    became another one."""

    gaps: tuple[float, ...] = ()
    delta: float | None = None
    drift: int = 0
    recalibrations: int = 0


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
    return ToleranceState((), _find_delta(np.array(seen), goal, greedy=greedy))


def _find_delta(gaps: NDArray[np.float64], goal: ToleranceGoal, *, greedy: bool) -> float:
    order = np.maximum(np.sort(gaps), 0.0)
    otherwise = np.zeros_like(order) if greedy else np.exp(-order)
    # Accepted with the tolerance order[i], of those in order: the first i + 1, and the chance of the rest.
    accepted = np.arange(1, len(order) + 1) + (otherwise.sum() - np.cumsum(otherwise))
    lossless = float(np.where(order == 0.0, 1.0, otherwise).sum())
    wanted = goal.acceptance_rate * len(order) - 1e-9
    delta = 0.0 if lossless >= wanted else float(order[int((accepted >= wanted).argmax())])
    return min(goal.max_delta, delta)


def watch_tolerance(
    state: ToleranceState, gaps: Iterable[float], goal: ToleranceGoal, *, greedy: bool
) -> ToleranceState:
    """Return the state behind more drafts that were judged with its tolerance; unchanged while there is none.

    A block is too high or too low where its acceptance differs from the wanted one by more than 0.05, and by more than
    three standard deviations of a binomial. One that is too low says nothing at `max_delta`, and one that is too high
    says nothing at 0: there the tolerance cannot follow.
    """
    if state.delta is None:
        return state
    seen = (*state.gaps, *gaps)
    if len(seen) < min(goal.warmup_tokens, BLOCK_TOKENS):
        return replace(state, gaps=seen)
    block = np.array(seen)
    side = _find_side(block, state.delta, goal, greedy=greedy)
    drift = state.drift + side if side * state.drift > 0 else side
    if abs(drift) < DRIFT_BLOCKS:
        return replace(state, gaps=(), drift=drift)
    delta = _find_delta(block, goal, greedy=greedy)
    changed = not math.isclose(delta, state.delta, rel_tol=0.01, abs_tol=1e-6)
    return ToleranceState((), delta, 0, state.recalibrations + changed)


def _find_side(gaps: NDArray[np.float64], delta: float, goal: ToleranceGoal, *, greedy: bool) -> int:
    """Return 1 where drafts of these gaps are accepted too often, -1 where too rarely, else 0."""
    wanted = goal.acceptance_rate
    otherwise = np.zeros_like(gaps) if greedy else np.exp(-np.maximum(gaps, 0.0))
    rate = float(np.where(gaps <= delta, 1.0, otherwise).mean())
    least = max(_LEAST_DRIFT, _SIGMAS * math.sqrt(wanted * (1.0 - wanted) / len(gaps)))
    if rate > wanted + least and delta > 0.0:
        return 1
    return -1 if rate < wanted - least and delta < goal.max_delta else 0

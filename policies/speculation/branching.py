"""Which other ways of a draft are verified beside it, each in a fork of its sequence: a tree of chains.

A branch repeats the committed tokens and the draft up to a place, and goes on with another token there. Where the
draft is right up to that place and wrong at it, and the branch's token is the target's choice, the round makes one
token more, and another for each further token of the branch that is right. That is weighed against what its rows and
its fork take, as everywhere (policies.speculation.allocation). So branches need rows that are nearly free, as on a GPU
that waits for its weights (ADR 0127).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from device_profiles.cost import StepCost
from policies.running_mean import update_mean
from policies.speculation.allocation import LEAST_CHANCE, MOST_CERTAIN
from policies.speculation.calibration import Calibration, chance, observe_token_outcome
from policies.speculation.cost_model import CostModel
from policies.speculation.types import RoundContext, count_added_rows

MOST_BRANCHES = 4
"""Forks of a round. ADR 0088: two have most of the gain where 64 rows are free."""
MOST_ROW_RATIO = 1.4
"""16 rows over one, from which on there are no branches. ADR 0088: where a row adds 2 % forks bring 1 %, where it adds
5 % nothing."""
# The rows that are compared: a draft of usual length and two or three branches. Not tuned.
_ROWS = 16
# Of the newest round in what a fork takes. Not tuned.
_NEWEST_FORK = 0.2
# What is kept of that in a round without forks, so that a slow one is not the last. Not tuned: half in 140 rounds.
_KEPT = 0.995


class BranchOffer(NamedTuple):
    """A branch that there may be. It leaves the draft of sequence `number` behind `place` tokens of it, with `token`.
    `share`: the chance, as its drafter has it, that this is the target's where the draft's own is not. `confidences`:
    of its further tokens, each if all before it are right. It has `rows`, the further tokens not counted. `sampled`:
    its request's temperature is above 0."""

    number: int
    place: int
    token: int
    share: float
    confidences: Sequence[float]
    rows: int
    sampled: bool = False


class ChosenBranch(NamedTuple):
    """Offer number `offer` is verified, with so many of its further tokens."""

    offer: int
    further: int


class RoundBranches(NamedTuple):
    """What became of a round's branches: so many forks of so many `rows`, which it took `fork_ms` to begin. `verdicts`:
    whether the tokens of offers were the target's, verified or not, where the draft was wrong at their places."""

    forks: int = 0
    rows: int = 0
    fork_ms: float = 0.0
    verdicts: Sequence[tuple[BranchOffer, bool]] = ()


NO_BRANCHES = RoundBranches()


class BranchState(NamedTuple):
    """What is known of branches: `greedy` and `sampled` say how often a stated share came true, a fork takes
    `fork_ms`."""

    greedy: Calibration = Calibration()
    sampled: Calibration = Calibration()
    fork_ms: float = 0.0


def compare_rows(cost: StepCost) -> float:
    """Return how many times as long as one row a forward of 16 takes, of one sequence with nothing before it."""
    return cost.ms(_ROWS) / cost.ms(1)


def explain_branches(cost: StepCost) -> str:
    """Return in a line whether there are branches on a device of this cost, and why."""
    ratio = compare_rows(cost)
    compared = f"{_ROWS} rows take {ratio:.2f} times as long as one"
    if ratio < MOST_ROW_RATIO:
        return f"up to {MOST_BRANCHES} a round, by the rules greedy and coupled: {compared}"
    return f"none: {compared}, and less than {MOST_ROW_RATIO:g} times is needed"


def choose_branches(
    state: BranchState,
    cost: CostModel,
    now: RoundContext,
    depths: Sequence[int],
    cumulative_acceptance: Sequence[Sequence[float]],
    offers: Sequence[BranchOffer],
    value: float,
) -> list[ChosenBranch]:
    """Return the branches that are worth their rows and forks, those with most expected tokens first. `depths` and
    `cumulative_acceptance`: see DepthDecision; an offer is of a place that is verified. `value`: the tokens per ms that
    decoding makes on the average."""
    ranked = []
    for index, offer in enumerate(offers):
        chances = cumulative_acceptance[offer.number]
        if offer.place < min(depths[offer.number], len(chances)):
            before = chances[offer.place - 1] if offer.place else 1.0
            calibration = state.sampled if offer.sampled else state.greedy
            missed = (before - chances[offer.place]) * chance(calibration, offer.share)
            if missed > 0.0:
                ranked.append((-missed, index))
    ranked.sort()
    chosen: list[ChosenBranch] = []
    added = count_added_rows(now, depths)
    rows, room, sequences = now.base_rows + added, now.room - added, len(now.places)
    spent_ms = cost.ms(rows, sequences, now.context_tokens)
    for missed, index in ranked:
        if len(chosen) == MOST_BRANCHES:
            break
        offer = offers[index]
        if offer.rows > room:
            continue
        row_ms = cost.estimate_added_ms(rows + offer.rows, len(offer.confidences), sequences + 1, now.context_tokens)
        tokens, further = _extend(-missed, offer.confidences[: room - offer.rows], row_ms, value)
        taken = offer.rows + further
        ms = cost.ms(rows + taken, sequences + 1, now.context_tokens)
        if tokens >= LEAST_CHANCE and tokens > value * (ms - spent_ms + state.fork_ms):
            chosen.append(ChosenBranch(index, further))
            rows, room, sequences, spent_ms = rows + taken, room - taken, sequences + 1, ms
    return chosen


def _extend(first: float, confidences: Sequence[float], added_ms: Sequence[float], value: float) -> tuple[float, int]:
    """Return the tokens that are expected of a branch with those further tokens that are worth their rows, and how many
    these are. `first`: the chance of its first token."""
    tokens = likely = first
    for index, confidence in enumerate(confidences):
        likely *= min(confidence, MOST_CERTAIN)
        if likely <= value * added_ms[index]:
            return tokens, index
        tokens += likely
    return tokens, len(confidences)


def observe_branches(state: BranchState, done: RoundBranches) -> BranchState:
    """Take in what became of a round's branches, and of those that were offered."""
    calibrations = [state.greedy, state.sampled]
    for offer, right in done.verdicts:
        calibrations[offer.sampled] = observe_token_outcome(calibrations[offer.sampled], offer.share, right)
    fork_ms = _KEPT * state.fork_ms
    if done.forks:
        fork_ms = update_mean(state.fork_ms, done.fork_ms / done.forks, _NEWEST_FORK)
    return BranchState(calibrations[False], calibrations[True], fork_ms)

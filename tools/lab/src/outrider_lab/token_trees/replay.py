"""Plays outputs along chains, trees and forks. Row costs are a function; prefill is left out, for it is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from outrider_lab.token_trees.candidates import RecordedOutput
from outrider_lab.token_trees.chances import Calibration
from outrider_lab.token_trees.shapes import (
    NO_PARENT,
    Budget,
    Candidate,
    Choice,
    RowCost,
    choose_chain,
    choose_forks,
    choose_tree,
    multiply_chances,
)

_FOLDS = 5
_TURNS = 4  # until the value of time is what it brings
_RESAMPLES = 500

Choose = Callable[[Sequence[Candidate], Sequence[float], Budget], Choice]


def _choose_nothing(_candidates: Sequence[Candidate], _reach: Sequence[float], _budget: Budget) -> Choice:
    return Choice([], 1)


WAYS: Mapping[str, Choose] = {
    "plain": _choose_nothing,
    "chain": choose_chain,
    "tree": choose_tree,
    "forks": choose_forks,
}


class Curve(NamedTuple):
    """What a forward takes: (rows, ms), ascending, with straight lines between and behind. A segment has `least_rows`
    at least, and `most_rows` at most."""

    points: tuple[tuple[int, float], ...]
    most_rows: int
    least_rows: int = 2

    def row_ms(self, rows: int) -> float:
        """Return the milliseconds of a forward of one sequence with so many rows."""
        rows = max(rows, self.least_rows)
        begin, end = next((pair for pair in pairwise(self.points) if rows <= pair[1][0]), self.points[-2:])
        return begin[1] + (end[1] - begin[1]) * (rows - begin[0]) / (end[0] - begin[0])


class Recorded(NamedTuple):
    """An output with its candidates in front of every token, and their reach."""

    output: RecordedOutput
    candidates: list[list[Candidate]]
    reach: list[list[float]]


@dataclass(slots=True)
class Played:
    """`expected`: tokens by the chances. `of_output`: (tokens, ms) of each output."""

    tokens: int = 0
    expected: float = 0.0
    ms: float = 0.0
    rounds: int = 0
    rows: int = 0
    forks: int = 0
    of_output: list[tuple[int, float]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens over all time."""
        return 1000.0 * self.tokens / self.ms


class Gain(NamedTuple):
    """Tokens/s over those of the best chain, as replayed and as the chances promise. `error`: the standard deviation
    over resampled outputs."""

    replayed: float
    error: float
    expected: float


def calibrate(outputs: Sequence[RecordedOutput], candidates: Sequence[list[list[Candidate]]]) -> list[Recorded]:
    """Return the outputs with chances that were learned from the other folds."""
    calibrations = []
    for fold in range(_FOLDS):
        others = [index for index in range(len(outputs)) if index % _FOLDS != fold]
        seen = ((own, outputs[index].tokens[place:]) for index in others for place, own in enumerate(candidates[index]))
        calibrations.append(Calibration(seen))
    return [
        Recorded(output, own, [_reach(place, calibrations[index % _FOLDS]) for place in own])
        for index, (output, own) in enumerate(zip(outputs, candidates, strict=True))
    ]


def _reach(candidates: Sequence[Candidate], calibration: Calibration) -> list[float]:
    return multiply_chances(candidates, [calibration.estimate(one) for one in candidates])


def play(recorded: Sequence[Recorded], choose: Choose, curve: Curve, fork_ms: float = 0.0) -> Played:
    """Play all outputs at the value of time that this very way of choosing reaches."""
    value = 1.0 / curve.row_ms(1)
    played = Played()
    for _ in range(_TURNS):
        played = _play_at(recorded, choose, curve, (value, fork_ms))
        value = played.tokens / played.ms
    return played


def _play_at(recorded: Sequence[Recorded], choose: Choose, curve: Curve, price: tuple[float, float]) -> Played:
    done = Played()
    row_ms: RowCost = curve.row_ms
    value, fork_ms = price
    for output, every, reaches in recorded:
        tokens_before, ms_before, place = done.tokens, done.ms, 0
        while place < len(output.tokens):
            deepest = len(output.tokens) - place - 1
            candidates, reach = every[place], reaches[place]
            choice = choose(candidates, reach, Budget(row_ms, value, curve.most_rows, deepest, fork_ms))
            made = 1 + _count_accepted(candidates, choice, output.tokens[place:])
            done.expected += 1.0 + sum(reach[index] for index in choice.candidates)
            done.tokens, place = done.tokens + made, place + made
            done.ms += row_ms(choice.rows) + fork_ms * choice.forks
            done.rounds, done.rows, done.forks = done.rounds + 1, done.rows + choice.rows, done.forks + choice.forks
        done.of_output.append((done.tokens - tokens_before, done.ms - ms_before))
    return done


def _count_accepted(candidates: Sequence[Candidate], choice: Choice, tokens: Sequence[int]) -> int:
    children = {(candidates[index].parent, candidates[index].token): index for index in choice.candidates}
    at, accepted = NO_PARENT, 0
    while accepted < len(tokens) - 1 and (at, tokens[accepted]) in children:
        at = children[at, tokens[accepted]]
        accepted += 1
    return accepted


def compare(played: Played, chain: Played) -> Gain:
    """Return what a way brings over the best chain, over the same outputs."""
    own, other = np.array(played.of_output), np.array(chain.of_output)
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(_RESAMPLES):
        picked = random.integers(0, len(own), len(own))
        (tokens, ms), (others, others_ms) = own[picked].sum(0), other[picked].sum(0)
        ratios.append(tokens / ms / (others / others_ms))
    promised = played.expected / played.ms / (chain.expected / chain.ms)
    return Gain(played.tokens_per_s / chain.tokens_per_s, float(np.std(ratios)), promised)


def compare_by_category(recorded: Sequence[Recorded], played: Played, chain: Played) -> dict[str, float]:
    """Return the ratio of tokens/s in each category of outputs."""
    sums: dict[str, list[float]] = {}
    for (output, _, _), own, other in zip(recorded, played.of_output, chain.of_output, strict=True):
        total = sums.setdefault(output.category, [0.0] * 4)
        for index, figure in enumerate((*own, *other)):
            total[index] += figure
    return {name: own / ms / (other / other_ms) for name, (own, ms, other, other_ms) in sums.items()}

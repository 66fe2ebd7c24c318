"""A draft of a model while it grows, and what is read from the logits that it grows by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from device_profiles.workload import ModelSpec
from orchestrator.worker.drafting.cache import DraftSequence
from orchestrator.worker.drafting.port import Alternative, Ask, Draft
from policies.sampling import DraftDistribution, Row, Sampling, choose

# Of a token, that branches are made for. ADR 0076: with the likeliest alone a hidden share of 0.36, and not 0.8, at an
# agreement of 0.8.
_RIVALS = 3
_NEVER = np.float32(-1e30)  # a logit; infinity is refused


class Rival(NamedTuple):
    """A token that comes behind the chosen one. `share`: its probability among all that were not chosen."""

    token: int
    share: float


@dataclass(slots=True, eq=False, kw_only=True)
class Proposal:
    """What was proposed behind the committed tokens. `proposals` is empty where tokens are not drawn, `rivals` where no
    branches are made. `cheaper`: see port.Ask."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    proposals: list[DraftDistribution] = field(default_factory=list)
    rivals: list[list[Rival]] = field(default_factory=list)
    cheaper: Sequence[int] = ()

    def behind(self, count: int) -> Proposal:
        return Proposal(
            tokens=self.tokens[count:],
            probabilities=self.probabilities[count:],
            proposals=self.proposals[count:],
            rivals=self.rivals[count:],
        )


@dataclass(slots=True, eq=False)
class GrowingDraft(Proposal):
    """One sequence's draft while it grows. `certainty` is the chance that all of it is accepted, and `usual` that of a
    token behind accepted ones. Where both together are below `least`, one more is not worth its time."""

    ask: Ask
    known: DraftSequence
    least: float
    counts: dict[int, int]
    usual: float = 1.0
    confidences: list[float] = field(default_factory=list)
    certainty: float = 1.0

    @property
    def goes_on(self) -> bool:
        next_chance = self.certainty * self.usual if self.tokens else 1.0
        return len(self.tokens) < self.ask.limit and next_chance >= self.least

    def draft(self, drafter: str) -> Draft:
        whole = Draft(tuple(self.tokens), tuple(self.confidences), drafter, proposals=tuple(self.proposals))
        if self.ask.alternatives and len(self.rivals) == len(self.tokens):  # else some are of a round without
            rivals = [(place, rival) for place, of_place in enumerate(self.rivals) for rival in of_place]
            others = tuple(Alternative(place, (rival.token,), (rival.share,)) for place, rival in rivals)
            whole = replace(whole, alternatives=others)
        return whole.truncate(self.ask.limit)


class Outputs:
    """What each column of a model's rows means."""

    def __init__(self, spec: ModelSpec) -> None:
        self._vocabulary = spec.vocabulary_size
        self._ids = np.array(spec.output_ids, np.intp)

    def token(self, column: int) -> int:
        return int(self._ids[column]) if len(self._ids) else column

    def spread(self, row: Row) -> Row:
        """Return a row with a column for each token of the vocabulary: those that cannot be said have no chance."""
        if not len(self._ids):
            return row
        whole = np.full(self._vocabulary, -np.inf, np.float32)
        whole[self._ids] = row
        return whole


def find_rivals(row: Row, column: int, sampling: Sampling, position: int, *, several: bool) -> list[tuple[int, float]]:
    """Return the columns that would be chosen at a position, one after the other, if a column and those before could
    not be, each with its probability among all but that column: the first of them, or `several`. `row`: logits,
    float32, shape (columns,). Raises NotFinite."""
    left = row.copy()
    left[column] = _NEVER
    weights = np.exp((left - left.max()) / np.float32(sampling.temperature or 1.0))
    every = float(weights.sum(dtype=np.float64))
    rivals = []
    for _ in range(min(_RIVALS if several else 1, len(row) - 1)):
        rival = choose(left, sampling, position)
        rivals.append((rival, float(weights[rival]) / every))
        left[rival] = _NEVER
    return rivals


def probability_of(row: Row, column: int, temperature: float) -> float:
    """Return a column's probability under its logits (float32, shape (columns,)), at a temperature (0: at 1)."""
    scaled = (row - row.max()) / np.float32(temperature or 1.0)
    return math.exp(float(scaled[column])) / float(np.exp(scaled).sum(dtype=np.float64))

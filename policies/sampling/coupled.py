"""The target's own choice at a position: a function of its logits, the seed and the position, whatever was drafted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.sampling import noise
from policies.sampling.filters import contenders, contenders_of_best, narrow_row, nucleus_size
from policies.sampling.params import BestRow, Ids, NotDecided, NotFinite, Row, Sampling, finite_top, scale_logits

# Says how many tokens are looked at closely, and no choice depends on it (ADR 0038). Not tuned.
_SCREEN_NATS = 5.0


def greedy(rows: Row, ids: Ids | None = None) -> list[int]:
    """Return the best token of each row, the lowest id where several tie. `ids`: as BestRow has them, where the best
    logits alone are known. Raises NotFinite."""
    best = [int(row.argmax()) for row in rows]
    if not all(math.isfinite(row[token]) for row, token in zip(rows, best, strict=True)):
        raise NotFinite("the logits are not finite")
    return best if ids is None else [int(own[place]) for own, place in zip(ids, best, strict=True)]


def choose(row: Row, sampling: Sampling, position: int) -> int:
    """Return the target's choice at `position` from its logits (float32, shape (vocabulary,)). Raises NotFinite."""
    return choose_each([(row, None, sampling, position)])[0]


def choose_each(requests: Iterable[tuple[Row, BestRow | None, Sampling, int]]) -> list[int]:
    """Return what `choose` does for each row, sampling and position. Of a row the best logits may be known alone, as
    many as Sampling.count_best_logits says, with what BestRow says of it. Raises NotFinite.

    The noise of all is made at once: for the few tokens that filters leave of a row, calls cost more than what is
    computed in them.
    """
    chosen: list[int] = []
    contests: list[_Contest] = []
    for row, best, sampling, position in requests:
        if sampling.temperature == 0.0:
            chosen.append(greedy(row[None, :], None if best is None else best.ids[None, :])[0])
            continue
        top = finite_top(row)
        if sampling.unfiltered:
            chosen.append(_choose_unfiltered(row, top, sampling, position))
            continue
        ids, nats, sure = _find_contenders(row, best, sampling, position, top)
        if len(ids) > 1:
            contests.append(_Contest(len(chosen), row, best, sampling, position, top, ids, nats, sure))
        chosen.append(int(ids[0]))
    noises = noise.gumbels(
        [(contest.sampling.seed, contest.position) for contest in contests], [contest.ids for contest in contests]
    )
    for contest, own in zip(contests, noises, strict=True):
        chosen[contest.place] = contest.winner(own)
    return chosen


def _find_contenders(
    row: Row, best: BestRow | None, sampling: Sampling, position: int, top: float
) -> tuple[Ids, NDArray[np.float64], int]:
    """Return what `contenders` does, behind the filters that narrow them where there are some."""
    if sampling.narrows:
        places, nats = narrow_row(row, sampling, position, top)
        sure = len(places)
    elif best is None:
        return contenders(row, sampling, top)
    else:
        try:
            places, nats, sure = contenders_of_best(row, sampling, top, best.mass)
        except NotDecided:
            return contenders(best.read(), sampling, top)
    return places if best is None else best.ids[places], nats, sure


class _Contest(NamedTuple):
    """What `contenders` gave for a row, and where its winner goes."""

    place: int
    row: Row
    best: BestRow | None
    sampling: Sampling
    position: int
    top: float
    ids: Ids
    nats: NDArray[np.float64]
    sure: int

    def winner(self, noises: NDArray[np.float64]) -> int:
        scores = self.nats + noises
        best = int(scores.argmax())
        if best >= self.sure:
            row = self.row if self.best is None else self.best.read()
            best = int(scores[: nucleus_size(row, self.sampling, self.top, self.nats)].argmax())
        return int(self.ids[best])


def _choose_unfiltered(row: Row, top: float, sampling: Sampling, position: int) -> int:
    """Gumbel-max over the whole vocabulary, computing logarithms only where they can matter.

    With `best` the score of a leading token, a token more than _SCREEN_NATS below the top can win only with noise above
    best + _SCREEN_NATS. That is a uniform above exp(-exp(-(best + _SCREEN_NATS))). So a comparison of the hash's high
    bits leaves a handful of tokens.
    """
    leading = np.flatnonzero(row >= np.float32(top - _SCREEN_NATS * sampling.temperature)).astype(np.uint32)
    scores = scale_logits(row, top, leading, sampling) + noise.gumbel(sampling.seed, position, leading)
    winner = int(scores.argmax())
    best = float(scores[winner])
    bound = math.exp(-math.exp(-(best + _SCREEN_NATS)))
    # One step of slack on either side: the screen may keep too many tokens, never too few.
    others = noise.loudest(sampling.seed, position, max(0, int(bound * 2.0**32) - 1), len(row))
    if len(others):
        challengers = scale_logits(row, top, others, sampling) + noise.gumbel(sampling.seed, position, others)
        rival = int(challengers.argmax())
        if challengers[rival] > best:
            return int(others[rival])
    return int(leading[winner])

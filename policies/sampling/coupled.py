"""The target's own choice at a position: a function of its logits, the seed and the position, whatever was drafted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.sampling import noise
from policies.sampling.filters import contenders, narrow_row, nucleus_size
from policies.sampling.params import Ids, NotFinite, Row, Sampling, finite_top, scale_logits

# Says how many tokens are looked at closely, and no choice depends on it (ADR 0038). Not tuned.
_SCREEN_NATS = 5.0


def greedy(rows: Row, ids: Ids | None = None) -> list[int]:
    """Return the best token of each row, the lowest id where several tie. `ids`: see `choose_each`. Raises
    NotFinite."""
    best = [int(row.argmax()) for row in rows]
    if not all(math.isfinite(row[token]) for row, token in zip(rows, best, strict=True)):
        raise NotFinite("the logits are not finite")
    return best if ids is None else [int(own[place]) for own, place in zip(ids, best, strict=True)]


def choose(row: Row, sampling: Sampling, position: int) -> int:
    """Return the target's choice at `position` from its logits (float32, shape (vocabulary,)). Raises NotFinite."""
    return choose_each([(row, None, sampling, position)])[0]


def choose_each(requests: Iterable[tuple[Row, Ids | None, Sampling, int]]) -> list[int]:
    """Return what `choose` does for each row, sampling and position. Raises NotFinite.

    A row may be the best of one, the best first and the lower id first among equals, at least as many as decide
    (Sampling.best_logits). Then `ids` says whose they are; None: of all tokens.

    The noise of all is made at once: for the few tokens that filters leave of a row, calls cost more than what is
    computed in them.
    """
    chosen: list[int] = []
    contests: list[_Contest] = []
    for row, tokens, sampling, position in requests:
        if sampling.temperature == 0.0:
            chosen.append(greedy(row[None, :], None if tokens is None else tokens[None, :])[0])
            continue
        top = finite_top(row)
        if sampling.unfiltered:
            chosen.append(_choose_unfiltered(row, top, sampling, position))
            continue
        if sampling.narrows:
            ids, nats = narrow_row(row, sampling, position, top)
            sure = len(ids)
        else:
            ids, nats, sure = contenders(row, sampling, top)
        if tokens is not None:
            ids = tokens[ids]
        if len(ids) > 1:
            contests.append(_Contest(len(chosen), row, sampling, position, top, ids, nats, sure))
        chosen.append(int(ids[0]))
    noises = noise.gumbels(
        [(contest.sampling.seed, contest.position) for contest in contests], [contest.ids for contest in contests]
    )
    for contest, own in zip(contests, noises, strict=True):
        chosen[contest.place] = contest.winner(own)
    return chosen


class _Contest(NamedTuple):
    """What `contenders` gave for a row, and where its winner goes."""

    place: int
    row: Row
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
            best = int(scores[: nucleus_size(self.row, self.sampling, self.top, self.nats)].argmax())
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

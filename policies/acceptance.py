"""Which tokens of a verified draft become output.

Glossary (the field's terms):
    draft      a token that a drafter proposed for a position
    accepted   a draft that equals the target's own choice at its position
    recovered  the target's choice at the first position where the draft was wrong
    bonus      the target's choice after the last draft, when all were accepted
    depth      the number of drafts of one sequence in one round (k)

Coupled acceptance: the target's choice at position i is argmax over its filtered, temperature-scaled
log-probabilities plus the noise of (seed, i, token). It does not depend on the draft, so the output is the
target's own sample whatever was proposed; greedy is temperature 0. Every verdict holds at least one
token: where nothing may follow the last committed token, a sequence has ended and is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies import noise

Row = NDArray[np.float32]
Shape = Callable[[Row, Sequence[int]], Row | None]
"""Called with a row and the drafts accepted before it; gives the row as it is to be judged there (bias, penalties,
grammar), None where nothing may follow. At least one of its logits is finite."""

_WIDTHS = (4.0, 8.0, 16.0, math.inf)  # how far below the best candidates are looked for, in nats
_SCREEN_NATS = 8.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: temperature, then min-p, then top-k, then top-p (vLLM's order).

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `seed` is taken modulo 2**64.
    Before all that come `logit_bias` ((token, bias) pairs, each token once) and the penalties of `policies/penalties`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens` are to be committed: `accepted` drafts, then one recovered or bonus token (none where a shape said that
    nothing may follow)."""

    accepted: int
    tokens: tuple[int, ...]


class NotFinite(ValueError):
    """A row of logits holds NaN or infinity: the device computed garbage."""


def verdict(rows: Row, draft: Sequence[int], sampling: Sampling, position: int, shape: Shape | None = None) -> Verdict:
    """Judge one sequence's draft.

    `rows`: float32, shape (len(draft) + 1, vocabulary); row i holds the logits of position `position + i`,
    where `position` is that of the first drafted token. `shape` changes each row before it is judged. Raises
    NotFinite.
    """
    if shape is not None:
        return _shaped_verdict(rows, draft, sampling, position, shape)
    if sampling.temperature == 0.0:
        choices = greedy(rows)
        accepted = 0
        while accepted < len(draft) and choices[accepted] == draft[accepted]:
            accepted += 1
        return Verdict(accepted, tuple(choices[: accepted + 1]))
    tokens: list[int] = []
    for index in range(len(draft) + 1):
        token = choose(rows[index], sampling, position + index)
        tokens.append(token)
        if index == len(draft) or token != draft[index]:
            break
    return Verdict(len(tokens) - 1, tuple(tokens))


def _shaped_verdict(rows: Row, draft: Sequence[int], sampling: Sampling, position: int, shape: Shape) -> Verdict:
    """Judge row by row: what a row is shaped to depends on the drafts accepted before it."""
    for index in range(len(draft) + 1):
        if not math.isfinite(float(rows[index].max())):  # a shape may cover garbage up
            raise NotFinite("the logits are not finite")
        row = shape(rows[index], draft[:index])
        if row is None:
            return Verdict(index, tuple(draft[:index]))
        token = choose(row, sampling, position + index)
        if index == len(draft) or token != draft[index]:
            break
    return Verdict(index, (*draft[:index], token))


def greedy(rows: Row) -> list[int]:
    """Return the best token of each row, the lowest id where several tie. Raises NotFinite."""
    best = rows.argmax(axis=1)
    if not np.isfinite(rows[np.arange(len(rows)), best]).all():
        raise NotFinite("the logits are not finite")
    return [int(token) for token in best]


def choose(row: Row, sampling: Sampling, position: int) -> int:
    """Return the target's choice at `position` from its logits (float32, shape (vocabulary,)). Raises NotFinite."""
    if sampling.temperature == 0.0:
        return greedy(row[None, :])[0]
    top = float(row.max())
    if not math.isfinite(top):
        raise NotFinite("the logits are not finite")
    if sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p == 0.0:
        return _choose_unfiltered(row, top, sampling, position)
    kept = filtered(row, sampling)
    scores = _scaled(row, top, kept, sampling) + noise.gumbel(sampling.seed, position, kept)
    return int(kept[int(scores.argmax())])


def _scaled(row: Row, top: float, tokens: NDArray[np.uint32], sampling: Sampling) -> NDArray[np.float64]:
    return (row[tokens].astype(np.float64) - top) / sampling.temperature


def _choose_unfiltered(row: Row, top: float, sampling: Sampling, position: int) -> int:
    """Gumbel-max over the whole vocabulary, computing logarithms only where they can matter.

    With `best` the score of a leading token, a token more than _SCREEN_NATS below the top can win only with
    noise above best + _SCREEN_NATS, so with a uniform above exp(-exp(-(best + _SCREEN_NATS))): a comparison
    of the hash's high bits leaves a handful of tokens.
    """
    leading = np.flatnonzero(row >= np.float32(top - _SCREEN_NATS * sampling.temperature)).astype(np.uint32)
    scores = _scaled(row, top, leading, sampling) + noise.gumbel(sampling.seed, position, leading)
    winner = int(scores.argmax())
    best = float(scores[winner])
    bound = math.exp(-math.exp(-(best + _SCREEN_NATS)))
    # One step of slack on either side: the screen may keep too many tokens, never too few.
    screen = np.uint32(max(0, int(bound * 2.0**32) - 1))
    every = np.arange(len(row), dtype=np.uint32)
    others = every[noise.high_bits(sampling.seed, position, every) >= screen]
    if len(others):
        challengers = _scaled(row, top, others, sampling) + noise.gumbel(sampling.seed, position, others)
        rival = int(challengers.argmax())
        if challengers[rival] > best:
            return int(others[rival])
    return int(leading[winner])


def filtered(row: Row, sampling: Sampling) -> NDArray[np.uint32]:
    """Return the ids that survive min-p, top-k and top-p, best first (the lower id first among equals)."""
    top = float(row.max())
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    mass_all = _mass(row, top, sampling) if sampling.top_p < 1.0 and sampling.top_k == 0 else math.nan
    for width in _WIDTHS:
        low = max(-width, floor)
        ids = _at_least(row, top + low * sampling.temperature)
        complete = -width <= floor
        if sampling.top_k and len(ids) >= sampling.top_k:
            ids, complete = ids[: sampling.top_k], True
        if sampling.top_p >= 1.0:
            if complete:
                return ids
            continue
        shares = np.exp(_scaled(row, top, ids, sampling))
        # Under top-k or min-p the nucleus is taken from what they kept; alone, from the whole vocabulary.
        total = float(shares.sum()) if complete else mass_all
        within = np.cumsum(shares) >= sampling.top_p * total
        if not math.isnan(total) and (complete or within.any()):
            return ids[: int(within.argmax()) + 1] if within.any() else ids
    return ids


def _at_least(row: Row, low: float) -> NDArray[np.uint32]:
    ids = np.flatnonzero(row >= np.float32(low) if math.isfinite(low) else row > -np.inf)
    return ids[np.argsort(-row[ids], kind="stable")].astype(np.uint32)


def _mass(row: Row, top: float, sampling: Sampling) -> float:
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    scaled = (row - np.float32(top)) / np.float32(sampling.temperature)
    shares = np.exp(scaled)
    return float(shares.sum(dtype=np.float64) if floor == -math.inf else shares[scaled >= floor].sum(dtype=np.float64))

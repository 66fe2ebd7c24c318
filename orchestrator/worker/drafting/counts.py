"""A target's own outputs, counted: which token comes behind its last one, two and three, and how sure that is.

Counts of longer contexts are mixed with those of the shorter ones (Witten and Bell 1991): with C occurrences of a
context and D different tokens behind it, p(token) = (C / (C + D)) * count / C + (D / (C + D)) * p(token | shorter).
What is counted is the target's first choice at each position, also where it sampled. How sure an entry is, is
measured: texts that were not counted say how often entries of its p and length are right.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import OutriderError
from orchestrator.worker.drafting.statistics import MOST_CONTEXT, MOST_TOKEN, TOKEN_BITS, Entries

Longs = NDArray[np.int64]

# ADR 0087: one conversation in ten says how often entries are right.
_HELD_OUT_ONE_IN = 10
_LEAST_COUNT = 2
"""A context of three tokens must have been there so often: one occurrence says no more than the shorter context. ADR
0087: so contexts up to 3 tokens are worth 4.3 %; up to 5 with nothing left out, 2.4 %."""
# ADR 0087: stated chances were within 0.03 of what was accepted in every tenth.
_BUCKETS = 20
# Outcomes that p is worth. ADR 0087. Not tuned.
_PRIOR = 5.0
_MASK = (1 << TOKEN_BITS) - 1  # of one token in a key


class UncountableTokens(OutriderError):
    """Tokens that do not fit into a key."""


class LabelledText(Protocol):
    """Tokens of one text, `head` of them given. `labels`: the target's first choice at each of the others."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def head(self) -> int: ...
    @property
    def labels(self) -> NDArray[np.int32]: ...


class Positions(NamedTuple):
    """Positions that the target decided: `keys` (MOST_CONTEXT, n) of the contexts before them, 0 where the text is
    shorter, and `labels` (n,): its first choice."""

    keys: Longs
    labels: Longs


class Counted(NamedTuple):
    """One length of context: `keys` (n,) ascending, how often each was there, the best token behind it and its p; and
    all `pairs` of the number of a key and a token, ascending, with their p."""

    keys: Longs
    totals: Longs
    best: Longs
    best_p: NDArray[np.float64]
    pairs: Longs
    pairs_p: NDArray[np.float64]


def is_held_out(number: int) -> bool:
    """Say whether a conversation tells how sure the counts of all others are: one in ten, by its number."""
    return zlib.crc32(f"statistics {number}".encode()) % _HELD_OUT_ONE_IN == 0


def list_positions(texts: Iterable[LabelledText]) -> Positions:
    """Return what the target decided in texts. Raises UncountableTokens."""
    keys: list[Longs] = []
    labels: list[Longs] = []
    for text in texts:
        tokens = text.tokens.astype(np.int64) + 1
        if len(tokens) == text.head or text.head < 1:
            continue
        key = np.zeros(len(tokens), np.int64)
        by_length = np.zeros((MOST_CONTEXT, len(tokens)), np.int64)
        for length in range(1, min(MOST_CONTEXT, len(tokens)) + 1):
            key[length:] |= tokens[:-length] << TOKEN_BITS * (length - 1)
            by_length[length - 1, length:] = key[length:]
        keys.append(by_length[:, text.head :])
        labels.append(text.labels.astype(np.int64))
    if not keys:
        return Positions(np.zeros((MOST_CONTEXT, 0), np.int64), np.zeros(0, np.int64))
    whole = Positions(np.concatenate(keys, axis=1), np.concatenate(labels))
    if max(whole.labels.max(), (whole.keys[0] & _MASK).max()) > MOST_TOKEN:
        raise UncountableTokens(f"the vocabulary has more than {MOST_TOKEN} tokens: there are no statistics of it")
    return whole


def count_contexts(positions: Positions) -> list[Counted]:
    """Count all lengths of context, the shortest first."""
    counted: list[Counted] = []
    for length in range(1, MOST_CONTEXT + 1):
        keys = positions.keys[length - 1]
        counted.append(_count(keys, positions.labels, counted[-1] if counted else None, length))
    return counted


def _count(keys: Longs, labels: Longs, below: Counted | None, length: int) -> Counted:
    kept = keys > 0
    if length == MOST_CONTEXT:
        _, number, often = np.unique(keys, return_inverse=True, return_counts=True)
        kept &= (often >= _LEAST_COUNT)[number]
    known, number, totals = np.unique(keys[kept], return_inverse=True, return_counts=True)
    pairs, counts = np.unique(number.astype(np.int64) << TOKEN_BITS | labels[kept], return_counts=True)
    of, token = pairs >> TOKEN_BITS, pairs & _MASK
    distinct = np.bincount(of, minlength=len(known))
    own_share = totals / (totals + distinct)
    p = own_share[of] * counts / totals[of]
    shorter = np.zeros(len(known), np.int64)
    if below is not None:
        shorter = np.searchsorted(below.keys, known & ((1 << TOKEN_BITS * (length - 1)) - 1))
        p += (1 - own_share[of]) * below.pairs_p[np.searchsorted(below.pairs, shorter[of] << TOKEN_BITS | token)]
    last = np.lexsort((p, of))[np.cumsum(np.bincount(of, minlength=len(known))) - 1]  # the best of each context
    best, best_p = token[last], p[last]
    if below is not None:
        from_below = (1 - own_share) * below.best_p[shorter]
        best = np.where(from_below > best_p, below.best[shorter], best)
        best_p = np.maximum(from_below, best_p)
    return Counted(known, totals, best, best_p, pairs, p)


def build_entries(counted: Sequence[Counted], judged_by: Sequence[Counted], held_out: Positions, most: int) -> Entries:
    """Return the table of counts. How sure its entries are, other counts say, of texts without the held-out ones. Of
    more than `most` entries the contexts that were there least often are left out."""
    chances = []
    order, place = _find_entries(judged_by, held_out)
    for length, own in enumerate(judged_by, start=1):
        at = order == length
        right = own.best[place[at]] == held_out.labels[at]
        p = own.best_p[place[at]]
        bucket = _bucket(p)
        seen = np.bincount(bucket, minlength=_BUCKETS)
        middle = (np.arange(_BUCKETS) + 0.5) / _BUCKETS
        rate = (np.bincount(bucket, right, _BUCKETS) + _PRIOR * middle) / (seen + _PRIOR)
        chances.append(rate[_bucket(counted[length - 1].best_p)])
    totals = np.concatenate([contexts.totals for contexts in counted])
    kept = np.sort(np.argsort(-totals, kind="stable")[:most])
    return Entries(
        np.concatenate([contexts.keys for contexts in counted])[kept].astype(np.uint64),
        np.concatenate([contexts.best for contexts in counted])[kept].astype(np.uint32),
        np.concatenate(chances)[kept].astype(np.float32),
    )


def _bucket(p: NDArray[np.float64]) -> Longs:
    return np.minimum((p * _BUCKETS).astype(np.int64), _BUCKETS - 1)


def _find_entries(counted: Sequence[Counted], positions: Positions) -> tuple[Longs, Longs]:
    """Return for each position the length of the longest known context (0: none) and the place of its entry."""
    length = np.zeros(len(positions.labels), np.int64)
    place = np.zeros(len(positions.labels), np.int64)
    for number, own in enumerate(counted, start=1):
        if not len(own.keys):
            continue
        at = np.minimum(np.searchsorted(own.keys, positions.keys[number - 1]), len(own.keys) - 1)
        known = own.keys[at] == positions.keys[number - 1]
        length[known], place[known] = number, at[known]
    return length, place


def measure_agreement(counted: Sequence[Counted], held_out: Mapping[str, Positions]) -> dict[str, float]:
    """Return by kind of prompt how often the entry for a held-out position is the target's first choice."""
    agreement: dict[str, float] = {}
    for kind, positions in held_out.items():
        length, place = _find_entries(counted, positions)
        right = sum(
            int((own.best[place[length == number]] == positions.labels[length == number]).sum())
            for number, own in enumerate(counted, start=1)
        )
        if len(positions.labels):
            agreement[kind] = round(right / len(positions.labels), 4)
    return agreement

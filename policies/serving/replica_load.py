"""What a target replica takes for a token, by how many sequences it decodes at a time, from the rounds that it ran.

A straight line, tpot_ms = a + b n, fitted by least squares in which older rounds count ever less. Replicas that are
alike share a line: measured apart they would differ by noise, and noise would decide where requests go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_KEPT = 0.98  # weight that all older rounds keep with each new one
_LEAST_SPREAD = 0.25  # variance of n from which a slope can be read
_USUAL_SLOPE = 0.1  # of the mean, for each sequence more: what is assumed until it can be
_ALIKE = 1.25
_UNKNOWN_TPOT_MS = 10.0  # the same for all: then the load alone decides
_USUAL_PREFILL = 0.1  # of a token's time: what a row of prefill is taken for until one was seen


@dataclass(frozen=True, slots=True)
class ReplicaPace:
    """Weighted sums over rounds: their number, sequences, squares of them, TPOT (ms), products of both. `prefill_ms`:
    mean time of a row of prefill; 0 where none was seen."""

    weight: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    ms: float = 0.0
    n_ms: float = 0.0
    prefill_ms: float = 0.0

    def tpot_ms(self, sequences: int) -> float:
        """Return what a token takes each of so many sequences; 0 where nothing was measured."""
        if not self.weight:
            return 0.0
        mean_n, mean_ms = self.n / self.weight, self.ms / self.weight
        spread = self.nn / self.weight - mean_n**2
        slope = (self.n_ms / self.weight - mean_n * mean_ms) / spread if spread >= _LEAST_SPREAD else 0.0
        if spread < _LEAST_SPREAD:
            slope = _USUAL_SLOPE * mean_ms / max(1.0, mean_n)
        return max(mean_ms / 4.0, mean_ms + max(0.0, slope) * (sequences - mean_n))


def observe_replica_round(
    pace: ReplicaPace, *, sequences: int, tokens: float, rows: float, drafted: float, round_ms: float
) -> ReplicaPace:
    """Take in one round. One with more rows than its sequences and their drafts need was prefill too."""
    prefilled = rows - 2 * sequences - drafted
    if prefilled > 0:
        own_ms = max(0.0, round_ms - pace.tpot_ms(sequences)) / prefilled
        kept = own_ms if pace.prefill_ms == 0.0 else 0.8 * pace.prefill_ms + 0.2 * own_ms
        return replace(pace, prefill_ms=kept)
    if tokens <= 0 or sequences <= 0:
        return pace
    tpot_ms = round_ms * sequences / tokens
    return ReplicaPace(
        weight=_KEPT * pace.weight + 1.0,
        n=_KEPT * pace.n + sequences,
        nn=_KEPT * pace.nn + sequences**2,
        ms=_KEPT * pace.ms + tpot_ms,
        n_ms=_KEPT * pace.n_ms + sequences * tpot_ms,
        prefill_ms=pace.prefill_ms,
    )


@dataclass(frozen=True, slots=True)
class SeenRound:
    """A round as a replica's pace is learnt from it. `draft`: what proposed tokens there then ("": nothing);
    `draft_ms`: what the round waited for it."""

    sequences: int
    tokens: float
    rows: float
    drafted: float
    round_ms: float
    draft_ms: float = 0.0
    draft: str = ""


@dataclass(frozen=True, slots=True)
class PairPaces:
    """What a replica takes for a token: `plain`, as it would be without drafts, and with each draft that it had.

    A round with drafts says what one without would take at most: its time less that of drafting, for one token of each
    sequence. So both are known without a round being spent on it.
    """

    plain: ReplicaPace = ReplicaPace()
    drafted: Mapping[str, ReplicaPace] = field(default_factory=dict)

    def observe(self, seen: SeenRound, stretch: float = 1.0) -> PairPaces:
        """Take in a round that took `stretch` times as long as on a device of its own."""
        alone_ms = seen.round_ms / stretch
        plain_ms = (seen.round_ms - (seen.draft_ms if seen.drafted else 0.0)) / stretch
        tokens = seen.sequences if seen.drafted else seen.tokens
        counts: dict[str, Any] = {"sequences": seen.sequences, "rows": seen.rows, "drafted": seen.drafted}
        plain = observe_replica_round(self.plain, tokens=tokens, round_ms=max(0.0, plain_ms), **counts)
        if not seen.draft:
            return PairPaces(plain, self.drafted)
        known = self.drafted.get(seen.draft, ReplicaPace())
        drafted = observe_replica_round(known, tokens=seen.tokens, round_ms=alone_ms, **counts)
        return PairPaces(plain, {**self.drafted, seen.draft: drafted})


def predict_saved_ms(own: PairPaces, every: Sequence[PairPaces], draft: str, sequences: int) -> float:
    """Return what a draft saves of a token's time; 0 where it was not seen at work."""
    paces = [one.drafted[draft] for one in every if draft in one.drafted]
    if not any(one.weight for one in paces):
        return 0.0
    plain_ms = predict_tpot_ms(own.plain, [one.plain for one in every], sequences)
    return max(0.0, plain_ms - predict_tpot_ms(own.drafted.get(draft, ReplicaPace()), paces, sequences))


def predict_tpot_ms(pace: ReplicaPace, all_paces: Sequence[ReplicaPace], sequences: int) -> float:
    """Return the TPOT to reckon with: what all replicas show together, unless this one is clearly another kind."""
    together = _together(all_paces).tpot_ms(sequences)
    own = pace.tpot_ms(sequences)
    if not together:
        return _UNKNOWN_TPOT_MS * (1.0 + _USUAL_SLOPE * (sequences - 1))
    return own if own and not 1.0 / _ALIKE <= own / together <= _ALIKE else together


def predict_prefill_ms(all_paces: Sequence[ReplicaPace]) -> float:
    """Return what a token of a prompt takes, on the mean of the replicas that know."""
    known = [pace.prefill_ms for pace in all_paces if pace.prefill_ms > 0.0]
    return sum(known) / len(known) if known else _USUAL_PREFILL * (_together(all_paces).tpot_ms(1) or _UNKNOWN_TPOT_MS)


def _together(paces: Sequence[ReplicaPace]) -> ReplicaPace:
    return ReplicaPace(
        weight=sum(pace.weight for pace in paces),
        n=sum(pace.n for pace in paces),
        nn=sum(pace.nn for pace in paces),
        ms=sum(pace.ms for pace in paces),
        n_ms=sum(pace.n_ms for pace in paces),
    )

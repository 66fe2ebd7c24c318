"""How large a forward may be after one ran out of memory: half of that one, for a while, and then larger in steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

# ADR 0049. Not tuned: another program's shortage is to pass by.
FIRST_HOLD_S = 30.0
# ADR 0049: 32 minutes, so that a bound that is the machine's costs a failed forward twice an hour.
MOST_HOLD_S = 1920.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a loop may do when memory is no concern. `least_rows`: what a sequence is charged for at least."""

    rows: int
    sequences: int
    least_rows: int


@dataclass(frozen=True, slots=True)
class BatchBound:
    """`rows` of a forward, and `sequences` that run, at most. It has stood since `since_s`, and stands for `hold_s`.
    `trying`: it was loosened since memory ran out last."""

    rows: int
    sequences: int
    since_s: float = 0.0
    hold_s: float = FIRST_HOLD_S
    trying: bool = False


def lift_bound(limits: BatchLimits) -> BatchBound:
    return BatchBound(limits.rows, limits.sequences)


def tighten(bound: BatchBound, limits: BatchLimits, *, rows: int, sequences: int, now_s: float) -> BatchBound | None:
    """Return the bound after a forward of so many rows and sequences ran out of memory; None where none can be smaller.

    Where that was an attempt to do with less of a bound, the next attempt comes twice as late.
    """
    if sequences <= 1 and rows <= limits.least_rows:
        return None
    kept = max(limits.least_rows, min(rows, bound.rows) // 2)
    hold_s = min(MOST_HOLD_S, 2.0 * bound.hold_s) if bound.trying else bound.hold_s
    return BatchBound(kept, _sequences_in(kept, limits), now_s, hold_s)


def loosen(bound: BatchBound, limits: BatchLimits, now_s: float) -> BatchBound:
    """Return the bound as it is now: after each `hold_s` twice as many rows. One that is none has forgotten its past
    when it has stood for as long again."""
    if now_s - bound.since_s < bound.hold_s:
        return bound
    if bound.rows >= limits.rows and bound.sequences >= limits.sequences:
        return lift_bound(limits) if bound.trying else bound
    rows = min(limits.rows, 2 * bound.rows)
    return replace(bound, rows=rows, sequences=_sequences_in(rows, limits), since_s=now_s, trying=True)


def _sequences_in(rows: int, limits: BatchLimits) -> int:
    return max(1, min(limits.sequences, rows // limits.least_rows))

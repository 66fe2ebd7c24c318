"""Whether a round keeps the number of rows of the one before it, where a runtime prepares its buffers anew for others.

To keep them may mean to leave out drafts that are worth a row, or to fill up with tokens that are worth none. Either
way something is given up in each round, while a change is paid once. What will be drafted next is not known, so it is
decided as in the ski rental problem (Karlin et al., "Competitive snoopy caching", 1988): rows change when what was
given up since the last change has come to what a change takes. That is at most twice what the best choice with
hindsight would have lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_NEWEST = 0.05


class SameRows(NamedTuple):
    """`last`: rows of the last forward, 0 where there was none. `change_ms`: what a forward of another number of rows
    takes longer, as measured (it may seem to take less). `given_up`: tokens, since the last change."""

    last: int = 0
    change_ms: float = 0.0
    given_up: float = 0.0


class Kept(NamedTuple):
    """Take the best `taken` offers, and fill up with `filling` tokens that nobody offered."""

    taken: int
    filling: int
    given_up: float


def kept(
    state: SameRows, before: int, offers: Sequence[float], added_ms: Sequence[float], value: float, best: int
) -> Kept:
    """Return what to take where `best` offers are best if every number of rows cost the same. `before`: rows without
    any; the rest as in policies.goodput.worth_taking."""
    target = state.last - before
    if target == best or state.change_ms <= 0.0:
        return Kept(best, 0, state.given_up)
    if not 0 <= target <= len(added_ms):
        return Kept(best, 0, 0.0)
    taken = min(target, len(offers))
    lost = sum(offers[taken:best]) - sum(offers[best:taken])
    lost += value * (sum(added_ms[best:target]) - sum(added_ms[target:best]))
    given_up = state.given_up + max(0.0, lost)
    if given_up >= value * state.change_ms:
        return Kept(best, 0, 0.0)
    return Kept(taken, target - taken, given_up)


def observed(state: SameRows, rows: int, given_up: float, over_ms: float | None) -> SameRows:
    """Take in a forward of so many rows; `over_ms`: how much longer it took than one of the same rows again, None where
    that is not known."""
    change_ms = state.change_ms
    if over_ms is not None and rows != state.last:
        change_ms += _NEWEST * (over_ms - change_ms)
    return SameRows(rows, change_ms, given_up)

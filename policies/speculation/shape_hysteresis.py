"""Whether a round keeps the number of rows of the one before it, where a runtime prepares its buffers anew for others.

To keep them may mean to leave out drafts that are worth a row, or to fill up with tokens that are worth none. Either
way something is given up in each round, while a change is paid once. What will be drafted next is not known, so it is
decided as in the ski rental problem (Karlin et al., "Competitive snoopy caching", 1988). Rows change when the loss
given up since the last change has come to the cost of changing. That is at most twice what the best choice with
hindsight would have lost. Rows that are added for drafts are to be left out again, so changing to more takes two
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.running_mean import update_mean

# Weight of the newest round in what a change takes (ADR 0036): some 40. Not tuned.
_NEWEST = 0.05
# ADR 0037: a change to more rows is followed by one back. Keeping rows is worth 1.3 %, 8.3 % at most (ADR 0043).
_CHANGES_UP, _CHANGES_DOWN = 2.0, 1.0
# Of what is expected: a round in which something else ran teaches no more than that. ADR 0036.
_CLIP = 0.5


class ShapeHysteresis(NamedTuple):
    """`last`: rows of the last forward, `last_base` those of them without drafts; 0 where there was none or where it
    prefilled. `changed_ms`, `same_ms`: how much longer than expected forwards take behind one of another number of
    rows, and of the same. `regret`: tokens, since the last change."""

    last: int = 0
    changed_ms: float = 0.0
    same_ms: float = 0.0
    regret: float = 0.0
    last_base: int = 0

    @property
    def change_ms(self) -> float:
        """What a change takes; it may seem to take less than nothing."""
        return self.changed_ms - self.same_ms


class ShapeDecision(NamedTuple):
    """Take the best `taken` candidates, and fill up with `filling` tokens that nobody proposed."""

    taken: int
    filling: int
    regret: float


def decide_shape(
    state: ShapeHysteresis,
    before: int,
    candidates: Sequence[float],
    added_ms: Sequence[float],
    value: float,
    best: int,
) -> ShapeDecision:
    """Return what to take where `best` candidates are best if every number of rows cost the same. `before`: rows
    without any. The rest as in policies.speculation.allocation.worth_taking."""
    target, changes_up = state.last - before, _CHANGES_UP
    if target == best or state.change_ms <= 0.0:
        return ShapeDecision(best, 0, state.regret)
    if target < 0:  # rows change anyway, and what is added to them is still to be left out again
        target, changes_up, state = 0, _CHANGES_UP - 1.0, state._replace(regret=0.0)
    if target > len(added_ms):
        return ShapeDecision(best, 0, 0.0)
    taken = min(target, len(candidates))
    lost = sum(candidates[taken:best]) - sum(candidates[best:taken])
    lost += value * (sum(added_ms[best:target]) - sum(added_ms[target:best]))
    lost = max(0.0, lost)
    changes = changes_up if best > target else _CHANGES_DOWN
    if state.regret + lost >= value * changes * state.change_ms:
        return ShapeDecision(best, 0, 0.0)
    return ShapeDecision(taken, target - taken, state.regret + lost)


def more_ms(state: ShapeHysteresis, base: int, more: int) -> float:
    """Return what changes take in a forward of `base` rows and `more` for drafts, beyond what they take without any
    drafts, in this forward and in the one before."""
    changes = (base + more != state.last) - (base != state.last_base)
    return changes * max(0.0, state.change_ms) if state.last else 0.0


def observe_shape(
    state: ShapeHysteresis, base: int, rows: int, regret: float, over_ms: float, expected_ms: float
) -> ShapeHysteresis:
    """Take in a forward that only decoded: how many rows, `base` of them without drafts, and how much longer than
    `expected_ms` it took."""
    over_ms = min(max(over_ms, -_CLIP * expected_ms), _CLIP * expected_ms)
    changed_ms, same_ms = state.changed_ms, state.same_ms
    if rows == state.last:
        same_ms = update_mean(same_ms, over_ms, _NEWEST)
    else:
        changed_ms = update_mean(changed_ms, over_ms, _NEWEST)
    return ShapeHysteresis(rows, changed_ms, same_ms, regret, base)

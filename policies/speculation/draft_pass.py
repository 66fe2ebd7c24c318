"""Which sequences one pass of a shared draft model takes, of all that its targets want drafted.

A pass takes whatever is wanted when the model is free, and waits for nobody: rows of several targets share it. Texts
that are still to be read make a pass long. While an answer waits for sequences that are read, these go first, and the
others are read in one pass of `READ_EVERY`. What is drafted ahead joins such a pass only where it is likely to be of
use: a row more makes the pass longer for whoever waits.

A branch is drafted for one outcome of a verification. Its row makes a pass longer for all lines in it, so it is taken
from the chance on with which it brings more than they lose: the next tokens of lines are needed with their chances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.running_mean import update_mean

# ADR 0056: new texts do not hold up answers. Not tuned: readers wait for eight passes at most.
READ_EVERY = 8
# ADR 0056: what is drafted ahead joins an urgent pass only with such a chance of use. Not tuned.
LIKELY = 0.3
MOST_BRANCHES = 32
"""Of all sequences of a target, and in a pass. ADR 0076: a fixed number with a fixed least chance lost either way, so
the price decides and this only bounds. Those that no pass has room for have their turn in the next."""
# A branch that is less likely to be needed is not drafted, whatever it costs. ADR 0076: it takes time from nobody. As a
# bound for all, 0.04 left a fast drafter idle, and 0.005 made passes too long. ADR 0123: most outcomes that nobody
# foresaw were thought to have 0.002.
_LEAST_CHANCE = 0.003
# Until passes of several rows were seen. ADR 0090: a second row took 5 % of a step on one processor, 29 % on another.
_FIRST_ROW_SHARE = 0.1
# Tokens. ADR 0123: a round whose outcome has no branch waits for as long as three take at its pace.
_MISS_TOKENS = 3.0
# By so much of itself branches make a pass longer at most: who asks meanwhile waits for its end. ADR 0076. Not tuned.
_LONGER = 0.5
# Passes. ADR 0123: some ten rounds of a fast draft. Not tuned.
_RECENT = 128
# Weight of the newest pass in the mean time, and in how far passes are off it. Not tuned.
_NEWEST = 0.1


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A sequence that one token more is wanted of. `urgent`: an answer waits for it; else it is drafted ahead.
    `reading`: the model has not read all of its text yet. `chance`: that the token will be needed. `branch`: it is one
    of a sequence, and no sequence itself; its `chance` is its `value_branch`."""

    urgent: bool
    reading: bool
    chance: float = 1.0
    branch: bool = False


def choose_rows(rows: Sequence[WantedRow], unread_passes: int, row_share: float = 0.0) -> list[int]:
    """Return the numbers of the rows that the next pass takes, in order. `unread_passes`: how many passes left texts
    unread. `row_share`: see PassTimes."""
    lines, branches = _choose_lines(rows, unread_passes), _choose_branches(rows, unread_passes, row_share)
    return sorted([*lines, *branches[: count_branches(row_share)]])


def price_new_branch(rows: Sequence[WantedRow], unread_passes: int, row_share: float = 0.0) -> float:
    """Return the value (`value_branch`) from which on a branch that is not begun yet would be in the next pass, of
    which all the rest is wanted."""
    most, branches = count_branches(row_share), _choose_branches(rows, unread_passes, row_share)
    if len(branches) < most:
        return _price_branches(rows, unread_passes, row_share)
    return rows[branches[most - 1]].chance if most else math.inf


def _choose_lines(rows: Sequence[WantedRow], unread_passes: int) -> list[int]:
    urgent = _is_urgent(rows)
    reads = not urgent or unread_passes >= READ_EVERY - 1
    least = LIKELY if urgent else 0.0
    return [
        number
        for number, row in enumerate(rows)
        if not row.branch and (reads or not row.reading) and (row.urgent or row.reading or row.chance >= least)
    ]


def _choose_branches(rows: Sequence[WantedRow], unread_passes: int, row_share: float) -> list[int]:
    """Return the branches that are worth their row, the likeliest first."""
    price = _price_branches(rows, unread_passes, row_share)
    branches = [number for number, row in enumerate(rows) if row.branch and row.chance >= price]
    return sorted(branches, key=lambda number: -rows[number].chance)


def _price_branches(rows: Sequence[WantedRow], unread_passes: int, row_share: float) -> float:
    needed = sum(rows[number].chance for number in _choose_lines(rows, unread_passes))
    return max(LIKELY if _is_urgent(rows) else 0.0, price_branch(row_share, needed))


def _is_urgent(rows: Sequence[WantedRow]) -> bool:
    return any(row.urgent and not row.reading for row in rows)


def count_branches(row_share: float) -> int:
    """Return how many branches a pass takes at most."""
    return min(MOST_BRANCHES, int(_LONGER / max(row_share, _LONGER / MOST_BRANCHES)))


def price_branch(row_share: float, needed: float) -> float:
    """Return the value from which on a branch is worth a row. It makes a pass longer by `row_share` of it, of whose
    tokens for lines so many are `needed`, as their chances say; where no line grows (0), it takes time from nobody."""
    return max(_LEAST_CHANCE, row_share * needed)


def value_branch(chance: float, *, grown: bool) -> float:
    """Return how many tokens one more of a branch is expected to bring, up to 1: its chance, or what a round without
    that branch loses where it has none yet."""
    return chance if grown else min(1.0, _MISS_TOKENS * chance)


@dataclass(slots=True)
class PassTimes:
    """How long passes take, by their rows between powers of two. `mean_s` and `safe_s` are of passes as the last one:
    who shares the model now will share the next pass."""

    mean_s: float = 0.0
    safe_s: float = 0.0
    _rows: dict[int, float] = field(default_factory=dict)
    _means_s: dict[int, float] = field(default_factory=dict)
    _off_s: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    _passes: int = 0

    def observe(self, rows: int, took_s: float) -> None:
        """Take in a pass. One is safe to take no longer than its kind's mean and as much as these are off it."""
        kind = rows.bit_length()
        self._passes += 1
        self._seen[kind] = self._passes
        mean_s, off_s = self._means_s.get(kind, took_s), self._off_s.get(kind, 0.0)
        self._off_s[kind] = update_mean(off_s, abs(took_s - mean_s), _NEWEST)
        self._rows[kind] = update_mean(self._rows.get(kind, float(rows)), rows, _NEWEST)
        self.mean_s = self._means_s[kind] = update_mean(mean_s, took_s, _NEWEST)
        self.safe_s = self.mean_s + self._off_s[kind]

    @property
    def row_share(self) -> float:
        """What a row more adds to a pass of the fewest rows, as a share of it, by the passes of the most. Those of long
        ago do not count: rows that once seemed dear, because something else ran, would never be tried again."""
        recent = [kind for kind, seen in self._seen.items() if self._passes - seen < _RECENT]
        if len(recent) < 2:
            return _FIRST_ROW_SHARE
        few, many = min(recent), max(recent)
        added_s = (self._means_s[many] - self._means_s[few]) / (self._rows[many] - self._rows[few])
        return max(0.0, added_s / self._means_s[few])

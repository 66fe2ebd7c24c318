"""Which sequences one pass of a shared draft model takes, of all that its targets want drafted.

A pass takes whatever is wanted when the model is free, and waits for nobody: rows of several targets share it. Texts
that are still to be read make a pass long. While an answer waits for sequences that are read, these go first, and the
others are read in one pass of `READ_EVERY`. What is drafted ahead joins such a pass only where it is likely to be of
use: a row more makes the pass longer for whoever waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

READ_EVERY = 8
LIKELY = 0.3
_NEWEST = 0.1  # weight of the newest pass in the mean time, and in how far passes are off it


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A sequence that one token more is wanted of. `asked`: an answer waits for it; else it is drafted ahead.
    `reading`: the model has not read all of its text yet. `chance`: that the token will be needed."""

    asked: bool
    reading: bool
    chance: float = 1.0


def choose_rows(rows: Sequence[WantedRow], unread_passes: int) -> list[int]:
    """Return the numbers of the rows that the next pass takes. `unread_passes`: how many passes left texts unread."""
    urgent = any(row.asked and not row.reading for row in rows)
    reads = not urgent or unread_passes >= READ_EVERY - 1
    least = LIKELY if urgent else 0.0
    return [
        number
        for number, row in enumerate(rows)
        if (reads or not row.reading) and (row.asked or row.reading or row.chance >= least)
    ]


@dataclass(slots=True)
class PassTimes:
    """How long passes take, by their rows between powers of two. `mean_s` and `safe_s` are of passes as the last one:
    who shares the model now will share the next pass."""

    mean_s: float = 0.0
    safe_s: float = 0.0
    _means_s: dict[int, float] = field(default_factory=dict)
    _off_s: dict[int, float] = field(default_factory=dict)

    def observe(self, rows: int, took_s: float) -> None:
        """Take in a pass. One is safe to take no longer than its kind's mean and as much as these are off it."""
        kind = rows.bit_length()
        mean_s, off_s = self._means_s.get(kind, took_s), self._off_s.get(kind, 0.0)
        self._off_s[kind] = off_s + (abs(took_s - mean_s) - off_s) * _NEWEST
        self.mean_s = self._means_s[kind] = mean_s + (took_s - mean_s) * _NEWEST
        self.safe_s = self.mean_s + self._off_s[kind]

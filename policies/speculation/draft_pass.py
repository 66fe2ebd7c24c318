"""Which sequences one pass of a shared draft model takes, of all that its targets want drafted.

A pass takes whatever is wanted when the model is free, and waits for nobody: rows of several targets share it. Texts
that are still to be read make a pass long. While an answer waits for sequences that are read, these go first, and the
others are read in one pass of `READ_EVERY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

READ_EVERY = 8


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A sequence that one token more is wanted of. `asked`: an answer waits for it; else it is drafted ahead.
    `reading`: the model has not read all of its text yet."""

    asked: bool
    reading: bool


def choose_rows(rows: Sequence[WantedRow], unread_passes: int) -> list[int]:
    """Return the numbers of the rows that the next pass takes. `unread_passes`: how many passes left texts unread."""
    urgent = any(row.asked and not row.reading for row in rows)
    reads = not urgent or unread_passes >= READ_EVERY - 1
    return [number for number, row in enumerate(rows) if reads or not row.reading]

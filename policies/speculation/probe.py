"""Looks again, now and then, at drafters and drafts that are left alone since they do not pay: they may have changed.

Where a look costs little, it is taken in one of so many rounds. Where it costs much, a budget is saved for it
(policies.speculation.gate for drafts on the target's time, policies.speculation.switching for the others).
"""

from __future__ import annotations

from typing import NamedTuple


class Probe(NamedTuple):
    """Looks once in every `interval` of rounds, or of other chances that are counted."""

    interval: int

    def is_due(self, count: int) -> bool:
        """Return whether to look at the chance of this number."""
        return count % self.interval == 0

    def count_left(self, count: int) -> int:
        """Return how many chances there are from this one to the next look; 0 where it is due."""
        return -count % self.interval

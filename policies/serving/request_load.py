"""How many requests a target has at once, by the rounds that it computes.

The mean is weighted by time: sequences of a round count for as long as the round took. Its weights fall with the time
of rounds that came since, as exp(-t / WINDOW_MS), and it begins as a plain mean. Pauses without rounds do not count, so
it says what the target is asked when it is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# ADR 0112. Not tuned.
WINDOW_MS = 30_000.0
KNOWN_AFTER_MS = 5_000.0
"""Time of rounds after which a mean says something. ADR 0112. Not tuned."""
# ADR 0112. Not tuned.
_DIFFERS = 2.0


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """The mean of the sequences of rounds, and the time of the rounds behind it."""

    sequences: float = 0.0
    rounds_ms: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.rounds_ms >= KNOWN_AFTER_MS


def observe_load(load: RequestLoad, sequences: int, round_ms: float) -> RequestLoad:
    """Take in a round. One that took no time says nothing."""
    if round_ms <= 0.0:
        return load
    rounds_ms = load.rounds_ms + round_ms
    weight = max(round_ms / rounds_ms, -math.expm1(-round_ms / WINDOW_MS))
    return RequestLoad(load.sequences + weight * (sequences - load.sequences), rounds_ms)


def has_changed(planned: int, requests: int) -> bool:
    """Return whether a plan for so many requests at once is to be made anew for others: twice as many, or half."""
    return requests >= _DIFFERS * planned or _DIFFERS * requests <= planned

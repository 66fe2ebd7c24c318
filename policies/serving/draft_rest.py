"""When a draft worker that helps none of its replicas is let rest, so that its device and memory are free.

A replica's worker measures what its drafts bring, and leaves alone those that bring less than they take. The draft
worker keeps its place all the time for that. So it rests once no replica that decodes with it was helped for
REST_AFTER_S: each left it alone, or accepted none of its tokens. It is tried again after REST_S, as texts and loads
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

REST_AFTER_S = 30.0
"""So long nobody was helped before a draft worker rests. ADR 0121: the device is to be free within 60 s. Half of
that is left for replicas to find out that drafts do not pay. Not tuned."""
REST_S = 600.0
"""So long it rests before it is tried again. ADR 0121: a load and 30 s of trial are then a tenth of it at most."""
# Of replicas that decoded meanwhile: without rounds nothing is known. ADR 0121. Not tuned.
_ENOUGH_ROUNDS = 50
# Of which none brought a token. ADR 0121. Not tuned.
_ENOUGH_ASKS = 20


@dataclass(frozen=True, slots=True)
class DraftUse:
    """What a replica says of a draft so far. `left_alone`: why it leaves it alone, "" where it does not. It `asks` it
    so often, `accepted` so many of its tokens, and ran so many `rounds`."""

    left_alone: str = ""
    asks: int = 0
    accepted: int = 0
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class RestTrend:
    """Since when nobody was helped (None: nobody says anything), and the counts of all replicas then. `left_alone`:
    all of them leave it alone since then."""

    since_s: float | None = None
    left_alone: bool = False
    asks: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def due_s(self) -> float:
        """When its worker may rest: from then on each round is a reason to look."""
        return inf if self.since_s is None else self.since_s + REST_AFTER_S


@dataclass(frozen=True, slots=True)
class RestChange:
    """What follows from a look. `why`: the worker is to rest, for this ("": it is not)."""

    trend: RestTrend
    why: str = ""


def follow_use(trend: RestTrend, uses: Sequence[DraftUse], now_s: float) -> RestChange:
    """Return what follows from what the replicas say that a draft worker drafts for. Those that neither asked it nor
    leave it alone say nothing: they had no requests that may be drafted for."""
    known = [use for use in uses if use.asks or use.left_alone]
    if not known:
        return RestChange(RestTrend())
    now = RestTrend(
        now_s,
        all(use.left_alone for use in known),
        sum(use.asks for use in known),
        sum(use.accepted for use in known),
        sum(use.rounds for use in known),
    )
    counts_anew = now.rounds < trend.rounds or now.accepted < trend.accepted or now.asks < trend.asks
    helped = now.accepted > trend.accepted and not now.left_alone
    if trend.since_s is None or counts_anew or helped or now.left_alone is not trend.left_alone:
        return RestChange(now)
    enough = now.rounds - trend.rounds >= _ENOUGH_ROUNDS
    if not now.left_alone:
        enough = now.asks - trend.asks >= _ENOUGH_ASKS
    if now_s < trend.due_s or not enough:
        return RestChange(trend)
    why = known[0].left_alone or "none of its tokens was accepted"
    return RestChange(RestTrend(), f"it helped no replica for {REST_AFTER_S:g} s: {why}")

"""How many replicas of the target there are, by load alone, within bounds.

One more starts where all that there are have been crowded for some seconds: nearly every place is taken, or requests
miss an objective because they wait. One ends where, for `idle_s` on end, those that are left would have carried the
load with half of their places, and with half of what was too much for so many before. So no steady load asks for both.
Where more cannot be had, that is asked for again ever later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

# For how long all replicas, or a draft worker, are crowded before there is one more (ADR 0062, 0056). Not tuned.
ADD_AFTER_S = 3.0
CROWDED = 0.9
"""The share of all places from which replicas are crowded. ADR 0062: not all of them, as a start takes seconds and the
request that would wait comes meanwhile."""
SPARE = 0.5
"""The share of their places that the replicas that are left may be taken by, where one ends. ADR 0062: nine tenths and
half cannot both be so for one load (a property test)."""
# ADR 0062: 5 s, 10 s and so on, as each try is a start.
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 600.0
"""Before one more is asked for again that could not be had: each time twice as long, up to this. ADR 0062."""


@dataclass(frozen=True, slots=True)
class ScaleBounds:
    """`least` replicas are always there, `most` while they are needed. Those beyond `least` end once they were not
    needed for `idle_s`."""

    least: int
    most: int
    # ADR 0062: a start costs a load, so a replica is kept for some times as long.
    idle_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ScaledReplica:
    """One replica. `gone`: it does not serve, and cannot be expected to soon. It has `streams`, running or waiting, and
    decodes `places` of them at a time."""

    name: str
    serving: bool = True
    gone: bool = False
    streams: int = 0
    places: int = 1


@dataclass(frozen=True, slots=True)
class ScaleLoad:
    """All replicas, the newest last. No replica has `held` requests. `late`: which objective is missed because
    requests wait ("": none). There are places for `room` replicas, and `no_room` says why for no more."""

    replicas: tuple[ScaledReplica, ...]
    held: int = 0
    late: str = ""
    room: int = 1 << 16
    no_room: str = ""

    @property
    def present(self) -> tuple[ScaledReplica, ...]:
        return tuple(replica for replica in self.replicas if not replica.gone)

    @property
    def requests(self) -> int:
        """How many run or wait."""
        return self.held + sum(replica.streams for replica in self.replicas)

    @property
    def places(self) -> int:
        """How many run at a time."""
        return sum(replica.places for replica in self.present)


@dataclass(frozen=True, slots=True)
class ScaleTrend:
    """Since when replicas are crowded, and since when there is one more than is needed; None: it is not so. One more
    could not be had `failures` times on end, and is not asked for before `again_s`. `too_many`: the requests that one
    more was asked for, by how many replicas there were."""

    crowded_since_s: float | None = None
    spare_since_s: float | None = None
    failures: int = 0
    again_s: float = 0.0
    too_many: Mapping[int, int] = field(default_factory=dict)

    def observe_failure(self, now_s: float) -> ScaleTrend:
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.failures, 16))
        return replace(self, failures=self.failures + 1, again_s=now_s + pause_s)

    def forget_failures(self) -> ScaleTrend:
        """What stood in the way may have changed."""
        return replace(self, failures=0, again_s=0.0)


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """What follows from a look: `more` is 1, 0 or -1 replicas, and load asks for `wanted` of them. `why` is a line."""

    trend: ScaleTrend
    more: int
    wanted: int
    why: str


def follow_load(trend: ScaleTrend, bounds: ScaleBounds, load: ScaleLoad, now_s: float) -> ScaleChange:
    """Look at the replicas. Whoever starts or ends one looks again when that is done."""
    count = len(load.present)
    if count < bounds.least:
        return _ask_for_more(trend, load, now_s, f"{count} of at least {bounds.least}")
    if count > bounds.most:
        return ScaleChange(_rest(trend), -1, bounds.most, f"{count} of at most {bounds.most}")
    settled = all(replica.serving for replica in load.present)
    crowded = _find_crowd(load)
    spare = settled and not crowded and not load.late and count > bounds.least and _is_spare(trend, load)
    trend = replace(
        trend,
        crowded_since_s=note_since(trend.crowded_since_s, now_s, holds=settled and bool(crowded)),
        spare_since_s=note_since(trend.spare_since_s, now_s, holds=spare),
    )
    if trend.crowded_since_s is not None and count < bounds.most:
        since_s = now_s - trend.crowded_since_s
        if since_s < ADD_AFTER_S:
            return ScaleChange(trend, 0, count, f"{crowded} since {since_s:.0f} s")
        trend = replace(trend, too_many={**trend.too_many, count: load.requests})
        return _ask_for_more(trend, load, now_s, f"{crowded} for {since_s:.0f} s")
    if trend.spare_since_s is not None:
        since_s = now_s - trend.spare_since_s
        carried = f"{describe_load(load)}: one less would carry them"
        if since_s < bounds.idle_s:
            return ScaleChange(trend, 0, count, f"{carried}, since {since_s:.0f} of {bounds.idle_s:g} s")
        return ScaleChange(_rest(trend), -1, count - 1, f"{carried}, for {since_s:.0f} s")
    if crowded:
        return ScaleChange(trend, 0, count, f"{crowded}" + (", and there may be no more" if settled else ""))
    return ScaleChange(trend, 0, count, describe_load(load))


def choose_leaver(replicas: Sequence[ScaledReplica]) -> str:
    """Return the name of the replica that is to end: one that is gone, else the newest. Its streams move either way."""
    gone = [replica for replica in replicas if replica.gone]
    return (gone or list(replicas))[-1].name


def describe_load(load: ScaleLoad) -> str:
    """Return it in a line: "3 requests for 4 places"."""
    return f"{load.requests} request{'s' * (load.requests != 1)} for {load.places} place{'s' * (load.places != 1)}"


def _ask_for_more(trend: ScaleTrend, load: ScaleLoad, now_s: float, why: str) -> ScaleChange:
    count = len(load.present)
    wanted = count + 1
    if count >= load.room:
        return ScaleChange(trend, 0, wanted, f"{why}; there is no place for one more: {load.no_room}")
    if now_s < trend.again_s:
        left_s = trend.again_s - now_s
        return ScaleChange(trend, 0, wanted, f"{why}; one more could not be had, tried again in {left_s:.0f} s")
    return ScaleChange(_rest(trend), 1, wanted, why)


def _find_crowd(load: ScaleLoad) -> str:
    """Return why one more replica would be of use; "" where it would not. One stream alone runs on one replica."""
    if load.requests >= CROWDED * load.places and load.requests:
        return describe_load(load)
    if load.late and load.requests > len(load.present):
        return f"{describe_load(load)}, and {load.late}"
    return ""


def _is_spare(trend: ScaleTrend, load: ScaleLoad) -> bool:
    """Return whether one replica less carries the load with margin, whichever one goes."""
    left = load.places - max(replica.places for replica in load.present)
    return load.requests <= SPARE * min(left, trend.too_many.get(len(load.present) - 1, left))


def _rest(trend: ScaleTrend) -> ScaleTrend:
    """Return the trend after a step: what was so before it says nothing any more."""
    return replace(trend, crowded_since_s=None, spare_since_s=None)


def note_since(since_s: float | None, now_s: float, *, holds: bool) -> float | None:
    """Return since when something holds, noted so far as `since_s`; None where it does not hold."""
    if not holds:
        return None
    return now_s if since_s is None else since_s

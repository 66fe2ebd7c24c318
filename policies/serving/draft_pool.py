"""How many workers of one draft there are. Which replica has which of them is in policies.serving.draft_sharing.

A draft worker serves several replicas, whose rows share its passes. One more is worth its place only where that costs
them drafts: answers are cut short while passes are shared, and passes take longer for being shared. What is crowded for
a moment adds nobody, and what is spare for a moment ends nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.serving.scaling import ADD_AFTER_S, note_since

# Of a worker's answers that were cut short in company. ADR 0056. Not tuned: both conditions have to hold, and the
# slowdown decides.
_CROWDED = 0.25
# From which company costs enough for another worker to help. ADR 0056: bound by weights, two targets get what one got,
# each; measured pairs had 1.5 to 1.9 of one's drafts.
_SLOWDOWN = 1.2
# What those that are left may be busy with: far from crowded. ADR 0056. Below the share at which one is crowded, so
# that no load asks for one more and for one less.
_SPARE_BUSY = 0.5


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`least` workers are always there, `most` while they are needed. Those beyond `least` are ended once they were not
    needed for `idle_s`."""

    least: int
    most: int
    # ADR 0056. Not tuned.
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """One worker: where it is ("": not known), whether it drafts, and what it told of its load last (`busy`, `crowded`,
    `slowdown`: see DraftLoad). `targets` are connected."""

    number: int
    host: str = ""
    serving: bool = True
    targets: int = 0
    busy: float = 0.0
    crowded: float = 0.0
    slowdown: float = 0.0

    @property
    def is_crowded(self) -> bool:
        """True where another worker would give its replicas longer drafts."""
        slowed = not self.slowdown or self.slowdown >= _SLOWDOWN
        return self.serving and self.targets > 1 and self.crowded >= _CROWDED and slowed


@dataclass(frozen=True, slots=True)
class PoolTrend:
    """Since when a worker is crowded, and since when there is one more than is needed; None: it is not so."""

    crowded_since_s: float | None = None
    spare_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What follows from a look at a pool: `more` is 1, 0 or -1 workers. `look_s`: when to look again at the latest."""

    trend: PoolTrend
    more: int = 0
    look_s: float | None = None


def follow_pool(
    trend: PoolTrend, size: PoolSize, workers: Sequence[PoolWorker], replicas: int, now_s: float
) -> PoolChange:
    least, most = size.least, max(size.least, min(size.most, replicas))
    count = len(workers)
    if count < least:
        return PoolChange(PoolTrend(), 1)
    all_serve = all(worker.serving for worker in workers)
    crowded = all_serve and count < most and any(worker.is_crowded for worker in workers)
    busy = sum(worker.busy for worker in workers if worker.serving)
    spare = count > least and not any(worker.is_crowded for worker in workers)
    spare = spare and (count > most or busy <= _SPARE_BUSY * (count - 1))
    trend = PoolTrend(
        note_since(trend.crowded_since_s, now_s, holds=crowded), note_since(trend.spare_since_s, now_s, holds=spare)
    )
    if trend.crowded_since_s is not None:
        left_s = trend.crowded_since_s + ADD_AFTER_S - now_s
        return PoolChange(trend, look_s=left_s) if left_s > 0.0 else PoolChange(PoolTrend(), 1)
    if trend.spare_since_s is not None:
        left_s = trend.spare_since_s + size.idle_s - now_s
        return PoolChange(trend, look_s=left_s) if left_s > 0.0 else PoolChange(PoolTrend(), -1)
    return PoolChange(trend)


def choose_leaver(workers: Sequence[PoolWorker], assigned: Mapping[str, int]) -> int:
    """Return the number of the worker that is to go: one that does not draft, else the one with the fewest replicas,
    the newest of equals."""
    counts = Counter(assigned.values())
    return min(workers, key=lambda worker: (worker.serving, counts[worker.number], -worker.number)).number

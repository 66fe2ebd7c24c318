"""Which members of a pool work, where each one that works slows the others down.

Whoever chooses for one request sends it where it ends first, and does not see what it costs others. So members that
share memory or cores can make less together than some of them alone. The sets of them are few where members are: of
each it is predicted how requests share themselves over it, each going where it ends first (policies/planning/pool.py),
and how many tokens that makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from device_profiles.units import MS_PER_S

MOST_MEMBERS: Final = 4
"""So many have 15 sets. Bounds time."""
# What fewer members have to make more than all. ADR 0144: with 1.05 a pool made 0.92 of its best member. Not tuned.
_WORTH: Final = 1.02


@dataclass(frozen=True, slots=True)
class Member:
    """A replica: `tpots_ms[n - 1]` is what a token takes each of n sequences while nobody else works, for each n up to
    its places; beside others it takes `company` times as long."""

    name: str
    tpots_ms: Sequence[float]
    company: float


def predict_tokens_per_s(members: Sequence[Member], requests: int) -> float:
    """Return what these make together of so many requests at once, which share themselves over them."""
    shares = [0] * len(members)
    for _ in range(requests):
        ends_ms = [_find_end_ms(member, share + 1) for member, share in zip(members, shares, strict=True)]
        shares[ends_ms.index(min(ends_ms))] += 1
    together = sum(share > 0 for share in shares) > 1
    rate = 0.0
    for member, share in zip(members, shares, strict=True):
        running = min(share, len(member.tpots_ms))
        if running:
            rate += running / (member.tpots_ms[running - 1] * (member.company if together else 1.0))
    return MS_PER_S * rate


def _find_end_ms(member: Member, requests: int) -> float:
    """Return what a token of a request takes there, its waiting for a place shared out over its tokens."""
    places = len(member.tpots_ms)
    return member.tpots_ms[min(requests, places) - 1] * member.company * max(1.0, requests / places)


def choose_working(members: Sequence[Member], requests: int) -> tuple[frozenset[str], float, float]:
    """Return the names of those that are to work, what they make, and what all make, in tokens/s. All work unless fewer
    make clearly more."""
    everyone = frozenset(member.name for member in members)
    whole = predict_tokens_per_s(members, requests)
    if all(member.company <= 1.0 for member in members):
        return everyone, whole, whole
    best = max(_list_sets(members), key=lambda some: predict_tokens_per_s(some, requests), default=tuple(members))
    made = predict_tokens_per_s(best, requests)
    if made <= _WORTH * whole:
        return everyone, whole, whole
    return frozenset(member.name for member in best), made, whole


def _list_sets(members: Sequence[Member]) -> Iterator[tuple[Member, ...]]:
    for size in range(len(members) - 1, 0, -1):
        yield from combinations(members, size)

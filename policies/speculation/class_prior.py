"""What is usual for a class of requests, so that a short request does not start cold.

A class is what requests have in common that is known before their first draft: route, user tag and drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

_Kept = TypeVar("_Kept")

COLD_DEPTH = 2.0
"""Where nothing is known of a class, its requests begin here: deep enough to learn, and cheap where it goes wrong."""
FULL_EVIDENCE = 64.0
"""A request with so many judged draft tokens counts in full."""
MOST_CLASSES = 128
_WEIGHT = 0.3  # of the newest request with full evidence


class ClassKey(NamedTuple):
    """`user`: the request's user tag ("": none). `drafter`: whose drafts it gets."""

    route: str = ""
    user: str = ""
    drafter: str = ""


NO_CLASS = ClassKey()


class Seed(NamedTuple):
    """Running means over a class's requests: depth, and the log of the factor on the odds
    (policies.speculation.odds)."""

    depth: float = COLD_DEPTH
    log_factor: float = 0.0


COLD = Seed()


class Course(NamedTuple):
    """How one request has gone so far. `evidence`: its judged draft tokens."""

    depth: float
    log_factor: float
    evidence: float


def ended(seed: Seed, course: Course) -> Seed:
    """Return what is usual after one more request."""
    weight = _WEIGHT * min(1.0, course.evidence / FULL_EVIDENCE)
    return Seed(
        seed.depth + weight * (course.depth - seed.depth),
        seed.log_factor + weight * (course.log_factor - seed.log_factor),
    )


def remembered(known: Mapping[ClassKey, _Kept], of: ClassKey, value: _Kept) -> dict[ClassKey, _Kept]:
    """Return what is known of classes with one of them as it is now: user tags are the clients' to choose, so those
    that were not heard of for longest are forgotten."""
    kept = {other: found for other, found in known.items() if other != of}
    for oldest in list(kept)[: len(kept) + 1 - MOST_CLASSES]:
        del kept[oldest]
    kept[of] = value
    return kept


def with_running(seed: Seed, courses: Iterable[Course]) -> Seed:
    """Return what is usual where requests of the class are still running: they count as if they ended now."""
    for course in courses:
        seed = ended(seed, course)
    return seed

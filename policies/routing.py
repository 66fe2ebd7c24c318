"""Which replica of the target decodes a request.

Every term is a cost in batches: 1 is what it costs to wait behind as many requests as a replica runs at a time. A
request goes to the replica with the lowest sum; where sums are equal, to the one with the fewest requests, then to the
one whose name is first. Nothing here depends on the order in which replicas are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOWER_COUNTS_FROM = 1.25
"""A replica is slow where its TPOT is so many times the fastest one's; less is noise."""

_MOST_SLOWNESS = 4.0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica as it is now. `out` says why it takes nothing ("" where it does).

    `slots`: sequences that it decodes at a time. `live`: requests that it has and that have not ended, waiting ones
    included. `kv_usage`: share of its KV blocks in use, 0 to 1. `cached_tokens`: how much of this prompt's beginning it
    computed lately. `tpot_ms`: time per output token of a sequence, predicted or measured; 0 where it is not known.
    """

    name: str
    out: str = ""
    slots: int = 1
    live: int = 0
    kv_usage: float = 0.0
    cached_tokens: int = 0
    tpot_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RoutingWeights:
    """What each term counts. `prefix` 1: a prompt that is cached whole is worth a wait behind one full batch."""

    queue: float = 1.0
    kv: float = 0.5
    prefix: float = 1.0
    speed: float = 0.5


@dataclass(frozen=True, slots=True)
class Terms:
    """The cost of one replica, in batches; `prefix` is what a cached beginning takes off."""

    queue: float
    kv: float
    prefix: float
    speed: float

    @property
    def cost(self) -> float:
        """The sum: lower is better."""
        return self.queue + self.kv - self.prefix + self.speed


@dataclass(frozen=True, slots=True)
class Route:
    """The chosen replica, the terms of all that could have been, and why the others could not; both by name."""

    name: str
    terms: dict[str, Terms]
    rejected: dict[str, str]


def route(prompt_tokens: int, replicas: Sequence[ReplicaLoad], weights: RoutingWeights | None = None) -> Route | None:
    """Return where a request of so many prompt tokens goes; None where no replica takes any."""
    weighed = weights or RoutingWeights()
    usable = [replica for replica in replicas if not replica.out]
    if not usable:
        return None
    fastest_ms = min((replica.tpot_ms for replica in usable if replica.tpot_ms > 0.0), default=0.0)
    terms = {replica.name: _terms(replica, prompt_tokens, fastest_ms, weighed) for replica in usable}
    chosen = min(usable, key=lambda replica: (terms[replica.name].cost, replica.live, replica.name))
    return Route(chosen.name, terms, {replica.name: replica.out for replica in replicas if replica.out})


def _terms(replica: ReplicaLoad, prompt_tokens: int, fastest_ms: float, weights: RoutingWeights) -> Terms:
    return Terms(
        queue=weights.queue * replica.live / max(1, replica.slots),
        kv=weights.kv * replica.kv_usage,
        prefix=weights.prefix * min(1.0, replica.cached_tokens / max(1, prompt_tokens)),
        speed=weights.speed * _slowness(replica.tpot_ms, fastest_ms),
    )


def _slowness(tpot_ms: float, fastest_ms: float) -> float:
    """Return how much slower than the fastest replica it is, in times of it; 0 where nothing is known."""
    if tpot_ms <= 0.0 or fastest_ms <= 0.0 or tpot_ms < SLOWER_COUNTS_FROM * fastest_ms:
        return 0.0
    return min(_MOST_SLOWNESS, tpot_ms / fastest_ms - 1.0)

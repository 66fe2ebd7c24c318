"""Which target replica serves a request: the one that is predicted to finish it first.

What a request costs on a replica, in ms:

    queue            until a place is free: (waiting + 1) times a request's time, over the places
    kv_pressure      the risk to be put aside for others: a request's time, times how far the KV cache is filled beyond
                     FULL with this request in it (1 where it is full)
    health           the risk to begin again elsewhere: a share of a request's time, for a replica that is suspect
    prefix_affinity  the prefill of those prompt tokens that are not in its cache
    tpot             output tokens times the predicted time per output token

Their sum is the price; the lowest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FULL = 0.8
"""A KV cache filled less than this has room for what its sequences will still say."""
SUSPECT_RISK = 0.5
"""The chance that a suspect replica is lost before it has finished a request: half of that was for nothing then, and
the request waits for its next replica as long again."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica now. `running` and `waiting` requests, `places` that run at once. `kv_tokens` that its cache holds,
    `kv_free_tokens` of them free (what a cached prefix takes counts as free). `cached_prompt_tokens`: of this request's
    prompt. `tpot_ms`: predicted, with this request in it; `prefill_ms_per_token`: measured. `risk`: why it may
    be lost ("": it is healthy). `serving` is False while it
    drains, loads, or is lost, and `why_not` says which."""

    name: str
    running: int
    waiting: int
    places: int
    kv_tokens: int
    kv_free_tokens: int
    cached_prompt_tokens: int
    tpot_ms: float
    prefill_ms_per_token: float
    risk: str = ""
    serving: bool = True
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What is to be served: tokens of the prompt, and tokens expected (at most) of the output."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingTerm:
    """One term: its cost in ms, and the figures behind it."""

    name: str
    cost_ms: float
    why: str


@dataclass(frozen=True, slots=True)
class RatedReplica:
    """A replica with its price, and why it was not taken ("" for the one that was)."""

    name: str
    price_ms: float
    terms: tuple[RoutingTerm, ...]
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """The choice. `replica` is None where none serves. `rated` has all of them, the cheapest first."""

    replica: str | None
    rated: tuple[RatedReplica, ...]
    reason: str


def route(replicas: Sequence[ReplicaState], request: RoutedRequest) -> Route:
    """Choose a replica; among equals the least loaded one, then the first by name. The order given does not matter."""
    serving = [one for one in replicas if one.serving]
    unfit = tuple(
        RatedReplica(one.name, float("inf"), (), one.why_not or "not serving")
        for one in sorted(replicas, key=lambda one: one.name)
        if not one.serving
    )
    if not serving:
        return Route(None, unfit, "no replica serves: " + "; ".join(f"{one.name}: {one.why_not}" for one in unfit))
    load = {one.name: one.running + one.waiting for one in serving}
    rated = sorted(
        (_rate_replica(one, request) for one in serving),
        key=lambda one: (one.price_ms, load[one.name], one.name),
    )
    best = rated[0]
    others = tuple(_why_not(one, best) for one in rated[1:])
    told = ", ".join(f"{term.name} {term.cost_ms:.0f} ms ({term.why})" for term in best.terms)
    return Route(best.name, (best, *others, *unfit), f"predicted to take {best.price_ms:.0f} ms: {told}")


def _rate_replica(replica: ReplicaState, request: RoutedRequest) -> RatedReplica:
    decode = max(1, request.output_tokens) * replica.tpot_ms
    cached = min(replica.cached_prompt_tokens, request.prompt_tokens)
    prefill = (request.prompt_tokens - cached) * replica.prefill_ms_per_token
    service = decode + prefill
    busy = replica.waiting > 0 or replica.running >= replica.places
    queue = (replica.waiting + 1) * service / max(1, replica.places) if busy else 0.0
    needed = request.prompt_tokens + request.output_tokens - cached
    taken = replica.kv_tokens - replica.kv_free_tokens + needed
    filled = taken / replica.kv_tokens if replica.kv_tokens else 0.0
    pressure = service * max(0.0, filled - FULL) / (1.0 - FULL)
    terms = (
        RoutingTerm("queue", queue, f"{replica.waiting} wait, {replica.running} of {replica.places} places"),
        RoutingTerm("kv_pressure", pressure, f"KV cache {filled:.0%} full with it"),
        RoutingTerm("health", SUSPECT_RISK * service if replica.risk else 0.0, replica.risk or "healthy"),
        RoutingTerm("prefix_affinity", prefill, f"{cached} of {request.prompt_tokens} tokens cached"),
        RoutingTerm("tpot", decode, f"{replica.tpot_ms:.1f} ms a token"),
    )
    return RatedReplica(replica.name, sum(term.cost_ms for term in terms), terms)


def _why_not(other: RatedReplica, best: RatedReplica) -> RatedReplica:
    more = {term.name: term.cost_ms - known.cost_ms for term, known in zip(other.terms, best.terms, strict=True)}
    name = max(more, key=lambda key: more[key])
    why = next(term.why for term in other.terms if term.name == name)
    if other.price_ms == best.price_ms:
        return RatedReplica(other.name, other.price_ms, other.terms, "equal, but more loaded or later by name")
    return RatedReplica(
        other.name,
        other.price_ms,
        other.terms,
        f"{other.price_ms - best.price_ms:.0f} ms later, most of it {name}: {why}",
    )

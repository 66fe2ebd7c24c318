"""Which pair of a target replica and its draft serves a request: the one that is predicted to finish it first.

What a request costs on a pair, in ms:

    queue            until a place is free: (waiting + 1) times a request's time, over the places
    kv_pressure      the risk to be put aside for others: a request's time, times how far the KV cache is filled beyond
                     FULL with this request in it (1 where it is full)
    memory           the risk that its device runs out of memory: a share of a request's time
    load             what other programs on its device make a request's time longer, and its heat
    health           the risk to begin again elsewhere: a share of a request's time, for a replica that is suspect
    deadline         LATE times as long as its first token is predicted to come behind the objective, and its last one
                     behind the request's time
    prefix_affinity  the prefill of those prompt tokens that are not in its cache
    tpot             output tokens times the predicted time per output token without drafts
    draft            what the draft saves of that: below 0

Their sum, each with its weight, is the price; the lowest is taken. So a long answer goes where drafts are fast, and a
short one where it begins soonest. How many draft tokens a round has is the worker's own decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.serving.device_load import ALONE, Stretch, weigh_shortage

FULL = 0.8
"""A KV cache filled less than this has room for what its sequences will still say."""
SUSPECT_RISK = 0.5
"""The chance that a suspect replica is lost before it has finished a request: half of that was for nothing then, and
the request waits for its next replica as long again."""
LATE = 2.0
"""What a ms behind an objective costs, beside the ms itself."""


@dataclass(frozen=True, slots=True)
class RoutingWeights:
    """What each term weighs. 0 leaves one out."""

    queue: float = 1.0
    kv_pressure: float = 1.0
    memory: float = 1.0
    load: float = 1.0
    health: float = 1.0
    deadline: float = 1.0
    prefix_affinity: float = 1.0
    tpot: float = 1.0
    draft: float = 1.0


EVEN_WEIGHTS = RoutingWeights()


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica now. `running` and `waiting` requests, `places` that run at once. `kv_tokens` that its cache holds,
    `kv_free_tokens` of them free (what a cached prefix takes counts as free). `cached_prompt_tokens`: of this request's
    prompt. `tpot_ms`: predicted without drafts, with this request in it and the device to itself;
    `prefill_ms_per_token`: measured. `risk`: why it may be lost ("": it is healthy). `serving` is False while it
    drains, loads, or is lost, and `why_not` says which. `draft`: what proposes tokens there ("": nothing works), which
    saves `draft_saves_ms` of a token's time. `stretch`: what else its device does. `free_share`: of the device's
    memory."""

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
    draft: str = ""
    draft_saves_ms: float = 0.0
    stretch: Stretch = ALONE
    free_share: float = 1.0


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What is to be served: tokens of the prompt, and tokens expected (at most) of the output. `drafts`: it may be
    drafted for. Its first token is wanted within `first_in_ms`, its last within `ends_in_ms` (None: whenever)."""

    prompt_tokens: int
    output_tokens: int
    drafts: bool = True
    first_in_ms: float | None = None
    ends_in_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RoutingTerm:
    """One term: its cost in ms, and the figures behind it."""

    name: str
    cost_ms: float
    why: str


@dataclass(frozen=True, slots=True)
class RatedReplica:
    """A replica and its draft with their price, and why they were not taken ("" for those that were)."""

    name: str
    price_ms: float
    terms: tuple[RoutingTerm, ...]
    why_not: str = ""
    draft: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """The choice. `replica` is None where none serves. `rated` has all of them, the cheapest first. `request`: as it
    was rated."""

    replica: str | None
    rated: tuple[RatedReplica, ...]
    reason: str
    request: RoutedRequest

    def saves(self, replica: str) -> float:
        """Return the share of its price there that a request saves by the choice, against that replica."""
        there = next((one.price_ms for one in self.rated if one.name == replica), 0.0)
        return 1.0 - self.rated[0].price_ms / there if self.rated and there > 0.0 else 0.0


def route(replicas: Sequence[ReplicaState], request: RoutedRequest, weights: RoutingWeights = EVEN_WEIGHTS) -> Route:
    """Choose a replica; among equals the least loaded one, then the first by name. The order given does not matter."""
    serving = [one for one in replicas if one.serving]
    unfit = tuple(
        RatedReplica(one.name, float("inf"), (), one.why_not or "not serving", one.draft)
        for one in sorted(replicas, key=lambda one: one.name)
        if not one.serving
    )
    if not serving:
        reason = "no replica serves: " + "; ".join(f"{one.name}: {one.why_not}" for one in unfit)
        return Route(None, unfit, reason, request)
    load = {one.name: one.running + one.waiting for one in serving}
    rated = sorted(
        (_rate_replica(one, request, weights) for one in serving),
        key=lambda one: (one.price_ms, load[one.name], one.name),
    )
    best = rated[0]
    others = tuple(_why_not(one, best) for one in rated[1:])
    told = ", ".join(f"{term.name} {term.cost_ms:.0f} ms ({term.why})" for term in best.terms)
    return Route(best.name, (best, *others, *unfit), f"predicted to take {best.price_ms:.0f} ms: {told}", request)


def _rate_replica(replica: ReplicaState, request: RoutedRequest, weights: RoutingWeights) -> RatedReplica:
    plain = max(1, request.output_tokens) * replica.tpot_ms
    saved = max(1, request.output_tokens) * replica.draft_saves_ms if request.drafts and replica.draft else 0.0
    cached = min(replica.cached_prompt_tokens, request.prompt_tokens)
    prefill = (request.prompt_tokens - cached) * replica.prefill_ms_per_token
    alone, stretch = plain - saved + prefill, replica.stretch.factor
    service = alone * stretch
    busy = replica.waiting > 0 or replica.running >= replica.places
    queue = (replica.waiting + 1) * service / max(1, replica.places) if busy else 0.0
    late, when = _find_lateness(queue + prefill * stretch, queue + service, request)
    needed = request.prompt_tokens + request.output_tokens - cached
    taken = replica.kv_tokens - replica.kv_free_tokens + needed
    filled = taken / replica.kv_tokens if replica.kv_tokens else 0.0
    pressure = service * max(0.0, filled - FULL) / (1.0 - FULL)
    told = (
        ("queue", queue, f"{replica.waiting} wait, {replica.running} of {replica.places} places"),
        ("kv_pressure", pressure, f"KV cache {filled:.0%} full with it"),
        ("memory", service * weigh_shortage(replica.free_share), f"{replica.free_share:.0%} of its memory is free"),
        ("load", service - alone, replica.stretch.why or "the device is ours"),
        ("health", SUSPECT_RISK * service if replica.risk else 0.0, replica.risk or "healthy"),
        ("deadline", LATE * late, when),
        ("prefix_affinity", prefill, f"{cached} of {request.prompt_tokens} tokens cached"),
        ("tpot", plain, f"{replica.tpot_ms:.1f} ms a token without drafts"),
        ("draft", -saved, _describe_draft(replica, request)),
    )
    terms = tuple(RoutingTerm(name, float(getattr(weights, name)) * cost, why) for name, cost, why in told)
    return RatedReplica(replica.name, sum(term.cost_ms for term in terms), terms, draft=replica.draft)


def _find_lateness(first_ms: float, end_ms: float, request: RoutedRequest) -> tuple[float, str]:
    """Return how late a request is predicted to be, in ms, and with what."""
    late, told = 0.0, []
    for name, at_ms, bound_ms in (("first", first_ms, request.first_in_ms), ("last", end_ms, request.ends_in_ms)):
        if bound_ms is not None:
            late += max(0.0, at_ms - bound_ms)
            told.append(f"{name} token in {at_ms:.0f} of {bound_ms:.0f} ms")
    return late, ", ".join(told) or "it has none"


def _describe_draft(replica: ReplicaState, request: RoutedRequest) -> str:
    if not request.drafts:
        return "it asks for none"
    return f"{replica.draft} saves {replica.draft_saves_ms:.1f} ms a token" if replica.draft else "no draft works here"


def _why_not(other: RatedReplica, best: RatedReplica) -> RatedReplica:
    more = {term.name: term.cost_ms - known.cost_ms for term, known in zip(other.terms, best.terms, strict=True)}
    name = max(more, key=lambda key: more[key])
    why = next(term.why for term in other.terms if term.name == name)
    if other.price_ms == best.price_ms:
        return replace(other, why_not="equal, but more loaded or later by name")
    return replace(other, why_not=f"{other.price_ms - best.price_ms:.0f} ms later, most of it {name}: {why}")

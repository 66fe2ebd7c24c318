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

A choice needs the prices alone. Terms and texts are made of the figures when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import attrgetter, mul
from typing import Final

from policies.serving.device_load import ALONE, Stretch, weigh_shortage

FULL = 0.8
"""A KV cache filled less than this has room for what its sequences will still say. ADR 0027. Not tuned."""
SUSPECT_RISK = 0.5
"""The chance that a suspect replica is lost before it has finished a request: half of that was for nothing then, and
the request waits for its next replica as long again. ADR 0053: a suspect costs half a request's time more."""
LATE = 2.0
"""What a ms behind an objective costs, beside the ms itself. ADR 0057: lateness costs twice itself. Not tuned."""


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


@dataclass(slots=True)
class ReplicaState:
    """A replica now; nobody changes one. `running` and `waiting` requests, `places` that run at once. `kv_tokens` that
    its cache holds, `kv_free_tokens` of them free (what a cached prefix takes counts as free). `cached_prompt_tokens`:
    of this request's prompt. `tpot_ms`: predicted without drafts, with this request in it and the device to itself;
    `prefill_ms_per_token`: measured. `risk`: why it may be lost ("": it is healthy). `serving` is False while it
    drains, loads, or is lost, and `why_not` says which. `draft`: what proposes tokens there ("": nothing works), which
    saves `draft_saves_ms` of a token's time. `stretch`: what else its device does. `free_share`: of the device's
    memory. `others`: so many of its requests are of clients that are not ours. `company`: so many times as long its
    tokens take for what other replicas do now, which is in `tpot_ms`."""

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
    others: int = 0
    company: float = 1.0


@dataclass(slots=True)
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


_LEFT_OUT_WHY: Final = "dearer than these"
UNSEEN_WHY: Final = "not priced: those of its kind that are have fewer streams or more of the prompt"
"""Of replicas that were left out before pricing (policies.serving.narrowing)."""


class Route:
    """The choice. `replica` is None where none serves. `request`: as it was rated. `unseen`: so
    many replicas were not worth a look (policies.serving.narrowing).

    `rated` has all candidates, the cheapest first, and after them how many were left out. It is made of the figures
    that the choice was made by when it is first asked for, as `reason` is.
    """

    __slots__ = ("_left_out", "_priced", "_rated", "_unfit", "_weights", "replica", "request", "unseen")

    def __init__(
        self,
        priced: list[tuple[float, int, str, ReplicaState]],
        unfit: list[ReplicaState],
        request: RoutedRequest,
        weights: RoutingWeights,
    ) -> None:
        self.replica = min(priced)[2] if priced else None
        self.request = request
        self._priced = priced
        self._unfit = unfit
        self._weights = weights
        self.unseen = 0
        self._left_out = 0
        self._rated: tuple[RatedReplica, ...] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Route):
            return NotImplemented
        return (self.replica, self.request, self.rated) == (other.replica, other.request, other.rated)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Return how many `rated` has."""
        return len(self._priced) + len(self._unfit) + bool(self._left_out) + bool(self.unseen)

    @property
    def draft(self) -> str:
        """What proposes tokens for the request; "" where nothing does."""
        if self.replica is None or not self.request.drafts:
            return ""
        return next(replica.draft for _, _, name, replica in self._priced if name == self.replica)

    @property
    def rated(self) -> tuple[RatedReplica, ...]:
        if self._rated is None:
            self._rated = tuple(self._rate())
        return self._rated

    @property
    def reason(self) -> str:
        """Why it was chosen, or why nothing was."""
        if self.replica is None:
            return "no replica serves: " + "; ".join(f"{rated.name}: {rated.why_not}" for rated in self.rated)
        best = _rate_replica(min(self._priced)[3], self.request, self._weights)
        terms = ", ".join(f"{term.name} {term.cost_ms:.0f} ms ({term.why})" for term in best.terms)
        return f"predicted to take {best.price_ms:.0f} ms: {terms}"

    def saves(self, replica: str) -> float:
        """Return the share of its price there that a request saves by the choice, against that replica."""
        price_ms = next((price for price, _, name, _ in self._priced if name == replica), float("inf"))
        if not self._priced or (price_ms == float("inf") and all(unfit.name != replica for unfit in self._unfit)):
            return 0.0
        return 1.0 - min(self._priced)[0] / price_ms if price_ms > 0.0 else 0.0

    def shorten(self, most: int) -> Route:
        """Return it with the best candidates alone, so many at most, and with how many are left out."""
        over = len(self._priced) + len(self._unfit) - most
        if over <= 0:
            return self
        priced, unfit = sorted(self._priced)[:most], sorted(self._unfit, key=attrgetter("name"))
        route = Route(priced, unfit[: most - len(priced)], self.request, self._weights)
        route.unseen = self.unseen
        route._left_out = self._left_out + over
        return route

    def _rate(self) -> Iterator[RatedReplica]:
        best: RatedReplica | None = None
        for _, _, _, replica in sorted(self._priced):
            rated = _rate_replica(replica, self.request, self._weights)
            best = best or rated
            yield rated if rated is best else _explain_loser(rated, best)
        for replica in sorted(self._unfit, key=attrgetter("name")):
            yield RatedReplica(replica.name, float("inf"), (), replica.why_not or "not serving", replica.draft)
        for count, why in ((self._left_out, _LEFT_OUT_WHY), (self.unseen, UNSEEN_WHY)):
            if count:
                yield RatedReplica(f"{count} more", float("inf"), (), why)


def route(replicas: Sequence[ReplicaState], request: RoutedRequest, weights: RoutingWeights = EVEN_WEIGHTS) -> Route:
    """Choose a replica; among equals the least loaded one, then the first by name. The order given does not matter."""
    share = None if weights is EVEN_WEIGHTS else astuple(weights)
    priced: list[tuple[float, int, str, ReplicaState]] = []
    unfit: list[ReplicaState] = []
    for replica in replicas:
        if replica.serving:
            costs = find_costs(replica, request)
            price = sum(costs) if share is None else sum(map(mul, share, costs))
            priced.append((price, replica.running + replica.waiting, replica.name, replica))
        else:
            unfit.append(replica)
    return Route(priced, unfit, request, weights)


Costs = tuple[float, float, float, float, float, float, float, float, float]


def find_costs(replica: ReplicaState, request: RoutedRequest) -> Costs:
    """Return what a request costs at a replica, in ms, term by term in the order of RoutingWeights."""
    output = request.output_tokens
    plain = (output if output > 1 else 1) * replica.tpot_ms
    saved = (output if output > 1 else 1) * replica.draft_saves_ms if request.drafts and replica.draft else 0.0
    prompt, cached = request.prompt_tokens, replica.cached_prompt_tokens
    if cached > prompt:
        cached = prompt
    prefill = (prompt - cached) * replica.prefill_ms_per_token
    alone = plain - saved + prefill
    stretch = replica.stretch.factor
    service = alone * stretch
    waiting, places, kv_tokens = replica.waiting, replica.places, replica.kv_tokens
    queue = 0.0
    if waiting > 0 or replica.running >= places:
        queue = (waiting + 1) * service / (places if places > 1 else 1)
    filled = (kv_tokens - replica.kv_free_tokens + prompt + output - cached) / kv_tokens if kv_tokens else 0.0
    late = 0.0
    if request.first_in_ms is not None:
        late += max(0.0, queue + prefill * stretch - request.first_in_ms)
    if request.ends_in_ms is not None:
        late += max(0.0, queue + service - request.ends_in_ms)
    return (
        queue,
        service * (filled - FULL) / (1.0 - FULL) if filled > FULL else 0.0,
        service * weigh_shortage(replica.free_share) if replica.free_share < 1.0 else 0.0,
        service - alone,
        SUSPECT_RISK * service if replica.risk else 0.0,
        LATE * late,
        prefill,
        plain,
        -saved,
    )


def _rate_replica(replica: ReplicaState, request: RoutedRequest, weights: RoutingWeights) -> RatedReplica:
    costs = find_costs(replica, request)
    cached = min(replica.cached_prompt_tokens, request.prompt_tokens)
    taken = replica.kv_tokens - replica.kv_free_tokens + request.prompt_tokens + request.output_tokens - cached
    filled = taken / replica.kv_tokens if replica.kv_tokens else 0.0
    shared = f", {replica.others} requests are others'" if replica.others else ""
    company = f", {replica.company:.2f} times as long as alone" if replica.company > 1.0 else ""
    texts = (
        ("queue", f"{replica.waiting} wait, {replica.running} of {replica.places} places{shared}"),
        ("kv_pressure", f"KV cache {filled:.0%} full with it"),
        ("memory", f"{replica.free_share:.0%} of its memory is free"),
        ("load", replica.stretch.why or "the device is ours"),
        ("health", replica.risk or "healthy"),
        ("deadline", _describe_deadline(costs, replica.stretch.factor, request)),
        ("prefix_affinity", f"{cached} of {request.prompt_tokens} tokens cached"),
        ("tpot", f"{replica.tpot_ms:.1f} ms a token without drafts{company}"),
        ("draft", _describe_draft(replica, request)),
    )
    terms = tuple(
        RoutingTerm(name, float(getattr(weights, name)) * cost, why)
        for (name, why), cost in zip(texts, costs, strict=True)
    )
    return RatedReplica(replica.name, sum(term.cost_ms for term in terms), terms, draft=replica.draft)


def _describe_deadline(costs: Costs, stretch: float, request: RoutedRequest) -> str:
    """Return when a request's first and last token are predicted to come."""
    queue, _, _, load, _, _, prefill, plain, draft = costs
    service = plain + draft + prefill + load
    terms = [
        f"{name} token in {at_ms:.0f} of {bound_ms:.0f} ms"
        for name, at_ms, bound_ms in (
            ("first", queue + prefill * stretch, request.first_in_ms),
            ("last", queue + service, request.ends_in_ms),
        )
        if bound_ms is not None
    ]
    return ", ".join(terms) or "it has none"


def _describe_draft(replica: ReplicaState, request: RoutedRequest) -> str:
    if not request.drafts:
        return "it asks for none"
    return f"{replica.draft} saves {replica.draft_saves_ms:.1f} ms a token" if replica.draft else "no draft works here"


def _explain_loser(other: RatedReplica, best: RatedReplica) -> RatedReplica:
    more = {term.name: term.cost_ms - known.cost_ms for term, known in zip(other.terms, best.terms, strict=True)}
    name = max(more, key=lambda key: more[key])
    why = next(term.why for term in other.terms if term.name == name)
    why_not = f"{other.price_ms - best.price_ms:.0f} ms later, most of it {name}: {why}"
    if other.price_ms == best.price_ms:
        why_not = "equal, but more loaded or later by name"
    return RatedReplica(other.name, other.price_ms, other.terms, why_not, other.draft)

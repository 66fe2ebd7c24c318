"""The sections `routing` and `slo`: how a replica is chosen for a request, and what requests are to meet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.section import Section

_HOUR_MS = 3_600_000  # a longer objective is a mistake of units


class RouteWeights(Section):
    """What each term of a replica's price weighs. 0 leaves one out."""

    queue: float = Field(default=1.0, ge=0, le=100)
    """The wait for a place."""
    kv_pressure: float = Field(default=1.0, ge=0, le=100)
    """A KV cache that is nearly full."""
    memory: float = Field(default=1.0, ge=0, le=100)
    """A device whose memory is nearly full."""
    load: float = Field(default=1.0, ge=0, le=100)
    """The time that other programs take of its device, and its heat."""
    health: float = Field(default=1.0, ge=0, le=100)
    """Failures of late."""
    deadline: float = Field(default=1.0, ge=0, le=100)
    """A first token behind `slo.ttft`, or a last one behind the request's time."""
    prefix_affinity: float = Field(default=1.0, ge=0, le=100)
    """The part of the prompt that is not in its cache."""
    tpot: float = Field(default=1.0, ge=0, le=100)
    """The time of the answer's tokens, without drafts."""
    draft: float = Field(default=1.0, ge=0, le=100)
    """The time that its draft saves of that."""


class RoutingSection(Section):
    """How a replica, and with it its draft, is chosen for a request: the lowest price is taken."""

    weights: RouteWeights = RouteWeights()
    """What each term of the price weighs. The terms are predicted times, so each counts once by default."""
    hysteresis: float = Field(default=0.1, ge=0, lt=1)
    """The share of its price that a request must save before it moves from the queue of one replica to another."""


class SloSection(Section):
    """Service level objectives. While one is at risk, speculation, prefill and admission give way or gain, whichever
    helps; goodput is requests a second that meet all of them."""

    ttft_ms: float = Field(default=0.0, ge=0, le=_HOUR_MS)
    """The time to the first token that requests are to meet; 0 is no objective."""
    ttft_percentile: float = Field(default=95.0, ge=50, le=99.9)
    """So many of a hundred requests are to meet `slo.ttft_ms`."""
    tpot_ms: float = Field(default=0.0, ge=0, le=_HOUR_MS)
    """The time per output token behind the first that requests are to meet: a request's mean; 0 is no objective."""
    tpot_percentile: float = Field(default=95.0, ge=50, le=99.9)
    """So many of a hundred requests are to meet `slo.tpot_ms`."""
    max_round_ms: float = Field(default=0.0, ge=0, le=60_000)
    """The latency budget of a round that verifies. Drafts get the rows that are predicted to fit. Where not even all
    sequences fit, they take turns in groups of 8 or more, if these keep `slo.tpot_ms`. Turns cost throughput, since
    each reads the weights anew. 0 is no bound."""
    late: Literal["queue", "refuse"] = "queue"
    """What becomes of a request whose first token cannot be expected within `slo.ttft_ms`. `queue`: it is served, late.
    `refuse`: it is answered 429 with `Retry-After`, so that it can go elsewhere."""

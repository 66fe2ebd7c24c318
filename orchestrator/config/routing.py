"""The section `routing`: how a replica is chosen for a request."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.section import Section


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

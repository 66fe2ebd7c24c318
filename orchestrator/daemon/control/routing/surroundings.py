"""What routing looks at beside replicas and streams: devices, the terms' weights, and what requests may expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from orchestrator.daemon.control.routing.loads import LoadBoard
from orchestrator.protocol.contract import WorkerSpec
from policies.serving.routing import EVEN_WEIGHTS, RoutingWeights

# ADR 0057: a request that waits moves only where it saves that share. Not tuned; `routing.hysteresis` sets it.
HYSTERESIS: Final = 0.1


@dataclass(slots=True)
class Surroundings:
    """`list_drafts`: the draft workers that serve a replica. `hysteresis`: a request that waits moves only where it
    saves a larger share of its price. `request_timeout_s` and `ttft_ms`: what every request is to keep (0: no
    bound)."""

    loads: LoadBoard = field(default_factory=LoadBoard)
    weights: RoutingWeights = EVEN_WEIGHTS
    hysteresis: float = HYSTERESIS
    request_timeout_s: float = 0.0
    ttft_ms: float = 0.0
    list_drafts: Callable[[str], Sequence[WorkerSpec]] = lambda replica: ()

    def take_figures(self, other: Surroundings) -> None:
        """Take the weights and bounds of others; what is known of devices stays."""
        self.weights, self.hysteresis = other.weights, other.hysteresis
        self.request_timeout_s, self.ttft_ms = other.request_timeout_s, other.ttft_ms

    def stretch_drafts(self, replica: str) -> float:
        return max((self.loads.predict_stretch(spec).factor for spec in self.list_drafts(replica)), default=1.0)

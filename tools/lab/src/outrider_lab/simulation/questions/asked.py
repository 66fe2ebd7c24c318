"""What questions are asked about: a sketch with its models, and the parts of fleets that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from device_profiles.store import ProfileStore
from orchestrator.config.hosts import ClusterHost
from orchestrator.config.sketch import Sketch, parse_sketch
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.planning.proposal import propose_sketch
from orchestrator.planning.wanted import PlanRequest, build_request_from_sketch
from outrider_lab.simulation.fleet import Fleet
from outrider_lab.simulation.run import Scenario, simulate
from outrider_lab.simulation.sketched import AcceptanceBook, SimulatedLimits, build_fleet
from outrider_lab.simulation.trace import MadeTraffic, TracedRequest, UserClass, make_requests

BUILT_IN = """
hosts:
  - name: hall
    count: 4
    zone: hall
    cores: 64
    memory: 256 GiB
    price_per_hour: 0.5
    devices: [{device: nvidia-l40s, price_per_hour: 1.1}]
  - name: small
    count: 4
    zone: hall
    cores: 32
    memory: 128 GiB
    price_per_hour: 0.25
    devices: [{device: nvidia-l4, price_per_hour: 0.45}]
  - name: edge
    zone: edge
    cores: 16
    memory: 64 GiB
    price_per_hour: 0.1
    roles: [draft]
    devices: [{device: nvidia-rtx-4090, price_per_hour: 0.3}]
target:
  name: llama-3.1-8b
  shape: {layers: 32, hidden: 4096, heads: 32, kv_heads: 8, head_dim: 128, mlp: 14336, vocabulary: 128256}
  weights: [bf16]
drafts:
  - name: llama-3.2-1b
    shape:
      {layers: 16, hidden: 2048, heads: 32, kv_heads: 8, head_dim: 64, mlp: 8192, vocabulary: 128256,
       tied_embeddings: true}
    weights: [int8]
    acceptance: 0.75
placement: {concurrency: 8, prompt_tokens: 256, output_tokens: 128}
"""
"""The hosts and models that a question is about where no sketch is given; its prices are made up."""

_MOST_WAITING = 1 << 20  # a question asks how fast a fleet is, not whom it refuses


@dataclass(frozen=True)
class Asked:
    """`share`: of the requests that a question plays, 1 for all of them. `told` hears what is simulated."""

    sketch: Sketch
    request: PlanRequest
    acceptance: AcceptanceBook
    limits: SimulatedLimits = field(default_factory=SimulatedLimits)
    store: ProfileStore | None = None
    share: float = 1.0
    told: Callable[[str], None] = field(default=lambda text: None)

    def build_fleet(self, *parts: tuple[ClusterHost, int], alike: bool = False) -> Fleet:
        """Return the fleet of so many hosts of these entries, without draft models: every device has a target, where
        all are to be `alike` every one of the best group."""
        return self.place(parts, replace(self.request, drafts=(), alike=alike), every_device=True)

    def place(self, parts: Sequence[tuple[ClusterHost, int]], request: PlanRequest, **how: bool) -> Fleet:
        """Return the fleet of so many hosts of these entries; `how`: see build_fleet. Raises PlanError."""
        hosts = tuple(host.model_copy(update={"count": count}) for host, count in parts if count)
        links = self.sketch.links.model_copy(update={"between": ()})
        sketch = self.sketch.model_copy(update={"hosts": hosts, "links": links})
        return build_fleet(sketch, request, self.acceptance, self.limits, self.store, **how)

    def assume(self) -> list[str]:
        """Return what the fleets of this question take for granted."""
        alone = replace(self.request, suffix=True, replicas=1, least_replicas=1)
        return list(propose_sketch(self.sketch, alone, self.store).assumed)

    def play(self, fleet: Fleet, requests: list[TracedRequest], slo: Mapping[str, float]) -> dict[str, Any]:
        limits = ControlLimits(self.limits.max_running, _MOST_WAITING, 1 << 20)
        return simulate(Scenario(fleet, requests, limits, slo))

    def fill(self, sequences: int, waves: float) -> list[TracedRequest]:
        """Return requests that all come at once, as many as `sequences` that run together do in so many waves."""
        count = max(2 * sequences, round(sequences * waves * self.share))
        return self.make(count / 0.001, 0.001, seed=1, arrival="constant")

    def make(self, rate: float, seconds: float, **more: Any) -> list[TracedRequest]:
        """Return made traffic with the lengths that the sketch's placement names."""
        workload = self.request.placement
        user = UserClass(prompt_tokens=workload.prompt_tokens, output_tokens=workload.output_tokens, spread=0.4)
        return list(make_requests(MadeTraffic(rate=rate, seconds=seconds, classes=(user,), **more)))


def read_built_in() -> tuple[Sketch, PlanRequest]:
    sketch = parse_sketch(BUILT_IN, Path("built-in"))
    return sketch, build_request_from_sketch(sketch, None, Path())


@dataclass(frozen=True, slots=True)
class Answer:
    """`columns` say how the values of a row are printed, by their keys; None is printed as nothing."""

    name: str
    question: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    assumed: Sequence[str] = field(default_factory=tuple)

    def build_json(self) -> dict[str, Any]:
        told = asdict(self)
        told["columns"] = list(self.columns)
        return told

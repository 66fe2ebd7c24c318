"""What questions are asked about: a sketch with its models, and the parts of fleets that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from device_profiles.link import LinkProfile
from device_profiles.store import ProfileStore
from orchestrator.config.hosts import host_names
from orchestrator.config.sketch import Sketch, parse_sketch
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.planning.proposal import PlanProposal, propose_sketch
from orchestrator.planning.wanted import PlanRequest, build_request_from_sketch
from outrider_lab.simulation.courses import CourseBook, draw_requests
from outrider_lab.simulation.faults import FaultSchedule
from outrider_lab.simulation.fleet import DraftKind, Fleet, PlacedReplica, ReplicaKind
from outrider_lab.simulation.run import Scenario, SimulationError, simulate
from outrider_lab.simulation.sketched import AcceptanceBook, SimulatedLimits, build_fleet
from outrider_lab.simulation.trace import MadeTraffic, TracedRequest, UserClass, make_requests
from policies.planning.plan import DefaultLinks, Option, Role
from policies.planning.shard_cost import ModelPart

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

_DRAFT_OUTPUTS, _DRAFT_TOKENS = 8, 128
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

    @cached_property
    def proposal(self) -> PlanProposal:
        """The plan of the sketch without drafts: where its first target goes."""
        alone = replace(self.request, drafts=self.request.drafts, suffix=True, replicas=1, least_replicas=1)
        return propose_sketch(self.sketch, alone, self.store)

    @cached_property
    def target(self) -> ReplicaKind:
        """A replica of the target alone, as planned; it drafts nothing."""
        return self.build_fleet(self.sketch, speculates=False).replicas[0].kind

    @cached_property
    def suffix(self) -> ReplicaKind:
        """The same with drafts from the text."""
        alone = replace(self.request, drafts=(), suffix=True, replicas=1, least_replicas=1)
        return build_fleet(self.sketch, alone, self.acceptance, self.limits, self.store).replicas[0].kind

    def build_fleet(self, sketch: Sketch, *, speculates: bool, replicas: int = 1) -> Fleet:
        """Return the fleet of a sketch, without draft models."""
        # As many at a time as all have places for, so that the plan uses them all.
        busy = self.request.placement.model_copy(update={"concurrency": self.limits.max_running * replicas})
        alone = replace(self.request, drafts=(), replicas=replicas, least_replicas=1, placement=busy)
        return build_fleet(sketch, alone, self.acceptance, self.limits, self.store, speculates=speculates)

    @cached_property
    def drafting_target(self) -> ReplicaKind:
        """The target with a draft worker. Raises SimulationError where the sketch has no draft model."""
        kind, draft = self.target, self.draft
        depth = self.request.depth_bound or 8
        recorded = self.acceptance.recorded.get(draft.name)
        draw = np.random.default_rng(self.acceptance.seed)
        requests = recorded or draw_requests(
            draft.acceptance, depth, _DRAFT_OUTPUTS, _DRAFT_TOKENS, lambda: float(draw.random())
        )
        book = CourseBook(requests, kind.costs, most=depth)
        return replace(kind, name=f"{kind.name}, {draft.name}", max_depth=depth, draft=draft, draft_book=book)

    @cached_property
    def draft(self) -> DraftKind:
        """A draft worker, on the device that drafts fastest for one sequence: of a host that has no targets, where
        there is one."""
        if not self.request.drafts:
            raise SimulationError("the sketch has no `drafts`: this question is about a draft worker; add one")
        first = self.request.drafts[0]
        name, cluster = first.name or first.model.name, self.proposal.cluster
        drafting = {name for one in self.sketch.hosts if "target" not in one.roles for name in host_names(one)}
        apart = {one.profile for one in cluster.devices if one.host in drafting}
        options = [one for one in cluster.options if one.role is Role.DRAFT and one.model == first.model.name]
        mine = [one for one in options if one.profile in apart] or options
        if not mine:
            raise SimulationError(f"no device of the sketch runs the draft {name}")
        best = min(mine, key=_time_token)
        return DraftKind(name, ModelPart(best), first.acceptance[0], load_s=best.load_s or 5.0)

    def assume(self) -> list[str]:
        """Return what the fleets of this question take for granted."""
        return list(self.proposal.assumed)

    def play(self, fleet: Fleet, requests: list[TracedRequest], **more: Any) -> dict[str, Any]:
        """Simulate; return its result."""
        limits = ControlLimits(self.limits.max_running, _MOST_WAITING, 1 << 20)
        faults = more.pop("faults", FaultSchedule())
        return simulate(Scenario(fleet, requests, more.pop("limits", limits), more.pop("slo", {}), faults, **more))


def _time_token(option: Option) -> float:
    return ModelPart(option).ms(1, 1, 256.0)


def read_built_in() -> tuple[Sketch, PlanRequest]:
    """Return the built-in sketch and what it asks for."""
    sketch = parse_sketch(BUILT_IN, Path("built-in"))
    return sketch, build_request_from_sketch(sketch, None, Path())


def place(
    kind: ReplicaKind, count: int, *, draft_host: str = "", links: Mapping[str, LinkProfile] | None = None, **more: Any
) -> Fleet:
    """Return a fleet of `count` replicas of a kind, each on a host of its own, with their draft workers on
    `draft_host`. `links`: from each of them to that host."""
    replicas = tuple(
        PlacedReplica(f"target-{number}", kind, f"host-{number}", "device", draft_host=draft_host if kind.draft else "")
        for number in range(1, count + 1)
    )
    between = {(one.host, draft_host): link for one in replicas for link in (links or {}).values()}
    return Fleet(replicas, count, links=between, default_links=DefaultLinks(), **more)


def fill(asked: Asked, sequences: int, *, waves: float = 3.0, seed: int = 1) -> list[TracedRequest]:
    """Return requests that all come at once, as many as `sequences` that run together do in so many waves."""
    count = max(2 * sequences, round(sequences * waves * asked.share))
    return make(asked, count / 0.001, 0.001, seed=seed, arrival="constant")


def make(asked: Asked, rate: float, seconds: float, **more: Any) -> list[TracedRequest]:
    """Return made traffic with the lengths that the sketch's placement names."""
    workload = asked.request.placement
    user = UserClass(prompt_tokens=workload.prompt_tokens, output_tokens=workload.output_tokens, spread=0.4)
    return list(make_requests(MadeTraffic(rate=rate, seconds=seconds, classes=(user,), **more)))


def with_places(kind: ReplicaKind, places: int) -> ReplicaKind:
    """Return a kind that decodes so many sequences at a time."""
    return replace(kind, places=places)


def read_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that tables show."""
    summary = result["summary"]
    kinds = list(result["kinds"].values())
    drafted = sum(one["drafted_a_round"] for one in kinds) / max(1, len(kinds))
    return {
        "output_tok_s": summary["output_tok_s"],
        "tpot_ms": summary["tpot_ms"]["p50"] if summary["tpot_ms"] else None,
        "ttft_ms": summary["ttft_ms"]["p95"] if summary["ttft_ms"] else None,
        "attainment": summary["slo_attainment"],
        "goodput_per_s": summary["goodput_per_s"],
        "drafted_a_round": drafted,
    }

"""From a sketch of a cluster to the fleet that is simulated: where everything runs is the planner's own choice.

A small cluster is planned as a whole. Of a large one each kind of host is planned by itself, and all hosts of that kind
are as the first: so ten thousand devices take no longer than their kinds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from device_profiles.cost import StepCost
from device_profiles.link import LinkProfile
from device_profiles.store import ProfileStore
from device_profiles.units import MILLION, S_PER_HOUR
from orchestrator.config.hosts import ClusterHost, host_names
from orchestrator.config.sketch import Sketch
from orchestrator.planning.proposal import PlanProposal, propose_sketch
from orchestrator.planning.sketched import build_default_links, build_stated_links
from orchestrator.planning.wanted import PlanRequest
from outrider_lab.replay.recorded import Costs, RecordedRequest
from outrider_lab.simulation.courses import CourseBook, draw_requests
from outrider_lab.simulation.fleet import DraftKind, Fleet, PlacedReplica, ReplicaKind
from policies.planning.plan import DraftPlacement, Option, ReplicaPlacement, Role, Shard
from policies.planning.shard_cost import ModelPart

_PLANNED_WHOLE = 64  # devices
_DRAWN_OUTPUTS, _DRAWN_TOKENS = 24, 128
_SUFFIX_MS = 0.05  # what drafting from the text takes of a round, as measured


@dataclass(frozen=True, slots=True)
class SimulatedLimits:
    """Of each replica: the most sequences at a time, and the longest forward that decodes and prefills."""

    max_running: int = 16
    max_itl_ms: float = 200.0


@dataclass(frozen=True, slots=True)
class AcceptanceBook:
    """What drafts are taken for. `recorded`: requests by the drafter's name, "suffix" for drafts from the text."""

    recorded: Mapping[str, Sequence[RecordedRequest]]
    seed: int = 0

    def find(self, drafter: str, acceptance: float, depth: int) -> tuple[Sequence[RecordedRequest], bool]:
        """Return requests with this drafter's drafts, and whether they were recorded; else drawn by a chance."""
        if drafter in self.recorded:
            return self.recorded[drafter], True
        draw = np.random.default_rng([self.seed, len(drafter)])
        return draw_requests(acceptance, depth, _DRAWN_OUTPUTS, _DRAWN_TOKENS, lambda: float(draw.random())), False


def build_fleet(
    sketch: Sketch,
    asked: PlanRequest,
    acceptance: AcceptanceBook,
    limits: SimulatedLimits,
    store: ProfileStore | None = None,
    *,
    speculates: bool = True,
    every_device: bool = False,
) -> Fleet:
    """Return the fleet of a sketch. `every_device`: each host is planned by itself, so that a slow one has work beside
    fast ones; where all are to be `alike`, those of one group stay. A replica has one device, so no layers are split
    over ranks. Raises ConfigError or PlanError."""
    request = replace(asked, target=replace(asked.target, splits=()))
    builder = _Builder(request, acceptance, limits, speculates)
    devices = sum(host.count * sum(one.count for one in host.devices) for host in sketch.hosts)
    if devices <= _PLANNED_WHOLE and not every_device:
        builder.add(propose_sketch(sketch, request, store), sketch.hosts)
    else:
        planned: dict[str, PlanProposal] = {}
        for host in sketch.hosts:
            alike = host.model_copy(update={"name": "", "zone": "", "count": 1}).model_dump_json()
            if alike not in planned:
                planned[alike] = _plan_alone(sketch, host, request, limits, store)
            builder.add(planned[alike], (host,), host_names(host))
    return builder.build(sketch, devices)


def _plan_alone(
    sketch: Sketch, host: ClusterHost, asked: PlanRequest, limits: SimulatedLimits, store: ProfileStore | None
) -> PlanProposal:
    """Return the plan of one host of an entry. Raises ConfigError or PlanError."""
    alone = replace(asked, replicas=max(1, sum(one.count for one in host.devices)))
    # As many at a time as its devices have places for, so that the plan uses them all.
    busy = alone.placement.model_copy(update={"concurrency": limits.max_running * alone.replicas})
    links = sketch.links.model_copy(update={"between": ()})
    mine = sketch.model_copy(update={"hosts": (host.model_copy(update={"count": 1}),), "links": links})
    return propose_sketch(mine, replace(alone, placement=busy), store)


class _Builder:
    """Puts placed replicas together. Kinds that are alike are one, so that their courses are replayed once."""

    def __init__(
        self, asked: PlanRequest, acceptance: AcceptanceBook, limits: SimulatedLimits, speculates: bool
    ) -> None:
        self._asked, self._acceptance, self._limits, self._speculates = asked, acceptance, limits, speculates
        self._kinds: dict[object, ReplicaKind] = {}
        self._placed: list[PlacedReplica] = []
        self._goodput: defaultdict[str, float] = defaultdict(float)  # of each group, tokens/s as planned
        self._zones: dict[str, str] = {}
        self._assumed: dict[str, None] = {}

    def add(self, proposal: PlanProposal, hosts: Sequence[ClusterHost], copies: Sequence[str] = ("",)) -> None:
        """Take a plan in. `copies`: hosts that are each as the one that was planned; "": as planned."""
        for entry in hosts:
            self._zones |= dict.fromkeys(host_names(entry), entry.zone)
        self._assumed |= dict.fromkeys(proposal.assumed)
        for copy in copies:
            for replica in proposal.plan.replicas:
                self._place(proposal, replica, copy)

    def build(self, sketch: Sketch, devices: int) -> Fleet:
        links: dict[tuple[str, str], LinkProfile] = {
            (one.left, one.right): one for one in build_stated_links(sketch.links)
        }
        defaults = build_default_links(sketch.links)
        best = max(self._goodput, key=self._goodput.__getitem__, default="")
        placed = [one for one in self._placed if not self._asked.alike or one.kind.group == best]
        return Fleet(tuple(placed), devices, self._zones, links, defaults, assumed=tuple(self._assumed))

    def _place(self, proposal: PlanProposal, replica: ReplicaPlacement, copy: str) -> None:
        kind = self._find_kind(proposal, replica)
        self._goodput[kind.group] += replica.prediction.goodput_tokens_per_s
        first, draft = replica.shards[0], replica.draft
        host = copy or first.host
        own = draft.shard if draft is not None and draft.process == "own" else None
        self._placed.append(
            PlacedReplica(
                f"target-{len(self._placed) + 1}",
                kind,
                host,
                first.device.rpartition("/")[2],
                self._zones.get(host, ""),
                draft_host=(copy or own.host) if own is not None else "",
                draft_device=own.device.rpartition("/")[2] if own is not None else "",
            )
        )

    def _find_kind(self, proposal: PlanProposal, replica: ReplicaPlacement) -> ReplicaKind:
        shards = tuple(
            (one.profile, one.group, one.runtime, one.weights, one.threads, one.end_layer - one.first_layer)
            for one in replica.shards
        )
        draft = replica.draft
        key = (
            shards,
            draft.drafter if draft else "",
            draft.process if draft else "",
            draft.shard.profile if draft and draft.shard else "",
        )
        if key not in self._kinds:
            self._kinds[key] = self._build_kind(proposal, replica)
        return self._kinds[key]

    def _build_kind(self, proposal: PlanProposal, replica: ReplicaPlacement) -> ReplicaKind:
        options = [_find_option(proposal, shard, Role.TARGET) for shard in replica.shards]
        forward = sum_shards(options, replica.shards, proposal.wanted.workload.target.layers)
        bit = proposal.wanted.workload.exactness.value == "bit"
        paid = max(one.min_rows for one in options) if bit else 1
        costs = Costs(forward, draft_ms=_SUFFIX_MS, change_ms=forward.changing_ms, paid_rows=paid)
        depth = self._asked.depth_bound if self._speculates else 0
        suffix, known = self._acceptance.find("suffix", 0.7, depth or 1)
        if not known and depth and self._asked.suffix:
            self._assume_drawn("the text itself", 0.7)
        book = CourseBook(suffix if self._asked.suffix else (), costs, most=depth)
        name = " + ".join(f"{one.profile} {one.runtime} {one.weights}" for one in replica.shards)
        kind = ReplicaKind(
            name,
            costs,
            book,
            places=self._limits.max_running,
            kv_tokens=_count_kv_tokens(proposal, replica, options[0]),
            max_itl_ms=self._limits.max_itl_ms,
            load_s=replica.load_s or 10.0,
            max_depth=depth,
            price_per_hour=_sum_price(replica),
            power_w=_sum_power(proposal, replica),
            source=options[0].source,
            group=", ".join(one.group for one in replica.shards),
        )
        if replica.draft is None or replica.draft.shard is None or not depth:
            return kind
        return self._with_draft(kind, proposal, replica.draft, costs, depth)

    def _with_draft(
        self, kind: ReplicaKind, proposal: PlanProposal, placed: DraftPlacement, costs: Costs, depth: int
    ) -> ReplicaKind:
        assert placed.shard is not None  # noqa: S101 -- checked by the caller
        part = ModelPart(_find_option(proposal, placed.shard, Role.DRAFT))
        facts = next(one for one in proposal.wanted.workload.drafters if one.name == placed.drafter)
        token_ms = part.ms(1, 1, 256.0)
        requests, known = self._acceptance.find(placed.drafter, facts.acceptance[0], depth)
        if not known:
            self._assume_drawn(placed.drafter, facts.acceptance[0])
        dear = replace(costs, draft_ms=token_ms, draft_token_ms=token_ms)
        book = CourseBook(requests, dear, most=depth)
        if placed.process == "target":
            return replace(kind, book=book, costs=dear, name=f"{kind.name}, {placed.drafter} in its process")
        draft = DraftKind(
            f"{placed.drafter}",
            part,
            facts.acceptance[0],
            load_s=part.option.load_s or 5.0,
            drafts_ahead=placed.overlap,
        )
        return replace(kind, draft=draft, draft_book=book, name=f"{kind.name}, {placed.drafter} beside it")

    def _assume_drawn(self, drafter: str, acceptance: float) -> None:
        told = f"drafts of {drafter}: no recording, so that each token is right with a chance of {acceptance:.2f}"
        self._assumed |= {f"{told} (--acceptance {drafter}=FILE)": None}


def _find_option(proposal: PlanProposal, shard: Shard, role: Role) -> Option:
    return next(
        one
        for one in proposal.cluster.options
        if one.role is role
        and (one.profile, one.runtime, one.weights, one.threads)
        == (shard.profile, shard.runtime, shard.weights, shard.threads)
    )


def sum_shards(options: Sequence[Option], shards: Sequence[Shard], layers: int) -> StepCost:
    """Return the cost of a forward through all shards, what calling each takes included."""
    parts = [
        _with_overhead(option).scale_by((one.end_layer - one.first_layer) / layers)
        if len(shards) > 1
        else _with_overhead(option)
        for option, one in zip(options, shards, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    knots = sorted({knot for part in parts for knot in part.row_knots})
    return StepCost(
        tuple(knots),
        tuple(sum(part.ms(knot) for part in parts) for knot in knots),
        sequence_ms=sum(part.sequence_ms for part in parts),
        position_us=sum(part.position_us for part in parts),
        row_position_us=sum(part.row_position_us for part in parts),
        error=max(part.error for part in parts),
        changing_ms=sum(part.changing_ms for part in parts),
    )


def _with_overhead(option: Option) -> StepCost:
    cost = option.cost
    times = tuple(option.overhead_ms + option.overhead_sequence_ms + ms for ms in cost.row_ms)
    return replace(cost, row_ms=times, sequence_ms=cost.sequence_ms + option.overhead_sequence_ms)


def _count_kv_tokens(proposal: PlanProposal, replica: ReplicaPlacement, option: Option) -> int:
    """Return what the first shard's device has room for beside everything else."""
    first = replica.shards[0]
    device = next(one for one in proposal.cluster.devices if one.id == first.device)
    room = device.memory_bytes * (1.0 - proposal.wanted.constraints.keep_free)
    share = (first.end_layer - first.first_layer) / proposal.wanted.workload.target.layers
    left = room - (first.memory.total - first.memory.kv_cache)
    return max(4096, int(left / max(1.0, option.kv_bytes_per_token * share)))


def _sum_power(proposal: PlanProposal, replica: ReplicaPlacement) -> float:
    """Return what the devices of a replica take under load, 0 where it is not known of one."""
    mine = {one.device for one in replica.shards}
    if replica.draft is not None and replica.draft.shard is not None:
        mine.add(replica.draft.shard.device)
    powers = [one.power_w for one in proposal.cluster.devices if one.id in mine]
    return sum(powers) if all(powers) else 0.0


def _sum_price(replica: ReplicaPlacement) -> float:
    one = replica.prediction
    tokens_per_hour = one.goodput_tokens_per_s * S_PER_HOUR
    return one.cost_per_million_tokens * tokens_per_hour / MILLION

"""What a simulated fleet is made of: kinds of replicas and draft workers, and the hosts that they are on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from device_profiles.link import LinkProfile
from orchestrator.protocol.ready import Ready, ReadyDevice, ReadyDrafting, ReadyKv, ReadyModel, ReadyPrecision
from orchestrator.worker.loading.engine import expect_rounds
from outrider_lab.replay.recorded import Costs
from outrider_lab.simulation.courses import CourseBook
from policies.planning.plan import DefaultLinks
from policies.planning.shard_cost import ModelPart
from policies.serving.draft_pool import PoolSize
from policies.serving.failover.standby import Readiness


@dataclass(frozen=True, slots=True)
class DraftKind:
    """A draft worker: the model that it runs, and `load_s` until it is ready. `drafts_ahead`: while the target
    verifies. `acceptance`: the chance that a token of it is accepted."""

    name: str
    part: ModelPart
    acceptance: float
    load_s: float = 2.0
    drafts_ahead: bool = True
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """A target on a kind of device. `costs`: of its rounds, drafting from the text included. `book`: how requests go on
    with the drafts that its own process makes; `draft_book`: with the draft worker `draft`, where it has one. It
    decodes `places` sequences at a time, and its cache has `kv_tokens`. A forward that decodes and prefills is to take
    `max_itl_ms` at most. `power_w`: of its devices while it works, 0 where not known. `alone`: the share of its time
    that a round takes while no other replica of its `machine` runs. `source` of its figures. `group`: of equal bits, as
    of a plan's Option."""

    name: str
    costs: Costs
    book: CourseBook
    places: int
    kv_tokens: int
    max_itl_ms: float = 200.0
    load_s: float = 5.0
    max_depth: int = 0
    draft: DraftKind | None = None
    draft_book: CourseBook | None = None
    price_per_hour: float = 0.0
    power_w: float = 0.0
    alone: float = 1.0
    source: str = "measured"
    group: str = "simulated"


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """A replica of a kind, on a device of a host in a zone. `draft_host`: where its draft worker is, where it has one.
    `standby`: it serves where no other does, and how far it is loaded until then; None: it is no standby. `machine`:
    what it shares with other replicas, on whichever host they are ("": nothing)."""

    name: str
    kind: ReplicaKind
    host: str
    device: str
    zone: str = ""
    draft_host: str = ""
    draft_device: str = ""
    standby: Readiness | None = None
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All of it. `draft_pools`: the number of workers of a draft, where it is not one for each replica. `devices`: all
    that the sketch has, those without work included. `api_host`: where requests come in ("": beside every replica)."""

    replicas: tuple[PlacedReplica, ...]
    devices: int
    zones: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkProfile] = field(default_factory=dict)
    default_links: DefaultLinks = field(default_factory=DefaultLinks)
    draft_pools: Mapping[str, PoolSize] = field(default_factory=dict)
    api_host: str = ""
    assumed: tuple[str, ...] = ()

    def find_link(self, left: str, right: str) -> LinkProfile:
        if left == right or not left or not right:
            return self.default_links.same_host
        known = self.links.get((left, right)) or self.links.get((right, left))
        if known is not None:
            return known
        same = self.zones.get(left) == self.zones.get(right)
        return self.default_links.same_zone if same else self.default_links.other_zone


BLOCK_TOKENS: Final = 16
SUFFIX: Final = "suffix"


def build_ready(replica: PlacedReplica, pid: int = 1) -> Ready:
    """Return what a worker of a replica says once it serves."""
    kind = replica.kind
    drafters = [SUFFIX] if kind.max_depth and len(kind.book) else []
    return Ready(
        ReadyModel("simulated", 1 << 16, "simulated", 1 << 20),
        ReadyDevice("simulated", replica.device, kind.name),
        ReadyPrecision("as_file", "auto", "auto", "bit", row_invariant=True, class_fingerprint=kind.group),
        ReadyKv(kind.kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS),
        slots=kind.places,
        pid=pid,
        load_s=kind.load_s,
        drafting=ReadyDrafting(
            [*drafters, *([kind.draft.name] if kind.draft is not None else [])], max_depth=kind.max_depth
        ),
        host=replica.host,
        expected_rounds=expect_rounds(kind.costs.forward, kind.places),
    )

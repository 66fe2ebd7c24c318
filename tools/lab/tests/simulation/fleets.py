"""Fleets that are made by hand: costs that are known, courses of a fixed depth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from outrider_lab.replay.recorded import Costs, RecordedRequest
from outrider_lab.simulation.courses import CourseBook, draw_requests
from outrider_lab.simulation.faults import Fault
from outrider_lab.simulation.fleet import DraftKind, Fleet, PlacedReplica, ReplicaKind
from outrider_lab.simulation.trace import TracedRequest
from outrider_lab.simulation.world import World

from device_profiles.cost import StepCost
from orchestrator.daemon.control.streams.admission import ControlLimits
from policies.planning.plan import Option, Role
from policies.planning.shard_cost import ModelPart
from policies.serving.failover.standby import FailoverRules, OtherBits

LIMITS = ControlLimits(max_running=8, max_waiting=10_000, max_restarts=5)
COSTS = Costs(StepCost((1.0, 8.0, 64.0, 512.0), (20.0, 21.0, 30.0, 100.0)))


def draw(acceptance: float = 0.7, *, depth: int = 4, outputs: int = 6, tokens: int = 40) -> list[RecordedRequest]:
    """Return recorded requests, the same ones each time."""
    chance = np.random.default_rng(5)
    return draw_requests(acceptance, depth, outputs, tokens, lambda: float(chance.random()))


def make_kind(
    *, speed: float = 1.0, places: int = 8, kv_tokens: int = 100_000, speculates: bool = True, group: str = "simulated"
) -> ReplicaKind:
    """Return a kind of replica whose forwards take COSTS over its speed."""
    costs = replace(COSTS, forward=COSTS.forward.scale_by(1.0 / speed))
    book = CourseBook(draw() if speculates else [], costs, most=4 if speculates else 0, fixed=3)
    return ReplicaKind(f"kind-{speed:g}", costs, book, places, kv_tokens, load_s=4.0, max_depth=4, group=group)


def add_draft(kind: ReplicaKind, token_ms: float = 1.0, *, drafts_ahead: bool = True) -> ReplicaKind:
    """Return the same kind with a draft worker of its own."""
    option = Option(
        "d", Role.DRAFT, "draft", "simulated", "bf16", StepCost((1.0, 64.0), (token_ms, 2 * token_ms)), 1e6, 1e3
    )
    draft = DraftKind("draft", ModelPart(option), 0.7, load_s=1.0, drafts_ahead=drafts_ahead)
    return replace(kind, draft=draft, draft_book=CourseBook(draw(), kind.costs, most=4))


def make_fleet(*kinds: ReplicaKind, draft_host: str = "drafts") -> Fleet:
    """Return a fleet of one replica of each of these kinds, each on a host of its own."""
    replicas = [
        PlacedReplica(f"target-{n}", kind, f"host-{n}", "device", draft_host=draft_host if kind.draft else "")
        for n, kind in enumerate(kinds, 1)
    ]
    return Fleet(tuple(replicas), len(replicas))


def play(
    fleet: Fleet, requests: list[TracedRequest], faults: list[Fault] | None = None, other_bits: OtherBits = "streams"
) -> World:
    """Return a world in which all of it happened."""
    world = World(fleet, replace(LIMITS, failover=FailoverRules(other_bits=other_bits)))
    world.open()
    world.start(3600.0)
    world.play(requests, faults or [])
    return world

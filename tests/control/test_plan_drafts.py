"""A draft whose device other programs take is moved, and comes back, as its target is."""

from __future__ import annotations

import asyncio

from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.loops.planner_port import DriftPolicy
from tests.control.test_plan_keeper import Clock, Making, Workers, name_workers, sample_for, until
from tests.policies.test_running import plan


def place_draft(found: PlanKeeper) -> str:
    draft = found.proposal.plan.replicas[0].draft
    return draft.shard.device if draft is not None and draft.shard is not None else ""


async def test_a_draft_leaves_a_device_that_others_take_and_returns_when_they_end(tmp_path):
    workers, clock = Workers(), Clock()
    found = PlanKeeper(name_workers(plan(tmp_path, sim_ms=8.0)), workers, Making(), DriftPolicy(0.2, 3.0), clock)
    assert place_draft(found) == "here/CPU"
    sample_for(found, clock, 40, CPU=0.05)
    sample_for(found, clock, 12, CPU=0.9)
    await until(found, 1)
    assert place_draft(found) == "here/SIM.1"
    assert "here/CPU" in found.view().last
    sample_for(found, clock, 60, CPU=0.9)
    await asyncio.sleep(0)
    assert found.view().plans == 1, "that is what it was planned with"
    sample_for(found, clock, 60, CPU=0.05)
    await until(found, 2)
    assert place_draft(found) == "here/CPU"
    assert len(workers.replaced) == 2


async def test_a_draft_stays_where_no_other_place_is_better(tmp_path):
    workers, clock = Workers(), Clock(100.0)
    found = PlanKeeper(name_workers(plan(tmp_path, sim_ms=8.0)), workers, Making(), DriftPolicy(0.2, 3.0), clock)
    sample_for(found, clock, 20, CPU=0.3)
    await until(found, 1)
    assert (workers.replaced, place_draft(found)) == ([], "here/CPU")

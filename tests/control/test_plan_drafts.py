"""A draft whose device other programs take is moved, and comes back, as its target is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.drafts import ModelDraft
from orchestrator.daemon.control.actions import TellUseless
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.planning.proposal import PlanProposal, build_proposal
from orchestrator.protocol.contract import WorkerSpec
from tests.control.test_plan_keeper import Clock, Making, Workers, name_workers, rounds_of_many, sample_for, until
from tests.policies.test_running import plan
from tests.support.profiles import drift_after


def place_draft(found: PlanKeeper) -> str:
    draft = found.proposal.plan.replicas[0].draft
    return draft.shard.device if draft is not None and draft.shard is not None else ""


async def test_a_draft_leaves_a_device_that_others_take_and_returns_when_they_end(tmp_path):
    workers, clock = Workers(), Clock()
    found = PlanKeeper(name_workers(plan(tmp_path, sim_ms=8.0)), workers, Making(), drift_after(0.2, 3.0), clock)
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
    found = PlanKeeper(name_workers(plan(tmp_path, sim_ms=8.0)), workers, Making(), drift_after(0.2, 3.0), clock)
    sample_for(found, clock, 20, CPU=0.3)
    await until(found, 1)
    assert (workers.replaced, place_draft(found)) == ([], "here/CPU")


DRAFT_WORKER = WorkerSpec("model", "", {}, device="CPU")


class DraftMaking(Making):
    """Makes plans whose drafts have that worker."""

    def again(self, *known: Any) -> StartPlan:
        made = super().again(*known)
        return replace(made, drafts=tuple((DRAFT_WORKER,) * bool(part.draft) for part in made.proposal.plan.replicas))


def keep(directory, workers: Workers, *, replicas: int, concurrency: int = 4, clock: Clock | None = None) -> PlanKeeper:
    """Keep a plan with a draft on the CPU, which the target could be on as well. There may be so many replicas."""
    proposal = plan(directory, also_on_cpu_ms=20.0, most_replicas=replicas, concurrency=concurrency)
    running = replace(name_workers(with_entry(proposal, threads=1)), drafts=((DRAFT_WORKER,),))
    return PlanKeeper(running, workers, DraftMaking(), drift_after(9.0, 3.0, 0.0), clock or Clock(1000.0))


async def test_the_device_of_a_draft_that_helps_nobody_becomes_a_replica(tmp_path):
    workers = Workers(numbers=[0, 1])
    kept = keep(tmp_path, workers, replicas=2)
    assert place_draft(kept) == "here/CPU"
    kept.observe_useless(TellUseless(WorkerSpec("other", "", {}), "it is another target's"))
    kept.observe_useless(TellUseless(DRAFT_WORKER, "it helped no replica for 30 s"))
    await until(kept, 1)
    assert sorted(workers.replaced[0].split()) == ["here/CPU", "here/SIM"]
    assert place_draft(kept) == ""
    assert "simulated-toy drafts nothing: it helped no replica for 30 s" in kept.proposal.assumed
    assert "simulated-toy on here/CPU simulated fp32, layers 0-0, beside the target -> none" in kept.view().last
    kept.observe_useless(TellUseless(DRAFT_WORKER, "it helped no replica for 30 s"))
    await asyncio.sleep(0)
    assert kept.view().plans == 1, "that is known"
    assert kept.first.request.drafts, "with another load it may help again"


async def test_where_there_may_be_no_replica_more_the_plan_stays_and_says_why(tmp_path):
    workers = Workers()
    kept = keep(tmp_path, workers, replicas=1)
    kept.observe_useless(TellUseless(DRAFT_WORKER, "it helped no replica for 30 s"))
    await until(kept, 1)
    assert workers.replaced == []
    assert kept.view().last.startswith("kept, though draft model rests, as it helped no replica for 30 s: ")


@pytest.mark.parametrize("threads", [1, 2])
async def test_a_draft_that_helps_nobody_rests_over_a_reload_unless_its_entry_is_another(tmp_path, threads):
    kept = keep(tmp_path, Workers(), replicas=1)
    kept.observe_useless(TellUseless(DRAFT_WORKER, "it helped no replica for 30 s"))
    assert await kept.wait_planned()
    # Its place among the drafts, and what is accepted of it, are no part of the entry.
    wanted = name_workers(with_entry(kept.first, threads=threads, index=3, name="model-2", acceptance=(0.7,)))
    assert wanted.proposal.plan.replicas[0].draft is not None
    after = PlanKeeper(await kept.adjust(wanted, Making()), Workers(), Making(), drift_after(0.2, 3.0), Clock(1000.0))
    after.succeed(kept, wanted.proposal)
    assert place_draft(after) == ("" if threads == 1 else "here/CPU")
    after.observe_profiles(wanted.proposal)
    assert await after.wait_planned()
    assert place_draft(after) == ("" if threads == 1 else "here/CPU")
    rests = "simulated-toy drafts nothing: it helped no replica for 30 s" in after.proposal.assumed
    assert rests == (threads == 1)


def with_entry(proposal: PlanProposal, *, threads: int, **changes: Any) -> PlanProposal:
    """Return the plan for an entry of `drafts` in cluster.yaml."""
    (draft,) = proposal.request.drafts
    draft = replace(draft, entry=ModelDraft(method="model", source="simulated:toy", threads=threads), **changes)
    return build_proposal(proposal.cluster, replace(proposal.request, drafts=(draft,)), proposal.behind)


@pytest.mark.parametrize(
    ("before", "requests", "later_s", "drafts"),
    [(1, 4, 60.0, False), (1, 4, 700.0, True), (4, 1, 60.0, True)],
    ids=["more requests while it rests", "more requests behind its rest", "fewer requests"],
)
async def test_a_useless_draft_may_help_fewer_requests_and_others_behind_its_rest(
    tmp_path, before, requests, later_s, drafts
):
    clock = Clock(1000.0)
    kept = keep(tmp_path, Workers(), replicas=2, concurrency=1, clock=clock)
    rounds_of_many(kept, before, 400, 30.0)
    await kept.wait_planned()
    assert (kept.asked_now.request.placement.concurrency, place_draft(kept)) == (before, "here/CPU")
    kept.observe_useless(TellUseless(DRAFT_WORKER, "it helped no replica for 30 s"))
    assert await kept.wait_planned()
    clock.now_s += later_s
    rounds_of_many(kept, requests, 4000, 30.0)
    assert await kept.wait_planned()
    assert kept.asked_now.request.placement.concurrency == requests
    assert (place_draft(kept), len(kept.proposal.plan.replicas)) == (("here/CPU", 1) if drafts else ("", 2))

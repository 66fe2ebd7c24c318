"""Plans for another number of replicas: what load asks for, and what the planner says to it."""

from __future__ import annotations

from device_profiles.profile import Exactness
from orchestrator.config.placement import PlacementSection
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.planning.models import model_at_hand
from orchestrator.planning.proposal import PlanProposal, propose_here
from orchestrator.planning.wanted import PlanRequest, ReplicaDemand
from tests.control.test_plan_keeper import Clock, Making, Workers, name_workers, until
from tests.support.profiles import drift_after, store_simulated_profiles


def propose(directory, row_ms, *, most=1, least=1, concurrency=1) -> PlanProposal:
    """Every row takes its time, so that a second device helps where it is not much slower."""
    toy = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
    placement = PlacementSection(concurrency=concurrency)
    asked = PlanRequest(toy, (), False, Exactness.BIT, 0, most, placement, least_replicas=least)
    return propose_here(asked, store_simulated_profiles(directory, row_ms, more_row_ms=2.0), {})


def keeper(directory, row_ms, workers: Workers) -> PlanKeeper:
    return PlanKeeper(name_workers(propose(directory, row_ms)), workers, Making(), drift_after(0.2, 3.0), Clock())


def devices(found: PlanKeeper) -> list[str]:
    return [one.shards[0].device for one in found.proposal.plan.replicas]


async def test_one_more_is_planned_for_the_requests_that_are_there_and_one_less_goes_again(tmp_path):
    workers = Workers(numbers=[0, 1])
    found = keeper(tmp_path, {"SIM": 4.0, "SIM.1": 5.0}, workers)
    assert devices(found) == ["here/SIM"]
    assert await found.scale(ReplicaDemand(1, 2, 12)) == ""
    assert devices(found) == ["here/SIM", "here/SIM.1"]
    assert found.proposal.wanted.workload.concurrency == 12
    workers.numbers = [0]
    assert await found.scale(ReplicaDemand(1, 1, 0)) == ""
    assert devices(found) == ["here/SIM"]
    assert workers.replaced == ["here/SIM here/SIM.1", "here/SIM"]
    assert found.view().plans == 0, "that makes no pause longer"


async def test_one_more_that_serves_little_more_is_not_started(tmp_path):
    workers = Workers()
    found = keeper(tmp_path, {"SIM": 4.0, "SIM.1": 400.0}, workers)
    why = await found.scale(ReplicaDemand(1, 2, 12))
    assert "2 replicas" in why
    assert (workers.replaced, devices(found)) == ([], ["here/SIM"])


async def test_where_there_is_no_device_for_one_more_the_planner_says_so(tmp_path):
    workers = Workers()
    found = keeper(tmp_path, {"SIM": 4.0}, workers)
    assert "there is room for 1" in await found.scale(ReplicaDemand(1, 2, 12))
    assert workers.replaced == []


async def test_a_worker_that_does_not_start_leaves_the_plan_as_it_was(tmp_path):
    workers = Workers(refuses=True)
    found = keeper(tmp_path, {"SIM": 4.0, "SIM.1": 5.0}, workers)
    assert await found.scale(ReplicaDemand(1, 2, 12)) == "the new worker does not start"
    assert devices(found) == ["here/SIM"]


async def test_load_keeps_its_number_of_replicas_when_a_device_is_gone(tmp_path):
    workers = Workers(numbers=[0, 1])
    found = keeper(tmp_path, {"SIM": 4.0, "SIM.1": 5.0, "SIM.2": 6.0}, workers)
    assert await found.scale(ReplicaDemand(1, 2, 12)) == ""
    assert devices(found) == ["here/SIM", "here/SIM.1"]
    found.observe_health({Part("device", "here/SIM"): PartHealth(0.0, "it died")})
    await until(found, 1)
    assert devices(found) == ["here/SIM.1", "here/SIM.2"]
    assert found.proposal.wanted.workload.concurrency == 12


def test_at_least_so_many_are_placed_where_there_is_room(tmp_path):
    rows = {"SIM": 4.0, "SIM.1": 400.0}
    assert [len(propose(tmp_path, rows, most=2, least=least).plan.replicas) for least in (1, 2)] == [1, 2]
    assert len(propose(tmp_path / "one", {"SIM": 4.0}, most=2, least=2).plan.replicas) == 1

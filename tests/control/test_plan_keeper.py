"""When the running plan is made anew, when workers are replaced, and when not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from device_profiles.profile import Exactness
from orchestrator.cluster.port import Delta, RequestStats, Round, WorkerSpec
from orchestrator.config.placement import PlacementSection
from orchestrator.control.plan_keeper import PlanKeeper
from orchestrator.errors import WorkerError
from orchestrator.planning.correction import corrected
from orchestrator.planning.models import model_at_hand
from orchestrator.planning.proposal import Asked, Proposal, proposal, propose_here
from policies.drift import FIRST_PAUSE_S, PATIENCE
from tests.support.profiles import simulated_profiles


@dataclass
class Clock:
    """A clock that is set."""

    now_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


@dataclass
class Workers:
    """Takes note of what is replaced."""

    replaced: list[WorkerSpec] = field(default_factory=list)
    refuses: bool = False

    async def replace(self, engine: int, spec: WorkerSpec) -> None:
        if self.refuses:
            raise WorkerError("the new worker does not start")
        self.replaced.append(spec)


@dataclass(frozen=True)
class Planned:
    """A plan whose worker is named after its device."""

    proposal: Proposal

    @property
    def targets(self) -> tuple[WorkerSpec, ...]:
        return (WorkerSpec(self.proposal.plan.replicas[0].shards[0].device, "", {}),)

    @property
    def drafts(self) -> tuple[WorkerSpec, ...]:
        return ()


def first_plan(directory, row_ms) -> Proposal:
    toy = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
    asked = Asked(toy, (), True, Exactness.BIT, 8, 1, PlacementSection())
    return propose_here(asked, simulated_profiles(directory, row_ms), {})


def keeper(directory, row_ms, clock, workers) -> PlanKeeper:
    def again(before: Proposal, corrections) -> Planned:
        return Planned(proposal(corrected(before.cluster, corrections), before.asked, before.behind))

    return PlanKeeper(Planned(first_plan(directory, row_ms)), workers, again, 0.2, clock)


def rounds(found: PlanKeeper, count: int, ms: float) -> None:
    stats = RequestStats(20, 30, 5, 5, 5, 5, 0.0, 0.0)
    for _ in range(count):
        found.observe(Round([Delta("r", [1, 2], "", stats)], 1, 4, 1, 3, 1, [1, 0, 0], ms + 0.5, ms, 0.5))


async def until(found: PlanKeeper, plans: int) -> None:
    for _ in range(1000):
        if found.view().plans >= plans and found._task is None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never planned {plans} times: {found.view()}")


async def test_rounds_as_predicted_change_nothing(tmp_path):
    workers = Workers()
    found = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    rounds(found, 10 * PATIENCE, 2.3)
    await asyncio.sleep(0)
    assert (found.view().plans, workers.replaced) == (0, [])
    assert found.view().ratio == pytest.approx(2.3 / 2.2, rel=0.05)
    assert found.view().measured_tokens_per_s == pytest.approx(2 / 2.8 * 1e3)


async def test_a_worker_is_replaced_when_its_device_turns_out_to_be_the_slower_one(tmp_path):
    workers, clock = Workers(), Clock()
    found = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers)
    predicted = found.view().predicted_tokens_per_s
    rounds(found, 2 * PATIENCE, 20.0)
    await until(found, 1)
    assert [spec.name for spec in workers.replaced] == ["here/SIM.1"]
    view = found.view()
    assert view.moves == 1
    assert view.predicted_tokens_per_s < predicted
    assert view.rounds == 0, "the new plan is compared from its beginning"
    rounds(found, 4 * PATIENCE, 5.2)
    await asyncio.sleep(0)
    assert found.view().plans == 1


async def test_where_nothing_better_is_there_costs_are_corrected_and_the_worker_stays(tmp_path):
    workers = Workers()
    found = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    rounds(found, 2 * PATIENCE, 3.5)
    await until(found, 1)
    assert workers.replaced == []
    assert "with corrected costs" in found.view().last
    rounds(found, 4 * PATIENCE, 3.5)
    assert found.view().ratio == pytest.approx(1.0, abs=0.1), "the correction is what rounds take"
    assert found.view().plans == 1


async def test_plans_do_not_follow_each_other_at_once(tmp_path):
    workers, clock = Workers(), Clock()
    found = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers)
    rounds(found, 2 * PATIENCE, 20.0)
    await until(found, 1)
    rounds(found, 3 * PATIENCE, 60.0)
    await asyncio.sleep(0.05)
    assert found.view().plans == 1, "too soon"
    clock.now_s += FIRST_PAUSE_S
    rounds(found, 1, 60.0)
    await until(found, 2)
    assert [spec.name for spec in workers.replaced] == ["here/SIM.1", "here/SIM"]


async def test_a_new_worker_that_does_not_start_leaves_the_old_one(tmp_path):
    workers = Workers(refuses=True)
    found = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    rounds(found, 2 * PATIENCE, 20.0)
    await until(found, 1)
    assert found.view().moves == 0
    assert "the new worker does not start" in found.view().last
    assert found.proposal.plan.replicas[0].shards[0].device == "here/SIM"


async def test_rounds_that_read_prompts_say_nothing(tmp_path):
    found = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), Workers())
    for _ in range(200):
        found.observe(Round([Delta("r", [1])], 1, 300, 0, 0, 0, [], 90.0, 90.0, 0.0))
        found.observe(Round([], 1, 4, 0, 0, 0, [], 90.0, 90.0, 0.0))
    assert found.view().rounds == 0

"""When the running plan is made anew, when workers are replaced, and when not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.device_load import DeviceLoad
from device_profiles.profile import Exactness
from orchestrator.config.placement import PlacementSection
from orchestrator.daemon.control.actions import TellLacking, TellLoads, TellRefused, TellStarved
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.health.health import Part, PartHealth
from orchestrator.daemon.control.loops.plan_choice import NoRoomBeside, refuse_crowding
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.errors import WorkerError
from orchestrator.planning.correction import Corrections, Key, apply_health, apply_loads, correct_costs
from orchestrator.planning.models import model_at_hand
from orchestrator.planning.proposal import PlanProposal, build_proposal, propose_here
from orchestrator.planning.wanted import PlanRequest
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.rounds import Delta, RequestStats, RoundReport
from policies.serving.drift import FIRST_PAUSE_S, PATIENCE
from tests.support.profiles import drift_after, store_simulated_profiles


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
    """Takes note of what is to run; `numbers` are those of its replicas."""

    replaced: list[str] = field(default_factory=list)
    refuses: bool = False
    numbers: list[int] = field(default_factory=lambda: [0])

    async def change(
        self,
        specs: Sequence[WorkerSpec],
        drafts: Sequence[Sequence[WorkerSpec]],
        standbys: Sequence[StandbySpec] | None = None,
    ) -> list[int]:
        if self.refuses:
            raise WorkerError("the new worker does not start")
        self.replaced.append(" ".join(spec.name for spec in specs))
        return self.numbers


def name_workers(proposal: PlanProposal, way: Mapping[str, object] | None = None) -> StartPlan:
    """Return a plan whose workers are named after their devices, and started in a `way`."""
    names = [replica.shards[0].device for replica in proposal.plan.replicas]
    options = {"model": {"adapter": "simulated"}, **(way or {})}
    specs = (WorkerSpec(name, "", options, device=name.partition("/")[2]) for name in names)
    return StartPlan(proposal, tuple(specs))


def first_plan(directory, row_ms, replicas=1, others=None, **placement) -> PlanProposal:
    toy = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
    wanted_plan = PlanRequest(
        toy, (), True, Exactness.BIT, 8, replicas, PlacementSection(concurrency=replicas, **placement)
    )
    return propose_here(wanted_plan, store_simulated_profiles(directory, row_ms, others=others), {})


@dataclass
class Making:
    """Makes plans, and takes note of what is marked."""

    way: Mapping[str, object] = field(default_factory=dict)
    marked: list[tuple[str, float]] = field(default_factory=list)

    def again(
        self,
        first: PlanProposal,
        corrections: Corrections,
        running: Sequence[WorkerSpec],
        health: Mapping[str, tuple[float, str]],
        loads: Mapping[str, DeviceLoad],
    ) -> StartPlan:
        cluster = apply_health(correct_costs(first.cluster, corrections), health)
        cluster = apply_loads(cluster, loads)
        proposal = build_proposal(cluster, first.request, first.behind)
        return name_workers(replace(proposal, assumed=(*proposal.assumed, *first.assumed)), self.way)

    def mark_drifted(self, first: PlanProposal, key: Key, ratio: float) -> str:
        self.marked.append((key[0], ratio))
        return f"{key[0]} has drifted"


def keeper(directory, row_ms, clock, workers, making=None, replicas=1, pause_s=FIRST_PAUSE_S) -> PlanKeeper:
    running = name_workers(first_plan(directory, row_ms, replicas))
    return PlanKeeper(running, workers, making or Making(), drift_after(0.2, 3.0, pause_s), clock)


def rounds(plan_keeper: PlanKeeper, count: int, ms: float, engine: int = 0) -> None:
    stats = RequestStats(20, 30, 5, 5, 5, 0.0, 0.0)
    for _ in range(count):
        done = RoundReport([Delta("r", [1, 2], "", stats)], 1, 4, 1, 3, 1, [1, 0, 0], ms + 0.5, ms, 0.5)
        plan_keeper.observe_round(msgspec.structs.replace(done, engine=engine))


def rounds_of_many(plan_keeper: PlanKeeper, sequences: int, count: int, ms: float) -> None:
    stats = RequestStats(20, 30, 5, 5, 5, 0.0, 0.0)
    for _ in range(count):
        deltas = [Delta(f"r{number}", [1, 2], "", stats) for number in range(sequences)]
        rows = 2 * sequences
        plan_keeper.observe_round(RoundReport(deltas, sequences, rows, sequences, 3, 1, [1, 0, 0], ms + 0.5, ms, 0.5))


def keeper_of_one_row_and_of_many(directory, clock, workers) -> PlanKeeper:
    """Two devices: one is fast with few rows, the other with many."""
    costs = {"SIM": ({"SIM": 2.0}, 1.0), "SIM.1": ({"SIM.1": 6.0}, 0.0)}
    for row_ms, more_row_ms in costs.values():
        store = store_simulated_profiles(directory, row_ms, more_row_ms=more_row_ms)
    toy = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
    wanted_plan = PlanRequest(toy, (), True, Exactness.BIT, 1, 1, PlacementSection())
    running = name_workers(propose_here(wanted_plan, store, {}))
    return PlanKeeper(running, workers, Making(), drift_after(10.0, 1e9, FIRST_PAUSE_S), clock)


@pytest.mark.parametrize(("copies", "fits"), [(1.5, False), (2.5, True)])
def test_a_worker_is_exchanged_on_its_device_only_where_both_have_room(tmp_path, copies, fits):
    running = first_plan(tmp_path, {"SIM": 2.0})
    (replica,) = running.plan.replicas
    (shard,) = replica.shards
    (device,) = (device for device in running.cluster.devices if device.id == shard.device)
    room = round(copies * shard.memory.total / (1.0 - running.wanted.constraints.keep_free))
    other = replace(replica, shards=(replace(shard, threads=shard.threads + 1),))
    for coming, alive, may in ((other, [replica], fits), (other, [], True), (replica, [replica], True)):
        proposal = replace(
            running,
            cluster=replace(running.cluster, devices=(replace(device, memory_bytes=room),)),
            plan=replace(running.plan, replicas=(coming,)),
        )
        targets, planned = name_workers(running).targets, name_workers(proposal, {"threads": coming.shards[0].threads})
        if coming is replica:
            targets = planned.targets
        if may:
            refuse_crowding(alive, targets, planned)
            continue
        with pytest.raises(NoRoomBeside, match=f"{shard.device} has no room for another worker beside what runs"):
            refuse_crowding(alive, targets, planned)


async def test_the_requests_at_once_that_its_own_rounds_have_decide(tmp_path):
    workers, clock = Workers(), Clock()
    plan_keeper = keeper_of_one_row_and_of_many(tmp_path, clock, workers)
    assert [one.shards[0].device for one in plan_keeper.proposal.plan.replicas] == ["here/SIM"]
    rounds_of_many(plan_keeper, 1, 400, 50.0)
    assert plan_keeper.view().plans == 0
    assert plan_keeper.asked_now.request.placement.concurrency == 1
    rounds_of_many(plan_keeper, 8, 400, 50.0)
    assert plan_keeper.asked_now.request.placement.concurrency >= 2
    await until(plan_keeper, plans=1)
    for _ in range(20):
        clock.now_s += 2 * FIRST_PAUSE_S
        rounds_of_many(plan_keeper, 8, 400, 50.0)
        await plan_keeper.wait_planned()
    assert plan_keeper.asked_now.request.placement.concurrency == 8
    assert [one.shards[0].device for one in plan_keeper.proposal.plan.replicas] == ["here/SIM.1"]
    assert workers.replaced == ["here/SIM.1"]
    for _ in range(40):
        clock.now_s += 3600.0
        rounds_of_many(plan_keeper, 1, 400, 50.0)
        await plan_keeper.wait_planned()
    assert workers.replaced == ["here/SIM.1", "here/SIM"]


def keeper_of_unlike(directory, workers, clock, prices, powers=(1.0, 1.0), **placement) -> PlanKeeper:
    """Two devices, of which the second takes 2.5 times as long a round, with their prices and powers."""
    first = first_plan(directory, {"SIM": 2.0, "SIM.1": 5.0})
    devices = tuple(
        replace(one, price_per_hour=price, power_w=power)
        for one, price, power in zip(first.cluster.devices, prices, powers, strict=True)
    )
    wanted_plan = replace(first.request, placement=PlacementSection(**placement))
    running = name_workers(build_proposal(replace(first.cluster, devices=devices), wanted_plan, first.behind))
    return PlanKeeper(running, workers, Making(), drift_after(0.2, 3.0, FIRST_PAUSE_S), clock)


async def until(plan_keeper: PlanKeeper, plans: int) -> None:
    for _ in range(1000):
        if plan_keeper.view().plans >= plans and plan_keeper._task is None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never planned {plans} times: {plan_keeper.view()}")


async def until_planning(plan_keeper: PlanKeeper) -> None:
    for _ in range(10):
        if plan_keeper._task is not None:
            return
        await asyncio.sleep(0)
    raise AssertionError("no plan is made")


async def test_rounds_as_predicted_change_nothing(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    rounds(plan_keeper, 10 * PATIENCE, 2.3)
    await asyncio.sleep(0)
    assert (plan_keeper.view().plans, workers.replaced) == (0, [])
    assert plan_keeper.view().ratio == pytest.approx(2.3 / 2.2, rel=0.05)
    assert plan_keeper.view().measured_tokens_per_s == pytest.approx(2 / 2.8 * 1e3)


async def test_a_worker_is_replaced_when_its_device_turns_out_to_be_the_slower_one(tmp_path):
    workers, clock = Workers(), Clock()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers)
    predicted = plan_keeper.view().predicted_tokens_per_s
    rounds(plan_keeper, 2 * PATIENCE, 20.0)
    await until(plan_keeper, 1)
    assert workers.replaced == ["here/SIM.1"]
    view = plan_keeper.view()
    assert view.moves == 1
    assert view.predicted_tokens_per_s < predicted
    assert view.rounds == 0, "the new plan is compared from its beginning"
    rounds(plan_keeper, 4 * PATIENCE, 5.2)
    await asyncio.sleep(0)
    assert plan_keeper.view().plans == 1


async def test_where_nothing_better_is_there_costs_are_corrected_and_the_worker_stays(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    rounds(plan_keeper, 2 * PATIENCE, 3.5)
    await until(plan_keeper, 1)
    assert workers.replaced == []
    assert "with corrected costs" in plan_keeper.view().last
    rounds(plan_keeper, 4 * PATIENCE, 3.5)
    assert plan_keeper.view().ratio == pytest.approx(1.0, abs=0.1), "the correction is what rounds take"
    assert plan_keeper.view().plans == 1


@pytest.mark.parametrize("pause_s", [FIRST_PAUSE_S, 3.0])
async def test_plans_do_not_follow_each_other_at_once(tmp_path, pause_s):
    workers, clock = Workers(), Clock()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers, pause_s=pause_s)
    rounds(plan_keeper, 2 * PATIENCE, 20.0)
    await until(plan_keeper, 1)
    rounds(plan_keeper, 3 * PATIENCE, 60.0)
    await asyncio.sleep(0.05)
    assert plan_keeper.view().plans == 1, "too soon"
    clock.now_s += pause_s
    rounds(plan_keeper, 1, 60.0)
    await until(plan_keeper, 2)
    assert workers.replaced == ["here/SIM.1", "here/SIM"]


async def test_after_a_quiet_time_a_plan_follows_as_soon_as_the_first_ones_did(tmp_path):
    workers, clock = Workers(), Clock()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers, pause_s=1.0)
    for count in range(1, 5):  # each pause is twice as long
        plan_keeper.observe_health({Part("device", "here/SIM"): PartHealth(0.0, "gone")} if count % 2 else {})
        clock.now_s += 2.0**count
        await until(plan_keeper, count)
    clock.now_s += 100.0
    plan_keeper.observe_health({Part("device", "here/SIM"): PartHealth(0.0, "gone")})
    await until(plan_keeper, 5)
    clock.now_s += 1.0
    plan_keeper.observe_health({})
    await until(plan_keeper, 6)


async def test_a_plan_may_need_another_number_of_replicas_which_are_told_apart(tmp_path):
    workers, clock = Workers(numbers=[3, 1]), Clock()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers, replicas=2)
    assert len(plan_keeper.proposal.plan.replicas) == 1, "two rows in one forward cost no more than one"
    rounds(plan_keeper, 2 * PATIENCE, 9.0)
    await until(plan_keeper, 1)
    rounds(plan_keeper, 2 * PATIENCE, 5.2, engine=1 if len(plan_keeper.proposal.plan.replicas) == 2 else 3)
    assert plan_keeper.view().rounds == 2 * PATIENCE
    rounds(plan_keeper, 5, 5.2, engine=0)
    assert plan_keeper.view().rounds == 2 * PATIENCE, "nobody's any more"


async def test_a_profile_that_does_not_hold_for_long_is_marked_once_against_what_it_said_itself(tmp_path):
    making = Making()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 50.0}, Clock(), Workers(), making)
    rounds(plan_keeper, 2 * PATIENCE, 6.6)
    await until(plan_keeper, 1)
    assert making.marked == [], "3 s of rounds are not over"
    rounds(plan_keeper, 10 * PATIENCE, 6.6)
    for _ in range(1000):  # a thread marks it
        if plan_keeper.view().drifted:
            break
        await asyncio.sleep(0.01)
    assert plan_keeper.view().ratio == pytest.approx(1.0, abs=0.1), "corrected costs hold"
    ((profile, ratio),) = making.marked
    assert profile == "simulated device SIM SIM"
    assert ratio == pytest.approx(6.6 / 2.2, rel=0.05)
    assert plan_keeper.view().drifted == ("simulated device SIM SIM has drifted",)


async def test_a_new_worker_that_does_not_start_leaves_the_old_one(tmp_path):
    workers = Workers(refuses=True)
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    rounds(plan_keeper, 2 * PATIENCE, 20.0)
    await until(plan_keeper, 1)
    assert plan_keeper.view().moves == 0
    assert "the new worker does not start" in plan_keeper.view().last
    assert plan_keeper.proposal.plan.replicas[0].shards[0].device == "here/SIM"


async def test_rounds_that_read_prompts_say_nothing(tmp_path):
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), Workers())
    for _ in range(200):
        plan_keeper.observe_round(RoundReport([Delta("r", [1])], 1, 300, 0, 0, 0, [], 90.0, 90.0, 0.0))
        plan_keeper.observe_round(RoundReport([], 1, 4, 0, 0, 0, [], 90.0, 90.0, 0.0))
    assert plan_keeper.view().rounds == 0


async def test_a_device_that_refuses_work_is_planned_without_and_with_it_again_when_it_is_back(tmp_path):
    workers, clock = Workers(), Clock()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers)
    part = Part("device", "here/SIM")
    plan_keeper.observe_health({part: PartHealth(0.5, "it may be lost")})
    assert plan_keeper.view().plans == 0, "what is suspect is no reason to move"
    plan_keeper.observe_health({part: PartHealth(0.0, "device here/SIM is open: lost")})
    await until(plan_keeper, 1)
    assert workers.replaced == ["here/SIM.1"]
    rejected = {one.what: one.why for one in plan_keeper.proposal.plan.rejected}
    assert rejected["here/SIM"] == "device here/SIM is open: lost"
    clock.now_s += 10 * FIRST_PAUSE_S
    plan_keeper.observe_health({})
    await until(plan_keeper, 2)
    assert workers.replaced == ["here/SIM.1", "here/SIM"]


async def test_where_no_other_device_is_there_the_plan_stays_and_says_why(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0}, Clock(), workers)
    plan_keeper.observe_health({Part("device", "here/SIM"): PartHealth(0.0, "device here/SIM is open: lost")})
    await until(plan_keeper, 1)
    assert not workers.replaced
    assert "kept, though here/SIM refuses work" in plan_keeper.view().last


def sample_others(**others: float) -> TellLoads:
    """What other programs take of devices."""
    loads = {f"here/{name.replace('_', '.')}": DeviceLoad(share, share) for name, share in others.items()}
    return TellLoads(loads, loads)


def sample_for(plan_keeper: PlanKeeper, clock: Clock, seconds: int, **others: float) -> None:
    for _ in range(seconds):
        clock.now_s += 1.0
        plan_keeper.observe_loads(sample_others(**others))


async def test_a_load_that_lasts_moves_the_target_and_it_comes_back_when_that_is_gone(tmp_path):
    workers, clock = Workers(), Clock()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 3.0}, clock, workers)
    sample_for(plan_keeper, clock, 60, SIM=0.0, SIM_1=0.0)
    sample_for(plan_keeper, clock, 9, SIM=0.6, SIM_1=0.0)
    await asyncio.sleep(0)
    assert (plan_keeper.view().plans, workers.replaced) == (0, []), "it has not lasted yet"
    sample_for(plan_keeper, clock, 3, SIM=0.6, SIM_1=0.0)
    await until(plan_keeper, 1)
    assert workers.replaced == ["here/SIM.1"]
    sample_for(plan_keeper, clock, 12, SIM=0.6, SIM_1=0.0)
    await asyncio.sleep(0)
    assert plan_keeper.view().plans == 1, "that is what it was planned with"
    sample_for(plan_keeper, clock, 60, SIM=0.0, SIM_1=0.0)
    await until(plan_keeper, 2)
    assert workers.replaced == ["here/SIM.1", "here/SIM"]


async def test_a_load_that_makes_nothing_else_better_moves_nothing(tmp_path):
    workers, clock = Workers(), Clock(100.0)
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 9.0}, clock, workers)
    sample_for(plan_keeper, clock, 40, SIM=0.5, SIM_1=0.0)
    await until(plan_keeper, 1)
    sample_for(plan_keeper, clock, 40, SIM=0.5, SIM_1=0.0)
    await asyncio.sleep(0)
    assert (plan_keeper.view().plans, workers.replaced) == (1, [])
    assert plan_keeper.view().predicted_tokens_per_s == pytest.approx(keeper_rate(tmp_path, 0.5), rel=0.01)


def keeper_of_disturbed(directory, workers, clock) -> PlanKeeper:
    """Two devices: others took half of the one that is faster all the same, while it was measured."""
    for device, row_ms, others in (("SIM", 2.0, 0.5), ("SIM.1", 3.0, 0.0)):
        store = store_simulated_profiles(directory, {device: row_ms}, others=others)
    toy = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
    wanted_plan = PlanRequest(toy, (), True, Exactness.BIT, 8, 1, PlacementSection())
    running = name_workers(propose_here(wanted_plan, store, {}))
    return PlanKeeper(running, workers, Making(), drift_after(0.2, 3.0, FIRST_PAUSE_S), clock)


async def test_what_others_took_while_a_profile_was_taken_is_no_reason_to_leave_its_device(tmp_path):
    workers, clock = Workers(), Clock(100.0)
    plan_keeper = keeper_of_disturbed(tmp_path, workers, clock)
    predicted = plan_keeper.view().predicted_tokens_per_s
    assert [one.shards[0].device for one in plan_keeper.proposal.plan.replicas] == ["here/SIM"]
    for _ in range(6):
        rounds(plan_keeper, PATIENCE, 2.2)  # as it was measured, beside the same programs
        sample_for(plan_keeper, clock, 10, SIM=0.5, SIM_1=0.0)
    await asyncio.sleep(0)
    assert plan_keeper.view().ratio == pytest.approx(1.0, abs=0.1)
    assert (plan_keeper.view().plans, workers.replaced) == (0, [])
    plan_keeper.observe_hosts(plan_keeper.first)  # whatever makes it plan again
    await until(plan_keeper, 1)
    assert plan_keeper.proposal.plan.goodput_tokens_per_s == pytest.approx(predicted)
    sample_for(plan_keeper, clock, 100, SIM=0.0, SIM_1=0.0)  # less than that is no news either
    await asyncio.sleep(0)
    assert (plan_keeper.view().plans, workers.replaced) == (1, [])
    sample_for(plan_keeper, clock, 100, SIM=0.8, SIM_1=0.0)
    await until(plan_keeper, 2)
    assert workers.replaced == ["here/SIM.1"], "more than that is"


def keeper_rate(directory, others: float) -> float:
    alone = first_plan(directory, {"SIM": 2.0, "SIM.1": 9.0})
    cluster = apply_loads(alone.cluster, sample_others(SIM=others).means)
    return build_proposal(cluster, alone.request, alone.behind).plan.goodput_tokens_per_s


async def test_rounds_beside_another_program_are_no_drift(tmp_path):
    workers, clock = Workers(), Clock(100.0)
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 2.1}, clock, workers)
    sample_for(plan_keeper, clock, 1, SIM=0.5)
    for _ in range(6):
        rounds(plan_keeper, PATIENCE, 4.4)
        assert plan_keeper.view().rounds % PATIENCE == 0, "they are judged with the next sample"
        sample_for(plan_keeper, clock, 1, SIM=0.5)
    await asyncio.sleep(0)
    assert plan_keeper.view().ratio == pytest.approx(1.0, abs=0.1)
    assert (plan_keeper.view().plans, workers.replaced) == (0, [])


def test_live_state_is_what_a_plan_is_made_of(tmp_path):
    first = first_plan(tmp_path, {"SIM": 2.0, "SIM.1": 3.0})
    seen = DeviceLoad(0.7, 0.4, {}, 100, 60, 15, temperature_c=95.0, temperature_limit_c=95.0, queue_depth=2.5)
    one, other = apply_loads(first.cluster, {"here/SIM": seen}, lambda device: 5).devices
    assert (one.utilisation, one.queue_depth, one.memory_bytes) == (0.4, 2.5, 70)
    assert (one.health, one.health_why) == (0.5, "here/SIM slows itself down: 95 of 95 °C")
    assert other == first.cluster.devices[1]
    again = apply_loads(apply_loads(first.cluster, {"here/SIM": seen}), {})
    assert again.devices[0].utilisation == 0.0, "of what nobody samples nothing is known"


@pytest.mark.parametrize("objective", ["cost", "energy"])
async def test_a_move_is_judged_by_the_objective_of_the_plan(tmp_path, objective):
    """The slow device runs, for it costs a fifth. At 1.4 times its time it still costs less; at 4 times it does not."""
    figures = {"prices": (5.0, 1.0), "powers": (1.0, 1.0)} if objective == "cost" else {}
    figures = figures or {"prices": (1.0, 1.0), "powers": (5.0, 1.0)}
    workers, clock = Workers(), Clock()
    plan_keeper = keeper_of_unlike(tmp_path, workers, clock, objective=objective, **figures)
    assert plan_keeper.proposal.plan.replicas[0].shards[0].device == "here/SIM.1"
    rounds(plan_keeper, 2 * PATIENCE, 7.0)
    await until(plan_keeper, 1)
    assert workers.replaced == []
    assert "still the best" in plan_keeper.view().last
    clock.now_s += 100.0
    rounds(plan_keeper, 4 * PATIENCE, 40.0)
    await until(plan_keeper, 2)
    assert workers.replaced == ["here/SIM"]
    assert ("USD a million tokens" if objective == "cost" else "J a token") in plan_keeper.view().last


async def test_the_same_drift_moves_a_plan_for_throughput(tmp_path):
    workers = Workers()
    plan_keeper = keeper_of_unlike(tmp_path, workers, Clock(), (5.0, 1.0))
    assert plan_keeper.proposal.plan.replicas[0].shards[0].device == "here/SIM"
    rounds(plan_keeper, 2 * PATIENCE, 7.0)
    await until(plan_keeper, 1)
    assert workers.replaced == ["here/SIM.1"]


async def test_a_device_that_refuses_work_is_left_whatever_the_next_one_costs(tmp_path):
    workers = Workers()
    plan_keeper = keeper_of_unlike(tmp_path, workers, Clock(), (5.0, 1.0), objective="cost")
    plan_keeper.observe_health({Part("device", "here/SIM.1"): PartHealth(0.0, "it died")})
    await until(plan_keeper, 1)
    assert workers.replaced == ["here/SIM"]
    view = plan_keeper.view()
    assert view.objective == "cost"
    assert view.price_per_hour == pytest.approx(5.0)
    assert view.predicted_cost_per_million_tokens == pytest.approx(5.0 / 3600 / view.predicted_tokens_per_s * 1e6)


async def test_profiles_that_are_measured_meanwhile_make_another_plan_and_forget_what_was_corrected(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path / "first", {"SIM": 2.0}, Clock(), workers)
    rounds(plan_keeper, 2 * PATIENCE, 8.0)
    await until(plan_keeper, 1)
    assert plan_keeper.view().corrections
    plan_keeper.observe_profiles(first_plan(tmp_path / "then", {"SIM": 8.0, "SIM.1": 3.0}))
    await until(plan_keeper, 2)
    assert workers.replaced == ["here/SIM.1"]
    assert plan_keeper.view().corrections == ()


@pytest.mark.parametrize(("room_mib", "planned"), [(100, "here/SIM.1"), (1000, "here/SIM")])
async def test_where_the_best_plan_has_no_room_beside_what_runs_the_best_that_has_is_taken(tmp_path, room_mib, planned):
    def plan(name: str) -> PlanProposal:
        directory, memory = tmp_path / name, room_mib << 20
        store = store_simulated_profiles(directory, {"SIM": 20.0}, memory_bytes=memory)
        if name == "then":
            store_simulated_profiles(directory, {"SIM": 1.0}, memory_bytes=memory, weights="int8")
            store_simulated_profiles(directory, {"SIM.1": 3.0}, memory_bytes=memory)
        toy = model_at_hand("simulated:toy", "toy", directory, "auto", directory)
        return propose_here(PlanRequest(toy, (), True, Exactness.BIT, 8, 1, PlacementSection(concurrency=1)), store, {})

    workers = Workers()
    running = name_workers(plan("first"))
    plan_keeper = PlanKeeper(running, workers, Making({"new": True}), drift_after(0.2, 3.0, FIRST_PAUSE_S), Clock())
    plan_keeper.observe_profiles(plan("then"))
    assert await plan_keeper.wait_planned()
    assert workers.replaced == [planned]


async def test_a_plan_by_a_disturbed_profile_says_so_until_it_is_measured_again(tmp_path):
    workers = Workers()
    running = name_workers(first_plan(tmp_path / "first", {"SIM": 2.0}, others=0.5))
    plan_keeper = PlanKeeper(running, workers, Making(), drift_after(0.2, 3.0, FIRST_PAUSE_S), Clock())
    (told,) = plan_keeper.view().doubts
    assert told == "here/SIM: the profile of toy in simulated: other programs took 50% of it while it was measured"
    assert running.proposal.plan.replicas[0].prediction.error == pytest.approx(0.52)
    plan_keeper.observe_profiles(first_plan(tmp_path / "then", {"SIM": 2.0}, others=0.0))
    await until(plan_keeper, 1)
    assert plan_keeper.view().doubts == ()
    assert workers.replaced == []


def lacks(device: str, why: str = "it is not installed", **model: object) -> TellLacking:
    return TellLacking(WorkerSpec("w", "", {"model": {"adapter": "simulated", **model}}, device=device), why)


async def test_what_turns_out_to_be_lacking_is_left_out_of_this_plan_and_of_those_that_follow(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    first = plan_keeper.proposal
    assert not await plan_keeper.wait_planned(), "nothing is under way"
    plan_keeper.observe_lacking(lacks("SIM"))
    assert await plan_keeper.wait_planned()
    assert workers.replaced == ["here/SIM.1"]
    plan_keeper.observe_lacking(lacks("SIM"))
    assert not await plan_keeper.wait_planned(), "that is known"
    plan_keeper.observe_hosts(first)
    assert await plan_keeper.wait_planned()
    assert workers.replaced == ["here/SIM.1"]
    rounds(plan_keeper, 1, 5.2)  # its profile has another name now


async def test_where_nothing_else_is_left_the_plan_stays_and_says_why(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0}, Clock(), workers)
    plan_keeper.observe_lacking(lacks("SIM"))
    assert await plan_keeper.wait_planned()
    assert workers.replaced == []
    assert "kept, though here/SIM has no simulated: " in plan_keeper.view().last


async def test_a_plan_that_is_being_made_is_followed_by_one_that_knows_what_is_lacking(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0, "SIM.2": 9.0}, Clock(), workers)
    plan_keeper.observe_lacking(lacks("SIM"))
    await until_planning(plan_keeper)
    plan_keeper.observe_lacking(lacks("SIM.1"))
    assert await plan_keeper.wait_planned()
    assert workers.replaced[-1] == "here/SIM.2"
    assert plan_keeper.view().plans == 2


async def test_reasons_that_come_while_a_plan_is_made_each_have_their_plan_and_those_of_one_kind_one(tmp_path):
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0, "SIM.2": 9.0}, Clock(), Workers())
    first = plan_keeper.first
    plan_keeper.observe_profiles(first)
    await until_planning(plan_keeper)
    for _ in range(3):
        plan_keeper.observe_profiles(first)
        plan_keeper.observe_hosts(first)
    assert await plan_keeper.wait_planned()
    assert plan_keeper.view().plans == 3
    assert not await plan_keeper.wait_planned()


async def test_what_works_again_waits_for_its_pause_and_is_planned_with_what_is_known_then(tmp_path):
    clock, workers = Clock(), Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, clock, workers, pause_s=0.5)
    refusing = {Part("device", "here/SIM"): PartHealth(0.0, "gone")}
    plan_keeper.observe_health(refusing)
    assert await plan_keeper.wait_planned()
    plan_keeper.observe_health({})
    await asyncio.sleep(0.05)
    assert (plan_keeper.view().plans, workers.replaced) == (1, ["here/SIM.1"]), "too soon"
    clock.now_s += 100.0
    assert await plan_keeper.wait_planned()
    assert workers.replaced == ["here/SIM.1", "here/SIM"]
    for unwell in (refusing, {}):  # both are known before anything is planned
        plan_keeper.observe_health(unwell)
    assert await plan_keeper.wait_planned()
    assert plan_keeper.view().plans == 3
    plan_keeper.observe_health(refusing)
    await plan_keeper.close()
    assert not await plan_keeper.wait_planned(), "nothing waits any more"


async def test_nobody_knows_which_of_several_shards_lacks_a_runtime(tmp_path):
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), Workers())
    plan_keeper.observe_lacking(lacks("SIM", shards=[{"adapter": "simulated"}]))
    assert not await plan_keeper.wait_planned()


def refuse(plan_keeper: PlanKeeper, number: int = 0) -> TellRefused:
    """Its device refuses a worker of the running plan."""
    told = TellRefused(plan_keeper.running.targets[number], "it takes no such model")
    plan_keeper.observe_refused(told)
    return told


@settings(max_examples=20, deadline=None)
@given(rows_ms=st.lists(st.sampled_from([2.0, 3.0, 5.0, 9.0]), min_size=1, max_size=4), hosts_come=st.booleans())
def test_no_plan_goes_back_to_where_a_worker_was_refused(tmp_path_factory, rows_ms, hosts_come):
    async def refuse_all() -> None:
        workers, used = Workers(), []
        devices = {f"SIM.{number}": row_ms for number, row_ms in enumerate(rows_ms)}
        plan_keeper = keeper(tmp_path_factory.mktemp("profiles"), devices, Clock(), workers)
        first = plan_keeper.proposal
        for _ in devices:
            used.append(plan_keeper.running.targets[0].name)
            refuse(plan_keeper)
            assert await plan_keeper.wait_planned()
            if hosts_come:
                plan_keeper.observe_hosts(first)
            else:
                plan_keeper.observe_profiles(first)
            assert await plan_keeper.wait_planned()
        assert sorted(used) == sorted(f"here/{device}" for device in devices)
        assert workers.replaced == used[1:]
        assert "kept, though" in plan_keeper.view().last, "nothing is left"
        for name in used:
            assert any(line.startswith(f"{name}: simulated is left out there: ") for line in plan_keeper.first.assumed)

    asyncio.run(refuse_all())


async def test_what_was_refused_counts_for_nothing_where_another_plan_is_weighed(tmp_path):
    workers = Workers()
    plan_keeper = keeper(tmp_path / "first", {"SIM": 2.0}, Clock(), workers)
    refuse(plan_keeper)
    assert await plan_keeper.wait_planned()
    assert workers.replaced == []
    plan_keeper.observe_profiles(first_plan(tmp_path / "then", {"SIM": 2.0, "SIM.1": 40.0}))
    assert await plan_keeper.wait_planned()
    assert workers.replaced == ["here/SIM.1"], "it is slower than what the other was to be, and it serves"


async def test_a_move_that_is_refused_is_not_tried_again(tmp_path):
    workers = Workers(refuses=True)
    plan_keeper = keeper(tmp_path / "first", {"SIM": 9.0}, Clock(), workers)
    then = first_plan(tmp_path / "then", {"SIM": 9.0, "SIM.1": 2.0, "SIM.2": 5.0})
    plan_keeper.observe_profiles(then)
    assert await plan_keeper.wait_planned()
    coming = plan_keeper.running.targets[0]
    plan_keeper.observe_refused(
        TellRefused(msgspec.structs.replace(coming, name="here/SIM.1", device="SIM.1"), "it is full")
    )
    workers.refuses = False
    assert await plan_keeper.wait_planned()
    assert workers.replaced == ["here/SIM.2"]


async def test_a_worker_of_another_configuration_says_nothing_of_this_plan(tmp_path):
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), Workers())
    plan_keeper.observe_refused(TellRefused(lacks("SIM", kv_cache=1).spec, "it is too much"))
    assert not await plan_keeper.wait_planned()


def tell_memory(plan_keeper: PlanKeeper, free_bytes: int) -> None:
    """The device that was planned first has so much free memory."""
    loads = {"here/SIM": DeviceLoad(0.0, 0.0, memory_total_bytes=1 << 30, memory_free_bytes=free_bytes)}
    plan_keeper.observe_loads(TellLoads(loads, loads))


@pytest.mark.parametrize(("free_bytes", "replaced"), [(1 << 10, ["here/SIM.1"]), (1 << 30, [])])
async def test_a_worker_that_finds_no_memory_is_placed_by_what_is_free(tmp_path, free_bytes, replaced):
    workers = Workers()
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), workers)
    tell_memory(plan_keeper, free_bytes)
    plan_keeper.observe_starved(TellStarved(lacks("SIM", kv_cache=1).spec))
    assert not await plan_keeper.wait_planned(), "it is no worker of this plan"
    plan_keeper.observe_starved(TellStarved(plan_keeper.running.targets[0]))
    assert await plan_keeper.wait_planned()
    assert (workers.replaced, plan_keeper.view().plans) == (replaced, 1), "a slower device that has room serves more"


@pytest.mark.parametrize("changed", [False, True])
async def test_what_was_refused_is_tried_again_when_workers_are_started_in_another_way(tmp_path, changed):
    plan_keeper = keeper(tmp_path, {"SIM": 2.0, "SIM.1": 5.0}, Clock(), Workers())
    first, way = plan_keeper.running, {"kv_cache": 1} if changed else {}
    refuse(plan_keeper)
    assert await plan_keeper.wait_planned()
    adjusted = await plan_keeper.adjust(name_workers(first.proposal, way), Making(way))
    after = PlanKeeper(adjusted, Workers(), Making(way), drift_after(0.2, 3.0), Clock())
    after.succeed(plan_keeper, first.proposal)
    after.observe_profiles(first.proposal)
    assert await after.wait_planned()
    assert [one.name for one in after.running.targets] == ["here/SIM" if changed else "here/SIM.1"]

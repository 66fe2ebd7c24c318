"""Pools of unlike replicas: shares as routing has them, no worse than a part of the pool, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from policies.planning.merit import sum_merits
from policies.planning.placement import plan_placement
from policies.planning.plan import (
    Constraints,
    Device,
    Host,
    Inventory,
    ModelFacts,
    NoPlan,
    Objective,
    Option,
    Plan,
    PlanGoal,
    Role,
    Workload,
)
from policies.planning.pool import share_requests
from tests.policies.placing import clusters, loads

GIB = 1 << 30
FEW = settings(max_examples=40)
objectives = st.sampled_from(Objective)
curves = st.lists(
    st.lists(st.floats(0.0, 5.0), min_size=13, max_size=13).map(lambda steps: [sum(steps[:n]) for n in range(1, 14)]),
    min_size=1,
    max_size=4,
)


@given(curves, st.integers(0, 12))
def test_no_request_would_end_sooner_on_another_replica(ends: list[list[float]], requests: int) -> None:
    """`ends[i][n - 1]`: when one of n requests ends on replica i."""
    shares = share_requests([lambda n, end=end: end[n - 1] for end in ends], requests)  # type: ignore[misc]
    assert sum(shares) == requests
    for end, share in zip(ends, shares, strict=True):
        others = [other[count] for other, count in zip(ends, shares, strict=True) if other is not end]
        assert not share or end[share - 1] <= min(others, default=float("inf")) + 1e-9


@given(st.lists(st.floats(0.5, 20.0), min_size=1, max_size=40), st.integers(1, 4096))
def test_shares_of_many_requests_sum_to_the_load_and_favour_the_fast(slopes: list[float], requests: int) -> None:
    shares = share_requests([lambda n, slope=slope: slope * n for slope in slopes], requests)  # type: ignore[misc]
    assert sum(shares) == requests
    lot = max(1, requests // max(64, 4 * len(slopes)))
    for slope, share in zip(slopes, shares, strict=True):
        assert all(slope > other or share >= count - lot for other, count in zip(slopes, shares, strict=True))


def merit_of(plan: Plan) -> float:
    return sum_merits(plan.objective, [replica.prediction for replica in plan.replicas])[0]


def plan_or_none(cluster: Inventory, wish: PlanGoal) -> Plan | None:
    """Return the plan; None where there is none."""
    try:
        return plan_placement(cluster, wish)
    except NoPlan:
        return None


def without_device(cluster: Inventory, name: str) -> Inventory:
    return replace(cluster, devices=tuple(device for device in cluster.devices if device.id != name))


@FEW
@given(clusters(memory_mib=(60, 500)), loads(), objectives, st.integers(1, 12), st.data())
def test_another_device_never_makes_a_plan_worse(
    cluster: Inventory, load: Workload, objective: Objective, requests: int, data: st.DataObject
) -> None:
    drafters = tuple(drafter for drafter in load.drafters if drafter.model is None)
    load = replace(load, concurrency=requests, drafters=drafters)
    wish = PlanGoal(load, Constraints(sharding="never", max_replicas=4), objective=objective)
    every = plan_or_none(cluster, wish)
    fewer = plan_or_none(without_device(cluster, data.draw(st.sampled_from(cluster.devices)).id), wish)
    if fewer is not None:
        assert every is not None
        assert merit_of(every) >= merit_of(fewer) * (1 - 1e-9)


@FEW
@given(clusters(memory_mib=(60, 500)), loads(), objectives, st.integers(1, 12))
def test_a_pool_is_never_worse_than_one_of_its_devices_alone(
    cluster: Inventory, load: Workload, objective: Objective, requests: int
) -> None:
    load = replace(load, concurrency=requests)
    wish = PlanGoal(load, Constraints(sharding="never", max_replicas=4), objective=objective)
    plan = plan_or_none(cluster, wish)
    if plan is None:
        return
    assert sum(replica.prediction.requests or 0 for replica in plan.replicas) == requests
    assert all(replica.prediction.requests for replica in plan.replicas)
    for replica in plan.replicas:
        alone = replace(wish.constraints, max_replicas=1, pin_target=(replica.shards[0].device,))
        single = plan_placement(cluster, replace(wish, constraints=alone))
        assert merit_of(plan) >= merit_of(single) * (1 - 1e-9)


@FEW
@given(
    clusters(memory_mib=(60, 500)),
    loads(),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from(["never", "allowed"]),
)
def test_a_replica_decodes_no_more_at_once_than_it_may(
    cluster: Inventory, load: Workload, requests: int, most: int, sharding: Literal["never", "allowed"]
) -> None:
    load = replace(load, concurrency=requests)
    wish = PlanGoal(load, Constraints(sharding=sharding, max_replicas=4))
    plan = plan_or_none(cluster, replace(wish, workload=replace(load, max_running=most)))
    assert plan is None or all(replica.prediction.sequences <= most for replica in plan.replicas)
    if most >= requests:
        assert plan == plan_or_none(cluster, wish)


TARGET = ModelFacts("target", 8)


def host_with(name: str, runtime: str, steps: tuple[float, ...], **more: float) -> tuple[Host, Device, Option]:
    """Return a host with a device whose forwards of 1, 2, 4, 8 and 16 rows take so long (ms)."""
    cost = StepCost((1.0, 2.0, 4.0, 8.0, 16.0), steps, position_us=0.0)
    cost = replace(cost, prefill=StepCost((1.0, 512.0), (steps[0], more.pop("prompt_ms", 50.0))))
    option = Option(name, Role.TARGET, "target", runtime, "as_file", cost, layer_bytes=1.0, kv_bytes_per_token=0.0)
    return Host(name), Device(f"{name}/CPU", name, "cpu", name, GIB, **more), option  # type: ignore[arg-type]


def cluster_of(*known: tuple[Host, Device, Option]) -> Inventory:
    hosts, devices, options = (tuple(part) for part in zip(*known, strict=True))
    return Inventory(hosts, devices, options)


def goal(requests: int, objective: Objective = Objective.THROUGHPUT, prompt: int = 16) -> PlanGoal:
    load = Workload(TARGET, (), requests, prompt, 256)
    return PlanGoal(load, Constraints(max_replicas=4, sharding="never"), objective=objective)


# One request alone gets 89 tokens a second of the one, and 39 of the other; two of the fast one 180 together.
FAST = host_with("fast", "openvino_rt", (11.2, 11.2, 16.0, 30.0, 60.0))
SLOW = host_with("slow", "onnx_rt", (25.6, 30.0, 40.0, 70.0, 140.0))


def test_a_device_that_routing_would_send_nothing_is_left_out_and_promised_nothing() -> None:
    plan = plan_placement(cluster_of(FAST, SLOW), goal(2))
    assert [replica.shards[0].device for replica in plan.replicas] == ["fast/CPU"]
    assert plan.goodput_tokens_per_s == pytest.approx(2 / 11.2e-3, rel=0.05)
    (why,) = [rejection.why for rejection in plan.rejected if rejection.what == "slow/CPU"]
    assert why.startswith("left out: none of 2 requests would go to it")


@pytest.mark.parametrize("requests", [8, 12, 16])
def test_a_faster_replica_takes_more_and_the_pool_serves_more_than_either(requests: int) -> None:
    plan = plan_placement(cluster_of(FAST, SLOW), goal(requests))
    fast, slow = (replica.prediction for replica in plan.replicas)
    assert fast.requests is not None
    assert slow.requests is not None
    assert (fast.sequences, slow.sequences) == (fast.requests, slow.requests)
    assert fast.requests > slow.requests > 0
    alone = plan_placement(cluster_of(FAST), goal(requests))
    assert plan.goodput_tokens_per_s > alone.goodput_tokens_per_s
    assert plan.pool.tpot_p95_ms <= alone.pool.tpot_p95_ms * (1 + 1e-9)
    assert plan.groups.keys() == {"openvino_rt as_file on fast", "onnx_rt as_file on slow"}


def test_a_device_whose_requests_begin_late_is_left_out_where_it_brings_few_tokens() -> None:
    """It decodes fast and reads prompts slowly: as soon as on the other one its requests end, and begin 3 s later."""
    even = host_with("even", "openvino_rt", (10.0, 10.0, 12.0, 15.0, 20.0))
    late = host_with("late", "onnx_rt", (8.0, 16.0, 32.0, 64.0, 128.0), prompt_ms=24_000.0)
    plan = plan_placement(cluster_of(even, late), goal(16, prompt=64))
    (why,) = [rejection.why for rejection in plan.rejected if rejection.what == "late/CPU"]
    assert [replica.shards[0].device for replica in plan.replicas] == ["even/CPU"]
    assert "for 1 of 16 requests" in why
    assert "which is less than 95 % of requests lose: TPOT" in why
    assert "TTFT" in why


def test_for_latency_a_device_that_makes_tokens_later_is_left_out_whatever_it_brings() -> None:
    """Four requests are faster apart, on two alike devices; the slow one would take one of them."""
    twin = host_with("twin", "openvino_rt", (11.2, 11.2, 16.0, 30.0, 60.0))
    mixed = cluster_of(FAST, twin, host_with("slow", "onnx_rt", (15.0, 30.0, 40.0, 70.0, 140.0)))
    plan = plan_placement(mixed, goal(5, Objective.LATENCY))
    every = plan_placement(mixed, goal(5))
    assert merit_of(plan) >= 1e3 / every.pool.tpot_p95_ms

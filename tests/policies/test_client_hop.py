"""The way between the API and a target on another host: paid for the first token, and for no later one."""

from __future__ import annotations

import pytest

from device_profiles.cost import StepCost
from device_profiles.link import LinkProfile
from policies.planning.placement.planner import plan_placement
from policies.planning.plan import (
    Constraints,
    Device,
    Host,
    Inventory,
    Option,
    PlanGoal,
    Role,
    Workload,
)
from tests.policies.placing import MIB, TARGET

LOAD = Workload(TARGET, (), 1, 500, 100)


def build_cluster(edge_ms: float, centre_ms: float) -> Inventory:
    """An edge with the API and a centre, 12 ms apart, whose devices take so long for a forward."""
    devices = tuple(Device(f"{host}/cpu", host, "cpu", host, 4000 * MIB) for host in ("edge", "centre"))
    options = tuple(
        Option(host, Role.TARGET, TARGET.name, "a", "as_file", StepCost((1.0, 16.0), (ms, ms)), MIB, 0.0)
        for host, ms in (("edge", edge_ms), ("centre", centre_ms))
    )
    hosts = (Host("edge", "", 4), Host("centre", "", 4))
    return Inventory(hosts, devices, options, (LinkProfile("edge", "centre", 12.0, 1e6),))


def test_a_target_elsewhere_pays_the_way_for_its_first_token_alone() -> None:
    cluster, limits = build_cluster(20.0, 10.0), Constraints(standby=False)
    here = plan_placement(cluster, PlanGoal(LOAD, limits, client_host="centre")).replicas[0].prediction
    far = plan_placement(cluster, PlanGoal(LOAD, limits, client_host="edge")).replicas[0].prediction
    assert here.client_ms == 0.0
    assert far.client_ms == pytest.approx(12.0 + 500 * 4 / 1e6 * 1000)
    assert far.ttft_ms == pytest.approx(here.ttft_ms + far.client_ms)
    assert (far.tpot_ms, far.goodput_tokens_per_s) == (here.tpot_ms, here.goodput_tokens_per_s)


def test_an_api_that_is_on_no_host_of_the_plan_adds_nothing() -> None:
    plan = plan_placement(build_cluster(20.0, 10.0), PlanGoal(LOAD, Constraints(standby=False), client_host="here"))
    assert plan.replicas[0].prediction.client_ms == 0.0


@pytest.mark.parametrize("api", ["edge", "centre"])
def test_of_equal_targets_the_one_beside_the_api_is_taken(api: str) -> None:
    goal = PlanGoal(LOAD, Constraints(standby=False), client_host=api)
    found = plan_placement(build_cluster(10.0, 10.0), goal).replicas[0]
    assert (found.shards[0].device, found.prediction.client_ms) == (f"{api}/cpu", 0.0)

"""Each term of a placement's score, and its weight, turns the choice between devices that are equally fast."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from device_profiles.link import LinkProfile
from device_profiles.measured import DeviceRates
from policies.planning.placement import plan_placement
from policies.planning.plan import (
    Constraints,
    DefaultLinks,
    Device,
    DrafterFacts,
    Host,
    Inventory,
    ModelFacts,
    Option,
    PlanGoal,
    Role,
    TermWeights,
    Workload,
)

GIB = 1 << 30
TARGET = ModelFacts("target", 8, 4096.0)
NONE = TermWeights(**{one.name: 0.0 for one in fields(TermWeights)})
SLOWER_BY = 0.02  # within the indifference of this test

WORSE: dict[str, dict[str, Any]] = {
    "health": {"health": 0.4, "health_why": "it failed"},
    "memory_fit": {"memory_bytes": 3 * GIB},
    "bandwidth_headroom": {"rates": DeviceRates(bandwidth_bytes_per_s=2e10)},
    "efficiency": {"power_w": 400.0},
    "queue_depth": {"queue_depth": 6.0},
    "idle_share": {"utilisation": 0.01},
}
"""What makes a device worse in one term, and in tokens per second by less than the indifference."""


def inventory(first: dict[str, Any], ms: float) -> Inventory:
    """Two devices of one kind on two hosts, the first changed."""
    rates = DeviceRates(bandwidth_bytes_per_s=1e12)
    devices = [
        Device(f"host-{name}/gpu", f"host-{name}", "gpu", "gpu", 16 * GIB, rates=rates, power_w=100.0) for name in "ab"
    ]
    option = Option("gpu", Role.TARGET, "target", "a", "as_file", StepCost((1.0, 8.0), (ms, ms)), 50.0 * (1 << 20), 0.0)
    hosts = (Host("host-a"), Host("host-b"))
    return Inventory(hosts, (replace(devices[0], **first), devices[1]), (option,))


def choose(first: dict[str, Any], ms: float, weights: TermWeights) -> str:
    goal = PlanGoal(Workload(TARGET), Constraints(standby=False), replace(weights, indifference=SLOWER_BY))
    return plan_placement(inventory(first, ms), goal).replicas[0].shards[0].device


@pytest.mark.parametrize("term", list(WORSE))
@given(ms=st.floats(2.0, 40.0), weight=st.floats(0.01, 100.0))
def test_a_term_alone_turns_the_choice_and_its_weight_takes_that_back(term: str, ms: float, weight: float) -> None:
    assert choose({}, ms, NONE) == "host-a/gpu", "of equals the first"
    assert choose(WORSE[term], ms, replace(NONE, **{term: weight})) == "host-b/gpu"
    others = {one.name: 1.0 for one in fields(TermWeights) if one.name not in (term, "indifference")}
    kept = choose({}, ms, replace(NONE, **others))
    assert kept == "host-a/gpu"


@given(ms=st.floats(2.0, 40.0), others=st.floats(0.05, 0.9))
def test_what_other_programs_take_turns_the_choice_by_speed_alone(ms: float, others: float) -> None:
    assert choose({"utilisation": others}, ms, NONE) == "host-b/gpu"


@given(ms=st.floats(2.0, 40.0))
def test_compute_headroom_turns_the_choice_between_what_takes_the_same_at_the_planned_load(ms: float) -> None:
    """Four rows take the same; one of the two devices would be faster with fewer."""
    found = inventory({"profile": "steep"}, ms)
    steep = replace(found.options[0], profile="steep", cost=StepCost((1.0, 4.0, 8.0), (ms / 2, ms, 2 * ms)))
    flat = replace(found.options[0], cost=StepCost((1.0, 4.0, 8.0), (ms, ms, 2 * ms)))
    cluster = replace(found, options=(flat, steep))
    load = Workload(TARGET, concurrency=4, prompt_tokens=1)

    def choose_for(weights: TermWeights) -> str:
        goal = PlanGoal(load, Constraints(standby=False), replace(weights, indifference=0.2))
        return plan_placement(cluster, goal).replicas[0].shards[0].device

    assert choose_for(replace(NONE, compute_headroom=1.0)) == "host-b/gpu"
    assert choose_for(NONE) == "host-a/gpu"


@given(ms=st.floats(10.0, 40.0), far_ms=st.floats(0.3, 0.6))
def test_link_cost_turns_the_choice_of_the_draft(ms: float, far_ms: float) -> None:
    """The nearer draft is a little slower: which of them it is, is the term's to say."""
    found = inventory({}, ms)
    drafts = [
        Device(f"host-{name}/npu", f"host-{name}", "npu", f"npu-{name}", 16 * GIB, rates=DeviceRates(), power_w=10.0)
        for name in "ab"
    ]
    quick, near = (
        Option(f"npu-{name}", Role.DRAFT, "small", "a", "as_file", StepCost((1.0, 8.0), (cost, cost)), 1.0, 0.0)
        for name, cost in (("b", 0.01), ("a", 0.01 + far_ms / 4))
    )
    links = (LinkProfile("host-a", "host-b", far_ms, 1e12, "measured"),)
    same_host = DefaultLinks(same_host=LinkProfile("", "", 0.0001, 1e12, "measured"))
    cluster = Inventory(found.hosts, (found.devices[0], *drafts), (*found.options, quick, near), links, same_host)
    load = Workload(TARGET, (DrafterFacts("small", (0.9,), ModelFacts("small", 1)),), depth_bound=2)

    def choose_for(weights: TermWeights) -> str:
        goal = PlanGoal(load, Constraints(standby=False), replace(weights, indifference=0.2))
        draft = plan_placement(cluster, goal).replicas[0].draft
        assert draft is not None
        assert draft.shard is not None
        return draft.shard.device

    assert choose_for(replace(NONE, link_cost=1.0)) == "host-a/npu"
    hungry = replace(drafts[0], power_w=200.0)
    cluster = replace(cluster, devices=(found.devices[0], hungry, drafts[1]))
    assert choose_for(replace(NONE, efficiency=1.0)) == "host-b/npu", "without the term's weight it is the other one"

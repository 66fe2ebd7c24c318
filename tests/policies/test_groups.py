"""Plans of replicas whose bits are unlike: one group where all are to be alike, and told apart elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.planning.placement import plan_placement
from policies.planning.placement.filters import usable
from policies.planning.plan import Constraints, Inventory, NoPlan, Plan, PlanGoal, Role, Workload
from tests.policies.placing import clusters, loads, merit_told

FEW = settings(max_examples=40)
replicas = st.integers(2, 4)


def plan_or_none(cluster: Inventory, wish: PlanGoal) -> Plan | None:
    """Return the plan; None where there is none."""
    try:
        return plan_placement(cluster, wish)
    except NoPlan:
        return None


def list_groups(cluster: Inventory) -> set[str]:
    return {option.group for option in cluster.options if option.role is Role.TARGET}


def keep_group(cluster: Inventory, group: str) -> Inventory:
    """The cluster as it would be if only this group could run the target."""
    kept = [option for option in cluster.options if option.role is not Role.TARGET or option.group == group]
    return replace(cluster, options=tuple(kept))


@FEW
@given(clusters(), loads(), replicas)
def test_where_all_are_to_be_alike_a_plan_is_the_best_of_one_group(
    cluster: Inventory, load: Workload, most: int
) -> None:
    limits = Constraints(sharding="never", max_replicas=most)
    alike = PlanGoal(load, replace(limits, alike=True))
    plan = plan_or_none(cluster, alike)
    others = [
        other
        for group in list_groups(cluster)
        if (other := plan_or_none(keep_group(cluster, group), PlanGoal(load, limits))) is not None
    ]
    if plan is None:
        assert not others
        return
    assert len(plan.groups) == 1
    best = max(merit_told(other, PlanGoal(load, limits)) for other in others)
    assert merit_told(plan, alike) == pytest.approx(best, rel=1e-8)
    left_out = {told.what for told in plan.rejected if "model.alike is true" in told.why}
    able = {option.group for options in usable(cluster, alike).targets.values() for option in options}
    assert bool(left_out) == (len(able) > 1)


@FEW
@given(clusters(), loads(), replicas)
def test_a_plan_over_unlike_replicas_names_its_groups(cluster: Inventory, load: Workload, most: int) -> None:
    plan = plan_or_none(cluster, PlanGoal(load, Constraints(sharding="never", max_replicas=most)))
    if plan is None:
        return
    numbers = sorted(number for group in plan.groups.values() for number in group)
    assert numbers == list(range(len(plan.replicas)))
    caveats = [reason for reason in plan.reasons if "groups of equal bits" in reason]
    assert len(caveats) == (len(plan.groups) > 1)
    assert all(name in caveat for caveat in caveats for name in plan.groups)


@FEW
@given(clusters(), loads(), replicas)
def test_measured_bits_make_one_group_of_unlike_runtimes(cluster: Inventory, load: Workload, most: int) -> None:
    same = replace(cluster, options=tuple(replace(option, bits="abc") for option in cluster.options))
    wish = PlanGoal(load, Constraints(sharding="never", max_replicas=most))
    plan, alike = (
        plan_or_none(same, wish),
        plan_or_none(same, replace(wish, constraints=replace(wish.constraints, alike=True))),
    )
    assert plan == alike
    assert plan is None or list(plan.groups) == ["abc"]

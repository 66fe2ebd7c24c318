"""Who takes over where a device of a plan is lost."""

from dataclasses import replace

import pytest

from policies.planning.placement import plan_placement
from policies.planning.plan import Role
from tests.support.made_clusters import small


@pytest.mark.parametrize("slow", ["another", "zero"])
def test_a_lost_shard_is_taken_over_by_the_fastest_way_that_its_heir_has(slow):
    """Options are weighed in the order of their names, before or behind that of the fast ones."""
    cluster, wish = small(3, devices=6, layers=6)
    targets = [option for option in cluster.options if option.role is Role.TARGET]
    slower = (replace(option, runtime=slow, cost=option.cost.scale_by(3.0)) for option in targets)
    plan = plan_placement(replace(cluster, options=(*cluster.options, *slower)), wish)
    assert len(plan.replicas[0].shards) > 1
    assert plan.standby is not None
    assert [shard.runtime for shard in plan.standby.shards] == ["runtime"]

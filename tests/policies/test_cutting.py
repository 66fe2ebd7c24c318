"""What a cut into shards is predicted to take."""

from dataclasses import replace

import pytest

from device_profiles.profile import Exactness
from policies.planning.placement import plan_placement
from tests.support.made_clusters import build_goal, fleet, small


def test_only_bit_exactness_is_charged_for_rows_that_are_padded():
    cluster, wish = small(0, devices=5, layers=8)

    def predict(exactness, min_rows):
        load = replace(wish.workload, exactness=exactness, drafters=())
        options = tuple(replace(option, min_rows=min_rows) for option in cluster.options)
        plan = plan_placement(replace(cluster, options=options), replace(wish, workload=load))
        assert len(plan.replicas[0].shards) > 1
        return plan.goodput_tokens_per_s

    assert predict(Exactness.BIT, 8) < predict(Exactness.BIT, 1)
    assert predict(Exactness.KERNEL, 8) == predict(Exactness.KERNEL, 1) == predict(Exactness.BIT, 1)


@pytest.mark.parametrize("seed", range(4))
def test_devices_that_are_alike_are_looked_at_once_and_the_plan_is_as_good(seed):
    """With an unnoticeable difference between devices, none is like another, and all are looked at."""
    cluster, goal = fleet(10, 2, seed, per_host=5, busy=False), build_goal(4, max_replicas=1)
    unlike = [replace(device, utilisation=number * 1e-12) for number, device in enumerate(cluster.devices)]
    few, every = (plan_placement(one, goal) for one in (cluster, replace(cluster, devices=tuple(unlike))))
    assert len(few.replicas[0].shards) > 1
    assert few.goodput_tokens_per_s == pytest.approx(every.goodput_tokens_per_s, rel=1e-9)

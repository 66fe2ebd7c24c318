"""What a cut into shards is predicted to take."""

from dataclasses import replace

import pytest

from device_profiles.profile import Exactness
from orchestrator.bench.plan.fleets import small
from policies.planning.placement import plan_placement


@pytest.mark.parametrize(("exactness", "charged"), [(Exactness.BIT, True), (Exactness.KERNEL, False)])
def test_only_bit_exactness_is_charged_for_rows_that_are_padded(exactness, charged):
    cluster, wish = small(0, devices=5, layers=8)
    wish = replace(wish, workload=replace(wish.workload, exactness=exactness, drafters=()))
    one, eight = (
        plan_placement(
            replace(cluster, options=tuple(replace(option, paid_rows=rows) for option in cluster.options)), wish
        )
        for rows in (1, 8)
    )
    assert len(one.replicas[0].shards) > 1
    if charged:
        assert eight.goodput_tokens_per_s < one.goodput_tokens_per_s
    else:
        assert eight.goodput_tokens_per_s == one.goodput_tokens_per_s

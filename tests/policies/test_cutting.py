"""What a cut into shards is predicted to take."""

from dataclasses import replace

from device_profiles.profile import Exactness
from orchestrator.bench.plan.fleets import small
from policies.planning.placement import plan_placement


def test_only_bit_exactness_is_charged_for_rows_that_are_padded():
    cluster, wish = small(0, devices=5, layers=8)

    def predict(exactness, paid_rows):
        load = replace(wish.workload, exactness=exactness, drafters=())
        options = tuple(replace(option, paid_rows=paid_rows) for option in cluster.options)
        found = plan_placement(replace(cluster, options=options), replace(wish, workload=load))
        assert len(found.replicas[0].shards) > 1
        return found.goodput_tokens_per_s

    assert predict(Exactness.BIT, 8) < predict(Exactness.BIT, 1)
    assert predict(Exactness.KERNEL, 8) == predict(Exactness.KERNEL, 1) == predict(Exactness.BIT, 1)

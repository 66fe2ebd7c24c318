"""Which options of which devices are weighed, and why the rest is not."""

from dataclasses import replace

from policies.planning.placement import plan_placement
from policies.planning.plan import Constraints, PlanGoal, Role
from tests.support.made_clusters import small


def test_options_that_need_more_cores_than_their_host_has_are_told():
    cluster, wish = small(1)
    few = cluster.devices[0].host
    roomy = replace(wish.workload, target=replace(wish.workload.target, layers=1))
    hosts = tuple(replace(host, cores=2 if host.name == few else 64) for host in cluster.hosts)
    options = tuple(replace(option, threads=4) for option in cluster.options)
    plan = plan_placement(
        replace(cluster, hosts=hosts, options=options), PlanGoal(roomy, Constraints(sharding="never"))
    )
    explained = {
        rejection.what for rejection in plan.rejected if "threads" in rejection.why and rejection.role is Role.TARGET
    }
    assert explained == {device.id for device in cluster.devices if device.host == few}

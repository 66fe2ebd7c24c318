"""Devices that are alike are placed as if every one of them were looked at."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.planning.placement.filters import usable
from policies.planning.placement.links import links_of
from policies.planning.placement.several import Fleet
from policies.planning.plan import Constraints, Device, Host, Inventory, NoPlan, Objective, PlanGoal
from tests.policies.placing import clusters, loads


@st.composite
def fleets(draw: st.DrawFn) -> Inventory:
    """Each host of a small cluster several times, in up to three zones."""
    one = draw(clusters())
    hosts: list[Host] = []
    devices: list[Device] = []
    for host in one.hosts:
        for copy in range(draw(st.integers(1, 5))):
            name = f"{host.name}-{copy}"
            hosts.append(replace(host, name=name, zone=draw(st.sampled_from(("east", "west", "north")))))
            mine = [device for device in one.devices if device.host == host.name]
            devices += [
                replace(device, id=f"{name}/{device.id}-{twin}", host=name)
                for device in mine
                for twin in range(1 + copy % 2)
            ]
    links = tuple(replace(link, left=f"{link.left}-0", right=f"{link.right}-0") for link in one.links)
    return replace(one, hosts=tuple(hosts), devices=tuple(devices), links=links if draw(st.booleans()) else ())


@settings(max_examples=60, deadline=None)
@given(
    fleet=fleets(),
    load=loads(),
    concurrency=st.integers(1, 24),
    count=st.integers(2, 12),
    objective=st.sampled_from(Objective),
    apart=st.sampled_from(("device", "host", "zone")),
    at_client=st.booleans(),
)
def test_devices_that_are_alike_are_placed_as_if_all_were_looked_at(
    fleet: Inventory, load, concurrency: int, count: int, objective: Objective, apart, at_client: bool
) -> None:
    limits = Constraints(max_replicas=count, replicas_apart=apart, sharding="never")
    client = fleet.hosts[0].name if at_client else ""
    wanted = PlanGoal(replace(load, concurrency=concurrency), limits, objective=objective, client_host=client)
    try:
        left = usable(fleet, wanted)
    except NoPlan:
        return
    grouped, single = (Fleet(left, links_of(fleet), wanted, few=few).place(count) for few in (0, 1000))
    assert [scored.candidate for scored in grouped] == [scored.candidate for scored in single]
    assert [scored.prediction for scored in grouped] == [scored.prediction for scored in single]
    assert [scored.score.total for scored in grouped] == [scored.score.total for scored in single]
    assert [scored.merit for scored in grouped] == [scored.merit for scored in single]

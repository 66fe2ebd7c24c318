"""Planning again for hosts: what was stated, and what hosts lack, holds for every plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.device_load import DeviceLoad
from device_profiles.measured import Hardware
from device_profiles.store import ProfileStore
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.bootstrap.planning import PlanMaking
from orchestrator.machine.devices import SeenDevice
from orchestrator.planning.here import PresentHost, PresentLinks
from orchestrator.planning.proposal import PlanProposal, propose_here, propose_hosts
from orchestrator.planning.stored import load_measured_hardware
from orchestrator.planning.wanted import PlanError, build_request_from_config
from tests.support.config import parse_config
from tests.support.profiles import GIB, store_simulated_profiles

MIB = 1 << 20
RUNTIMES = {"one_rt": ("SIM", 2.0), "other_rt": ("simulated:0", 4.0), "third_rt": ("SIM", 9.0)}
"""What was measured on hosts of one kind: each runtime's name for the device, and how long a row takes."""
KIND = Hardware("simulated", "kind", GIB)
SETS = st.sets(st.sampled_from(sorted(RUNTIMES)))


@dataclass(frozen=True)
class Measured:
    """A store, and the file that it is planned for."""

    store: ProfileStore
    config: ClusterConfig


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    directory = tmp_path_factory.mktemp("profiles")
    for adapter, (device, ms) in RUNTIMES.items():
        store = store_simulated_profiles(directory, {device: ms}, hardware_name="kind", adapter=adapter)
    config = parse_config(
        "model: {source: 'simulated:toy', adapter: auto, device: auto, name: toy, replicas: 2}\n"
        "cluster: {address: 'a:1'}\nplacement: {concurrency: 8}\n",
        Path("c.yaml"),
    )
    return Measured(store, config)


def host(node: str, runtimes: set[str], **stated: int) -> PresentHost:
    """A host that sees its device with these runtimes alone."""
    lacks = {name: f"{name} is not installed" for name in RUNTIMES if name not in runtimes}
    seen = {SeenDevice(name, RUNTIMES[name][0], KIND) for name in runtimes}
    return PresentHost(node, frozenset({KIND}), {"SIM": GIB}, seen=seen, lacks=lacks, stated_bytes=stated)


def call_device(runtimes: set[str]) -> str:
    """What plans call the device of a host: as the runtimes there do."""
    return min((RUNTIMES[name][0] for name in runtimes or RUNTIMES), key=len)


def propose(measured: Measured, *hosts: PresentHost) -> PlanProposal:
    asked = build_request_from_config(measured.config, Path())
    return propose_hosts(asked, measured.store, hosts, PresentLinks())


def plan_again(measured: Measured, first: PlanProposal, loads: Mapping[str, DeviceLoad]) -> PlanProposal:
    return PlanMaking(measured.config, Path()).again(first, {}, [], {}, loads).proposal


@given(near=SETS, far=SETS)
def test_no_plan_takes_a_runtime_where_it_is_lacking_and_each_says_so(measured: Measured, near, far):
    there = {THIS_NODE: near, "10.0.0.2": far}
    lacking = [(node, name) for node, mine in there.items() for name in RUNTIMES if name not in mine]
    hosts = [host(node, mine) for node, mine in there.items()]
    if not near | far:
        with pytest.raises(PlanError) as refused:
            propose(measured, *hosts)
        for node, name in lacking:
            assert f"{node}/{call_device(there[node])}: {name} is left out there: {name} is not installed" in str(
                refused.value
            )
        return
    first = propose(measured, *hosts)
    for proposal in (first, plan_again(measured, first, {})):
        assert proposal.plan.shards
        assert all(shard.runtime in there[shard.host] for shard in proposal.plan.shards)
        for node, name in lacking:
            assert (
                f"{node}/{call_device(there[node])}: {name} is left out there: {name} is not installed"
                in proposal.assumed
            )


@given(
    stated=st.integers(100, 2000),
    free=st.integers(0, 4000),
    ours=st.integers(0, 500),
    name=st.sampled_from(["SIM", "simulated:0"]),
)
def test_a_plan_made_again_fills_no_more_than_is_stated_nor_than_is_there(measured: Measured, stated, free, ours, name):
    first = propose(measured, host("10.0.0.2", set(RUNTIMES), **{name: stated * MIB}))
    assert [one.memory_bytes for one in first.cluster.devices] == [stated * MIB]
    load = DeviceLoad(memory_total_bytes=8 * GIB, memory_free_bytes=free * MIB, memory_ours_bytes=ours * MIB)
    try:
        again = plan_again(measured, first, {"10.0.0.2/SIM": load})
    except PlanError:
        assert min(stated, free + ours) < 200, "this model takes less"
        return
    assert [one.memory_bytes for one in again.cluster.devices] == [min(stated, free + ours) * MIB]
    assert sum(shard.memory.total for shard in again.plan.shards) <= stated * MIB


def test_on_a_device_without_a_stated_bound_a_plan_made_again_may_fill_what_is_there(measured: Measured):
    first = propose(measured, host("10.0.0.2", set(RUNTIMES)))
    load = DeviceLoad(memory_total_bytes=8 * GIB, memory_free_bytes=3 * GIB, memory_ours_bytes=2 * GIB)
    again = plan_again(measured, first, {"10.0.0.2/SIM": load})
    assert [one.memory_bytes for one in again.cluster.devices] == [5 * GIB]


def test_one_machine_is_not_planned_with_a_runtime_that_is_gone_from_it(measured: Measured):
    asked = build_request_from_config(measured.config, Path())
    seen, lacks = {SeenDevice("other_rt", "simulated:0", KIND)}, {"one_rt": "one_rt is not installed"}
    found = propose_here(asked, measured.store, {}, None, seen, lacks)
    assert {one.runtime for one in found.plan.shards} == {"other_rt"}
    assert f"{THIS_NODE}/simulated:0: one_rt is left out there: one_rt is not installed" in found.assumed
    assert f"{THIS_NODE}/simulated:0: third_rt is left out there: it does not see the device" in found.assumed


def test_what_another_library_of_a_runtime_was_measured_with_is_not_planned_with(tmp_path: Path):
    """Two libraries behind one adapter: each is planned with its own figures, whichever was measured last."""
    for day, (version, ms) in enumerate((("ours 1", 2.0), ("theirs 1", 9.0), ("ours 2", 3.0)), start=1):
        store = store_simulated_profiles(
            tmp_path,
            {"SIM": ms},
            measured_at=f"2026-01-0{day}",
            hardware_name="kind",
            version=version,
            adapter="one_rt",
        )

    def find_ms(version: str) -> set[float]:
        found = load_measured_hardware(store, {"one_rt": version} if version else {})
        return {model.cost.row_ms[0] for one in found for model in one.models}

    assert find_ms("ours 1") == {2.0}
    assert find_ms("theirs 1") == {9.0}
    assert find_ms("ours 3") == find_ms("") == {3.0}  # it was updated, and is not yet measured
    assert find_ms("of a build 1") == set()


def test_a_host_without_any_profile_is_named_with_what_it_lacks(measured: Measured):
    bare = PresentHost("10.0.0.3", frozenset(), seen=frozenset(), lacks={"one_rt": "one_rt is not installed"})
    found = propose(measured, host(THIS_NODE, {"one_rt"}), bare)
    assert "10.0.0.3 is left out: no device of it has a profile (one_rt: one_rt is not installed)" in found.assumed

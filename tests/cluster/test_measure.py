"""Who measures what, and which paths are measured together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from device_profiles.measured import Hardware
from orchestrator.daemon.cluster.inventory import (
    HostInventory,
    MissingProfile,
    describe_skew,
    list_differences,
)
from orchestrator.daemon.cluster.measure import MOST_PATHS, pack_paths, sample_paths, share_work
from orchestrator.fitting.worker_options import engine_options
from orchestrator.machine.devices import SeenDevice
from orchestrator.protocol.measuring import ProfileJob
from tests.support.config import parse_config

ENGINE = engine_options(parse_config("model: {source: 'simulated:toy', adapter: simulated}", Path("c.yaml")), Path())


def host_with(*fingerprints: str, role: str = "target", version: str = "1", python: str = "3.11.7") -> HostInventory:
    job = ProfileJob(ENGINE, ENGINE.model, "target" if role == "target" else "draft")
    missing = tuple(MissingProfile(job, one, 1, "digest") for one in fingerprints)
    device = SeenDevice("openvino_rt", "CPU", Hardware("cpu", "a", 1), f"openvino {version}", "f", 1, 1)
    return HostInventory("10.0.0.1", "a", version, python, (0,), (device,), missing=missing)


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True), min_size=1, max_size=6))
def test_each_kind_of_device_is_measured_once_by_a_host_that_has_it(kinds: list[list[str]]):
    hosts = {f"host-{number}": host_with(*mine) for number, mine in enumerate(kinds)}
    shared = share_work(hosts, "target")
    given_out = [one.fingerprint for mine in shared.values() for one in mine]
    assert sorted(given_out) == sorted({kind for mine in kinds for kind in mine})
    assert all(one in hosts[node].missing for node, mine in shared.items() for one in mine)
    assert not any(share_work(hosts, "draft").values())


def test_equal_hosts_share_the_work_evenly():
    hosts = {name: host_with("a", "b", "c", "d") for name in ("x", "y")}
    assert [len(mine) for mine in share_work(hosts, "target").values()] == [2, 2]


@given(st.sets(st.integers(0, 40), min_size=1, max_size=30))
def test_paths_of_one_group_share_no_host_and_none_is_forgotten(numbers: set[int]):
    nodes = [f"10.0.0.{number}" for number in numbers]
    chosen = sample_paths(nodes)
    assert len(chosen) == min(MOST_PATHS, len(nodes) * (len(nodes) + 1) // 2)
    assert sample_paths(nodes[::-1]) == chosen, "the same for the same hosts"
    groups = list(pack_paths(chosen))
    assert sorted(path for group in groups for path in group) == sorted(chosen)
    for group in groups:
        ends = [end for path in group for end in set(path)]
        assert len(ends) == len(set(ends))


def test_skew_is_named_and_other_runtimes_are_only_told():
    own = host_with()
    assert describe_skew(host_with(), own) == ""
    assert "install the same" in describe_skew(host_with(version="2"), own)
    assert "Python 3.12.1" in describe_skew(host_with(python="3.12.1"), own)
    assert describe_skew(host_with(python="3.11.9"), own) == ""
    assert list_differences(host_with(version="2"), own) == ["openvino_rt: openvino 2 there, openvino 1 here"]


def test_each_library_that_decides_bits_is_compared_once_where_both_have_it():
    own = replace(host_with(), libraries={"openvino": "1", "numpy": "2.4.6", "torch": "2.13.0"})
    near = replace(host_with(version="2"), libraries={"openvino": "2", "numpy": "2.4.6", "onnxruntime": "1"})
    assert list_differences(near, own) == ["openvino: 2 there, 1 here"]
    assert list_differences(replace(own, libraries={**own.libraries, "numpy": "2.4.5"}), own) == [
        "numpy: 2.4.5 there, 2.4.6 here"
    ]

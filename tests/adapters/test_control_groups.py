"""Control groups bound memory: in trees of files of both versions, and in a real one."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.control_groups import count_group_kills
from adapters.device_memory import read_host_memory
from device_profiles.units import GIB, MIB
from tests.support.control_groups import FakeGroups, memory_group, run_in_group

ASK = """
import json
from adapters.device_memory import read_host_memory
from orchestrator.machine.devices import list_devices_here, list_free_bytes
from orchestrator.machine.device_sampler import DeviceSampler
memory, load = read_host_memory(), DeviceSampler().sample()["CPU"]
print(json.dumps({
    "total": memory.total_bytes, "free": memory.free_bytes, "file": str(memory.limit_file),
    "placement": list_free_bytes(list_devices_here().seen)["CPU"],
    "load": load.memory_total_bytes,
}))
"""


def write_limit(
    group: Path, version: int, limit: int | None, used: int = 0, files: int = 0, high: bool = False
) -> None:
    if version == 2:
        (group / ("memory.high" if high else "memory.max")).write_text(f"{'max' if limit is None else limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon {used - files}\ninactive_file {files}\nactive_file 0\n")
    else:
        (group / "memory.limit_in_bytes").write_text(f"{2**63 - 4096 if limit is None else limit}\n")
        (group / "memory.usage_in_bytes").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"cache 7\ntotal_inactive_file 0\ntotal_active_file {files}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_nested_groups_bounds_what_a_host_has(tmp_path: Path, version: int) -> None:
    proc, groups = FakeGroups(tmp_path).place("/slice/service", version=version)
    write_limit(groups / "slice" / "service", version, None, 10)
    write_limit(groups / "slice", version, GIB, GIB // 2, GIB // 4)
    memory = read_host_memory(proc)
    assert (memory.total_bytes, memory.free_bytes) == (GIB, GIB * 3 // 4), "pages of files are given back"
    assert memory.limit_file is not None
    assert memory.limit_file.parent == groups / "slice"


def test_a_group_that_slows_its_processes_bounds_them_too(tmp_path: Path) -> None:
    proc, groups = FakeGroups(tmp_path).place("/service", version=2)
    write_limit(groups / "service", 2, 2 * GIB, 100 * MIB)
    write_limit(groups / "service", 2, GIB, 100 * MIB, high=True)
    assert read_host_memory(proc)[:2] == (GIB, GIB - 100 * MIB)


@pytest.mark.parametrize(
    ("path", "root"), [("/docker/abc", "/docker/abc"), ("/docker/abc/in", "/docker/abc"), ("/../x", "/")]
)
@pytest.mark.parametrize("version", [1, 2])
def test_inside_a_container_the_mounted_group_counts(tmp_path: Path, version: int, path: str, root: str) -> None:
    proc, groups = FakeGroups(tmp_path).place(path, version=version, root=root)
    write_limit(groups, version, GIB, MIB)
    assert read_host_memory(proc)[:2] == (GIB, GIB - MIB)


def test_without_control_groups_it_is_the_whole_machine(tmp_path: Path) -> None:
    memory = read_host_memory(tmp_path)
    assert (memory.total_bytes, memory.limit_file) == (psutil.virtual_memory().total, None)


limits = st.lists(st.tuples(st.none() | st.integers(0, 8 * GIB), st.integers(0, 8 * GIB)), min_size=1, max_size=4)


@given(limits, st.sampled_from([1, 2]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_no_group_allows_more_than_any_around_it(
    tmp_path_factory: pytest.TempPathFactory, chain: list[tuple[int | None, int]], version: int
) -> None:
    path = "/" + "/".join(f"g{number}" for number in range(len(chain)))
    proc, groups = FakeGroups(tmp_path_factory.mktemp("chain")).place(path, version=version)
    for number, (limit, used) in enumerate(chain):
        groups = groups / f"g{number}"
        write_limit(groups, version, limit, used)
    memory, machine = read_host_memory(proc), psutil.virtual_memory()
    assert memory.total_bytes == min([machine.total, *(limit for limit, _ in chain if limit is not None)])
    for limit, used in chain:
        assert limit is None or memory.free_bytes <= max(0, limit - used)


@pytest.mark.parametrize(("version", "file"), [(1, "memory.oom_control"), (2, "memory.events")])
def test_what_the_kernel_killed_in_a_group_is_counted(tmp_path: Path, version: int, file: str) -> None:
    proc, groups = FakeGroups(tmp_path).place("/service", version=version)
    assert count_group_kills(proc) is None
    (groups / "service" / file).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert count_group_kills(proc) == 3


def test_a_real_group_bounds_everything_that_is_believed_of_the_host() -> None:
    with memory_group(3 * GIB) as group:
        done = run_in_group(group, "-c", ASK)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert Path(facts["file"]).parent == group
    assert facts["total"] == facts["load"] == 3 * GIB
    assert 0 < facts["free"] < 3 * GIB
    assert 0 < facts["placement"] < 3 * GIB

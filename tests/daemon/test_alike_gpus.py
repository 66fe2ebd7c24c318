"""Two GPUs of one machine that are alike: measured once, planned and served with as two.

NVML and the runtime are stand-ins (tests/support/nvidia_machine.py); everything between them and the client is real.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from device_profiles.store import ProfileStore
from tests.daemon.test_device_replans import find_planned, read_stream
from tests.daemon.test_foreign_adapters import put_on_path
from tests.support.daemon import Daemon, outrider_process, running
from tests.support.nvidia_machine import change_device, write_machine, write_planned_machine
from tests.support.waiting import until

STREAMS = 3
PLACES = ["here/CUDA:0", "here/CUDA:1"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_machine(tmp_path / "site", ["twin", "twin"])
    put_on_path(monkeypatch, tmp_path / "site")
    return tmp_path / "site"


def find_ready(daemon: Daemon) -> list[str]:
    """Return the devices of the replicas that serve."""
    return sorted(one["device"] for one in daemon.status()["replicas"] if one["phase"] == "ready")


def test_each_serves_a_replica_by_one_profile_and_what_one_loses_goes_on_at_the_other(
    tmp_path: Path, site: Path, plain: Daemon
) -> None:
    expected = [read_stream(plain, seed) for seed in range(STREAMS)]
    extra = "placement: {profile: never, replan_pause_s: 0.2, concurrency: 16}\nlimits: {kv_cache: 64 MiB}"
    config = write_planned_machine(tmp_path, {"twin": 20.0}, extra, replicas="auto")
    plan = outrider_process("plan", "--explain", "--config", str(config))
    assert plan.returncode == 0, plan.stderr
    assert all(place in plan.stdout for place in PLACES)
    with running(config) as daemon, ThreadPoolExecutor(STREAMS) as pool:
        assert find_planned(daemon) == PLACES
        until(lambda: find_ready(daemon) == PLACES)
        streams = [pool.submit(read_stream, daemon, seed) for seed in range(STREAMS)]
        until(lambda: daemon.status()["totals"]["generated"] > 10 * STREAMS)
        change_device(site, 0, lost=True)
        assert [stream.result() for stream in streams] == expected
        until(lambda: find_planned(daemon) == PLACES[1:])


def test_they_are_measured_once_and_both_have_that_profile(tmp_path: Path, site: Path) -> None:
    config = write_planned_machine(tmp_path, {}, "limits: {kv_cache: 64 MiB}")
    config.write_text(config.read_text().replace("device: auto", "device: 'CUDA:1'"))
    command = ("profile", "--json", "--device", "fake_cuda", "--seconds", "0.3", "--config", str(config))
    measured = outrider_process(*command)
    assert measured.returncode == 0, measured.stderr
    (device,) = json.loads(measured.stdout)["devices"]
    assert device["device"] == "CUDA:1", "the one that is written"
    assert [model.device for model in ProfileStore(tmp_path / "store" / "profiles").models()] == ["CUDA:1"]
    listed = outrider_process("devices", "--json", "--config", str(config))
    twins = [row for row in json.loads(listed.stdout) if row["runtime"] == "fake_cuda"]
    assert [(row["device"], row["measured_at"]) for row in twins] == [
        (name, device["measured_at"]) for name in ("CUDA:0", "CUDA:1")
    ]

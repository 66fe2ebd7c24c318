"""A daemon that runs a plan, and whose device fails under its streams: it plans again, and no stream loses a token.

NVML and the runtime are stand-ins (tests/support/nvidia_machine.py); everything between them and the client is real.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_foreign_adapters import put_on_path
from tests.support.daemon import Daemon, running
from tests.support.nvidia_machine import GIB, change_device, write_machine, write_planned_machine
from tests.support.waiting import until

STREAMS = 3
LONG: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 250, "temperature": 0.7}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_machine(tmp_path / "site")
    put_on_path(monkeypatch, tmp_path / "site")
    return tmp_path / "site"


def read_stream(daemon: Daemon, seed: int) -> str:
    pieces = daemon.client.completions.create(**LONG, seed=seed, stream=True)
    return "".join(piece.choices[0].text for piece in pieces if piece.choices)


def find_planned(daemon: Daemon) -> list[str]:
    """Return the devices of the plan that runs."""
    replicas = query_daemon(daemon.admin, "/admin/plan")["plan"]["replicas"]
    return [shard["device"] for replica in replicas for shard in replica["shards"]]


@pytest.mark.parametrize(
    ("facts", "log_line"),
    [
        ({"lost": True}, "here/CUDA:0 refuses work: planning again"),
        ({"memory_errors": 2}, "here/CUDA:0 refuses work: planning again"),
        ({"slowdowns": 0x40}, "rounds on here/CUDA:0 take"),
        ({"used": 8 * GIB - 1}, "here/CUDA:0"),
    ],
    ids=["falls off the bus", "memory errors", "lower clocks", "a neighbour takes its memory"],
)
def test_a_daemon_plans_again_behind_a_fault_of_its_device_and_streams_are_whole(
    tmp_path: Path, site: Path, plain: Daemon, facts: dict[str, Any], log_line: str
) -> None:
    expected = [read_stream(plain, seed) for seed in range(STREAMS)]
    extra = "placement: {profile: never, drift_after_s: 0.5, replan_pause_s: 0.2}\nlimits: {kv_cache: 64 MiB}"
    config = write_planned_machine(tmp_path, {"fake device 0": 20.0, "fake device 1": 30.0}, extra)
    with running(config) as daemon, ThreadPoolExecutor(STREAMS) as pool:
        assert find_planned(daemon) == ["here/CUDA:0"], "the faster one"
        streams = [pool.submit(read_stream, daemon, seed) for seed in range(STREAMS)]
        until(lambda: daemon.status()["totals"]["generated"] > 10 * STREAMS)
        change_device(site, 0, **facts)
        assert [stream.result() for stream in streams] == expected
        until(lambda: find_planned(daemon) == ["here/CUDA:1"])
        daemon.wait_for("ready", device="CUDA:1")
        assert daemon.status()["plan"]["moves"] == 1
        assert read_stream(daemon, 0) == expected[0]
    assert log_line in config.with_suffix(".log").read_text()

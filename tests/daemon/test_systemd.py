"""The unit file, and what systemd hears."""

from __future__ import annotations

import configparser
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.model import ClusterSection, Limits
from orchestrator.workers.homes import HomeRecord, list_homes, make_home, read_birth
from tests.support.daemon import configuration

UNIT = Path(__file__).parents[2] / "tools" / "systemd" / "outrider.service"


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # unit files are case-sensitive
    unit.read(UNIT)
    return unit["Service"]


def test_the_unit_waits_for_readiness_and_leaves_time_to_drain():
    unit = service()
    assert unit["Type"] == "notify"
    assert unit["ExecStart"].endswith("outrider serve --config /etc/outrider/cluster.yaml")
    assert float(unit["TimeoutStopSec"]) > Limits().drain_timeout_s + 10
    assert unit["Restart"] == "on-failure"
    assert unit["OOMPolicy"] == "continue"


def test_the_unit_leaves_workers_to_the_next_daemon_and_none_behind_a_stop():
    unit = service()
    assert unit["KillMode"] == "process"
    assert unit["OOMPolicy"] == "continue"
    assert unit["StateDirectory"] == "outrider"
    assert float(unit["RestartSec"]) < ClusterSection().orphan_wait_s
    assert unit["ExecStopPost"].endswith("bin/python -P -m orchestrator.workers.stop_post")


@pytest.mark.parametrize(
    ("result", "ends"), [("success", True), ("timeout", True), ("signal", False), ("watchdog", False)]
)
def test_behind_a_stop_workers_are_ended_and_behind_a_crash_they_stay(tmp_path, result, ends):
    worker = subprocess.Popen(["sleep", "60"])
    try:
        workers = tmp_path / "daemon-0" / "workers"
        list_homes(workers)
        make_home(workers, "target").write_record(HomeRecord("target", worker.pid, read_birth(worker.pid), ""))
        subprocess.run(
            [sys.executable, "-m", "orchestrator.workers.stop_post"],
            env={**os.environ, "STATE_DIRECTORY": str(tmp_path), "SERVICE_RESULT": result},
            check=True,
        )
        if ends:
            assert worker.wait(10) == -signal.SIGKILL
        else:
            assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()


def test_the_unit_is_hardened_and_leaves_jit_and_ray_working():
    unit = service()
    assert unit["NoNewPrivileges"] == unit["ProtectHome"] == "yes"
    assert unit["ProtectSystem"] == "strict"
    assert "MemoryDenyWriteExecute" not in unit
    assert "AF_NETLINK" in unit["RestrictAddressFamilies"]


def test_systemd_hears_ready_only_when_serving_and_stopping_at_the_end(tmp_path):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(path))
        notify.settimeout(60)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "orchestrator.cli.main", "serve"),
                *("--config", str(configuration(tmp_path, script="load_ms=300"))),
            ],
            env={"NOTIFY_SOCKET": str(path), "PATH": "/usr/bin:/bin"},
            stderr=subprocess.DEVNULL,
        )
        try:
            heard: list[str] = []
            while not any("READY=1" in message for message in heard):
                heard.append(notify.recv(4096).decode())
            assert any("load" in message for message in heard[:-1])
            process.terminate()
            while not any("STOPPING=1" in message for message in heard):
                heard.append(notify.recv(4096).decode())
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()

"""The unit file, and what systemd hears."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.model import ClusterSection, Limits
from orchestrator.daemon.systemd.files import ServiceChoices, list_files
from orchestrator.launch.homes import HomeRecord, list_homes, make_home, read_birth
from tests.support.daemon import configuration

CHOICES = ServiceChoices(Path("/opt/outrider/bin"))


def service(systemd: int = 257, name: str = "outrider.service", **choices) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # unit files are case-sensitive
    wanted = list_files(Path("/nowhere"), dataclasses.replace(CHOICES, **choices), systemd=systemd)
    unit.read_string(next(file.text for file in wanted if file.path.name == name))
    return unit["Socket" if name.endswith(".socket") else "Service"]


def test_the_unit_waits_for_readiness_and_leaves_time_to_drain():
    unit = service()
    assert unit["Type"] == "notify-reload"
    assert "ExecReload" not in unit
    assert unit["ExecStart"].endswith("outrider serve --config /etc/outrider/cluster.yaml")
    assert float(unit["TimeoutStopSec"]) > Limits().drain_timeout_s + 10
    assert unit["Restart"] == "on-failure"
    assert unit["OOMPolicy"] == "continue"


def test_an_older_systemd_gets_a_type_that_it_knows():
    unit = service(systemd=252)
    assert unit["Type"] == "notify"
    assert unit["ExecReload"] == "/bin/sh -c 'kill -HUP $$MAINPID'"  # minimal systems have no /bin/kill


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("front", ["", "10.0.0.1"])
def test_systemd_rates_the_unit_as_hardened_and_finds_no_mistake_in_it(tmp_path, front):
    choices = ServiceChoices(Path("/usr/bin"), front=front, token="a secret")  # noqa: S106 -- no cluster has it
    texts = {file.path.name: file.text for file in list_files(Path("/nowhere"), choices, systemd=252)}
    for name in choices.units:
        (tmp_path / name).write_text(texts[name].replace("/usr/bin/outrider ", "/usr/bin/env "))
    unit = "outrider-join.service" if front else "outrider.service"
    told = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", unit],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    rated = re.search(rf"exposure level for {re.escape(unit)}: ([0-9.]+)", told.stdout)
    assert rated is not None, told
    assert float(rated[1]) <= 2.0
    assert told.returncode == 0
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in choices.units)],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in checked.stderr.splitlines() if str(tmp_path) in line]
    assert not ours, checked.stderr


def test_devices_are_opened_by_a_drop_in_alone():
    assert service()["PrivateDevices"] == "yes"
    opened = service(name="gpu.conf", gpu=True)
    assert (opened["PrivateDevices"], opened["DevicePolicy"]) == ("no", "closed")


def test_the_sockets_stay_open_and_the_admin_socket_is_the_groups():
    listens = service(name="outrider.socket")
    assert (listens["SocketMode"], listens["SocketGroup"]) == ("0660", "outrider")
    assert service()["RuntimeDirectoryPreserve"] == "yes"


def test_the_unit_leaves_workers_to_the_next_daemon_and_none_behind_a_stop():
    unit = service()
    assert unit["KillMode"] == "process"
    assert unit["OOMPolicy"] == "continue"
    assert unit["StateDirectory"] == "outrider"
    assert float(unit["RestartSec"]) < ClusterSection().orphan_wait_s
    assert unit["ExecStopPost"].endswith("bin/python -P -m orchestrator.launch.stop_post")


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
            [sys.executable, "-m", "orchestrator.launch.stop_post"],
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
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()

"""What becomes of a device, in a real daemon: errors of its memory, heat, a neighbour in its memory, and its end.

NVML and the runtime are stand-ins (tests/support/nvidia_machine.py); everything between them and the client is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_foreign_adapters import put_on_path
from tests.support.daemon import Daemon, outrider_process, running
from tests.support.nvidia_machine import GIB, change_device, write_machine, write_machine_config
from tests.support.waiting import until

LONG: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 250, "temperature": 0.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as monkeypatch:
        write_machine(directory / "site")
        put_on_path(monkeypatch, directory / "site")
        yield directory


@pytest.fixture(scope="module")
def daemon(place: Path) -> Iterator[Daemon]:
    extra = "alerts: {every_s: 0.2, time_factor: 0.001}\nlimits: {kv_cache: 64 MiB}"
    with running(write_machine_config(place, extra)) as daemon:
        until(lambda: [replica["phase"] for replica in daemon.status()["replicas"]] == ["ready", "ready"])
        until(lambda: {"here/CUDA:0", "here/CUDA:1"} <= find_devices(daemon).keys())
        yield daemon


@pytest.fixture
def change(place: Path) -> Callable[..., None]:
    return partial(change_device, place / "site")


def find_devices(daemon: Daemon) -> dict[str, Any]:
    return {device["name"]: device for device in daemon.status()["devices"]}


def list_parts(daemon: Daemon) -> dict[str, str]:
    """Return why each device is open that is."""
    parts = query_daemon(daemon.admin, "/admin/health")["parts"]
    return {part["name"]: part["why"] for part in parts if (part["kind"], part["state"]) == ("device", "open")}


def list_alerts(daemon: Daemon) -> set[tuple[str, str, str]]:
    alerts = query_daemon(daemon.admin, "/admin/alerts")["alerts"]
    labels = ((alert["alert"], alert["labels"]) for alert in alerts if alert["state"] == "firing")
    return {(name, its.get("device", ""), its.get("what", "")) for name, its in labels}


def show_status(daemon: Daemon) -> str:
    return " ".join(outrider_process("status", "--socket", str(daemon.admin)).stdout.replace("│", " ").split())


def count_running(daemon: Daemon) -> list[int]:
    return [(replica["gauges"] or {}).get("running", 0) for replica in daemon.status()["replicas"]]


def test_a_device_that_falls_off_the_bus_takes_nothing_and_hides_no_other(
    daemon: Daemon, change: Callable[..., None], plain: Daemon
) -> None:
    expected = plain.client.completions.create(**LONG).choices[0].text
    change(0, lost=True)
    until(lambda: find_devices(daemon)["here/CUDA:0"]["fault"])
    assert "DOES NOT WORK: GPU is lost" in show_status(daemon)
    assert find_devices(daemon)["here/CUDA:1"]["memory_total_bytes"] == 8 * GIB
    until(lambda: ("OutriderDeviceFault", "CUDA:0", "lost") in list_alerts(daemon))
    answer = daemon.client.completions.create(**LONG)
    assert answer.choices[0].text == expected
    (route,) = query_daemon(daemon.admin, f"/admin/explain/{answer.id}")["routes"]
    assert "device here/CUDA:0 is open: GPU is lost" in str(route)
    change(0, lost=False)
    until(lambda: "here/CUDA:0" not in list_parts(daemon))
    until(lambda: ("OutriderDeviceFault", "CUDA:0", "lost") not in list_alerts(daemon))


def test_streams_leave_a_device_whose_memory_fails_and_what_becomes_of_devices_is_told(
    daemon: Daemon, change: Callable[..., None], plain: Daemon
) -> None:
    expected = plain.client.completions.create(**LONG).choices[0].text
    with ThreadPoolExecutor(4) as pool:
        answers: list[Future[Any]] = [pool.submit(lambda: daemon.client.completions.create(**LONG)) for _ in range(4)]
        until(lambda: all(count_running(daemon)))
        change(0, memory_errors=2)
        until(lambda: "here/CUDA:0" in list_parts(daemon))
        assert "2 errors of its memory could not be corrected" in list_parts(daemon)["here/CUDA:0"]
        assert [answer.result().choices[0].text for answer in answers] == [expected] * 4
    status = daemon.status()
    assert status["totals"]["restarts"] == 0, "streams left it before it was lost"
    until(lambda: ("OutriderDeviceFault", "CUDA:0", "memory") in list_alerts(daemon))
    assert "2 memory errors that were not corrected" in show_status(daemon)

    change(1, slowdowns=0x40)
    until(lambda: find_devices(daemon)["here/CUDA:1"]["hot"])
    assert "SLOWS ITSELF DOWN: its clocks are lowered: temperature" in show_status(daemon)
    until(lambda: ("OutriderDeviceSlow", "CUDA:1", "") in list_alerts(daemon))
    change(1, slowdowns=0, used=8 * GIB - 1)
    until(lambda: not find_devices(daemon)["here/CUDA:1"]["hot"])
    until(lambda: "MEMORY TAKEN: other programs hold 8.0 GiB" in show_status(daemon))

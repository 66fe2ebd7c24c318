"""Daemons that plan again before their first worker is ready: for what a host lacks, and for a host that leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_foreign_adapters import put_on_path
from tests.support.daemon import Daemon, configuration, running
from tests.support.foreign_adapter import install_tiny_adapter
from tests.support.many_hosts import ManyHosts, join_hosts
from tests.support.profiles import store_simulated_profiles
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 40, "temperature": 0.7, "seed": 4}


def expect_answers(daemon: Daemon, expected: str) -> None:
    """Requests, /ready and the status say the same: it serves."""
    assert daemon.status()["phase"] == "ready"
    assert httpx.get(f"{daemon.url}/ready").status_code == httpx.codes.OK
    assert daemon.client.completions.create(**ASK).choices[0].text == expected


@pytest.fixture(scope="module")
def tiny_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_tiny_adapter(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("fault", "why", "told"),
    [
        ("load", "tiny-driver is not installed: pip install tiny-driver", "here/TINY has no tiny: planning again"),
        ("refuses", "tiny: the model is too wide for it", "here/TINY refuses tiny: planning again"),
    ],
)
def test_a_runtime_that_turns_out_to_be_of_no_use_is_left_out_and_the_daemon_serves(
    tmp_path, plain, tiny_site, monkeypatch, outrider, fault, why, told
):
    """It is planned with, as it lists its device, and fails where it is to load."""
    expected = plain.client.completions.create(**ASK).choices[0].text
    put_on_path(monkeypatch, tiny_site)
    monkeypatch.setenv("TINY_FAULT", fault)
    store = tmp_path / "store" / "profiles"
    name = "tiny accelerator"
    store_simulated_profiles(store, {"TINY": 1.0}, adapter="tiny", hardware_name=name, version="tiny-accelerator 1.2.3")
    store_simulated_profiles(store, {"SIM": 9.0})
    config = configuration(tmp_path, extra="placement: {profile: never}\n")
    config.write_text(config.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1))
    with running(config) as daemon:
        assert daemon.status()["ready"]["device"] == "SIM"
        expect_answers(daemon, expected)
        line = f"here/TINY: tiny is left out there: {why}"
        assert line in query_daemon(daemon.admin, "/admin/plan")["assumed"]
        explained = outrider("plan", "--explain", "--config", str(config)).stdout
        assert f"the daemon that runs says: {line}" in explained
    assert told in config.with_suffix(".log").read_text()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManyHosts]:
    """Two hosts, with Ray on both."""
    with join_hosts(monkeypatch, 2, 2) as made:
        yield made


@pytest.mark.slow
@pytest.mark.ray
def test_a_host_that_leaves_before_its_worker_is_ready_is_planned_without_and_requests_are_served(
    tmp_path, plain, hosts
):
    expected = plain.client.completions.create(**ASK).choices[0].text
    hosts.run_on(0, lambda: serve(write_config(tmp_path, hosts), hosts, expected))


def write_config(directory: Path, hosts: ManyHosts) -> Path:
    """The other host is the cheaper one; a model takes long to load."""
    script, far = "base_ms=2&load_ms=8000", hosts.hosts[1].address
    store_simulated_profiles(
        directory / "store" / "profiles", {"SIM": 2.0}, script=script, hardware_name="simulated device"
    )
    extra = (
        "placement: {objective: cost, profile: never}\ndrafts: []\n"
        f"hosts: [{{name: near, address: here, price_per_hour: 9}}, {{name: far, address: {far}, price_per_hour: 1}}]\n"
    )
    path = configuration(directory, script=script, runtime="ray", extra=extra)
    text = path.read_text().replace("runtime: ray", f"address: '{hosts.address}'")
    path.write_text(text.replace("adapter: simulated", "adapter: simulated, device: auto", 1))
    return path


def serve(config: Path, hosts: ManyHosts, expected: str) -> None:
    far, log = hosts.hosts[1].address, config.with_suffix(".log")

    def leave() -> None:
        until(lambda: log.exists() and f"worker target started: ray node {far}" in log.read_text())
        hosts.leave(1)

    leaving = threading.Thread(target=leave)
    leaving.start()
    with running(config) as daemon:
        leaving.join()
        assert "target.2 takes the place of target" in log.read_text()
        expect_answers(daemon, expected)

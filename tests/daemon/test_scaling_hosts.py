"""Replicas that follow load over hosts: one that joins is used while load wants more, one that leaves is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import asking
from tests.support.daemon import Daemon, configuration, running
from tests.support.many_hosts import ManyHosts, join_hosts
from tests.support.profiles import store_simulated_profiles
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": "toy", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
ASKED = [
    ASK | {"prompt": f"{number} ships at sea", "temperature": 0.8 * (number % 2), "seed": 7} for number in range(6)
]
WITHIN_S = 240.0
SCRIPT = "base_ms=20&row_ms=5"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManyHosts]:
    """Three hosts, with Ray on the first."""
    with join_hosts(monkeypatch, 3, 1) as made:
        yield made


def write_config(directory: Path, hosts: ManyHosts, *, planned: bool) -> Path:
    extra = "limits: {max_running: 3}\ndrafts: []\n"
    if planned:
        extra += "placement: {drift_tolerance: 9}\n"
        store = directory / "store" / "profiles"
        name = "simulated device"
        store_simulated_profiles(store, {"SIM": 25.0}, script=SCRIPT, hardware_name=name, more_row_ms=5.0)
    replicas = "{min: 1, max: 2, idle_s: 5}"
    path = configuration(directory, script=SCRIPT, runtime="ray", replicas=replicas, extra=extra)
    text = path.read_text().replace("runtime: ray", f"address: '{hosts.address}'")
    device = ", device: auto" if planned else ""
    path.write_text(text.replace("adapter: simulated", f"adapter: simulated{device}", 1))
    return path


def places(daemon: Daemon) -> list[str]:
    """The hosts of the replicas that serve."""
    found = [one["worker"].split() for one in daemon.status()["replicas"] if one["phase"] == "ready"]
    return sorted(words[2] for words in found if words[:2] == ["ray", "node"])


@pytest.mark.ray
@pytest.mark.parametrize("planned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_host_that_joins_is_used_and_one_that_leaves_is_replaced(tmp_path, plain, hosts, planned):
    expected = [plain.client.completions.create(**body).choices[0].text for body in ASKED]
    hosts.run_on(0, lambda: serve(write_config(tmp_path, hosts, planned=planned), hosts, expected))


def serve(config: Path, hosts: ManyHosts, expected: list[str]) -> None:
    near, far, late = (host.address for host in hosts.hosts)
    with running(config) as daemon:
        assert places(daemon) == [near]
        with asking(daemon, ASKED, expected) as wrong:
            until(lambda: daemon.status()["scaling"]["wanted"] == 2, WITHIN_S)
            hosts.join(1)
            until(lambda: places(daemon) == sorted([near, far]), WITHIN_S)
            hosts.join(2)
            hosts.leave(1)
            until(lambda: places(daemon) == sorted([near, late]), WITHIN_S)
        assert wrong == []
        until(lambda: len(places(daemon)) == 1, WITHIN_S)
        assert daemon.status()["scaling"]["wanted"] == 1
        assert daemon.client.completions.create(**ASKED[1]).choices[0].text == expected[1]

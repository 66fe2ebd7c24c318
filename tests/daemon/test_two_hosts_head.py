"""The daemon outlives Ray's head, and Ray's patience with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.daemon import Daemon, configuration, running
from tests.support.hosts import Hosts, RayNodes, ray_over, two_hosts
from tests.support.waiting import until

ASK: Any = {"model": "toy", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.0}


@pytest.mark.ray
def test_the_daemon_outlives_the_head_and_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with two_hosts() as hosts, ray_over(hosts, far=False) as nodes:
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")  # then Ray ends its driver's process
        hosts.on_near(lambda: outlive_the_head(tmp_path, hosts, nodes))


def outlive_the_head(directory: Path, hosts: Hosts, nodes: RayNodes) -> None:
    config = configuration(directory)
    text = config.read_text().replace("runtime: local", f"address: '{hosts.address}', max_restarts: 0")
    config.write_text(text)
    with running(config) as daemon:
        assert daemon.status()["runtime"] == "ray"
        expected = daemon.client.completions.create(**ASK).choices[0].text
        drivers = find_drivers(daemon)
        assert drivers
        nodes.kill_head()
        until(lambda: not any(one.is_running() for one in drivers), 60)
        until(lambda: "ray away" in daemon.log.read_text(), 10)
        assert daemon.process.poll() is None
        assert daemon.status()["ready"] is None or daemon.status()["phase"] != "ready"
        nodes.start_head()
        until(lambda: "ray back" in daemon.log.read_text(), 60)
        until(lambda: daemon.status()["phase"] == "ready", 60)
        assert daemon.client.completions.create(**ASK).choices[0].text == expected
        assert daemon.stop() == 0


def find_drivers(daemon: Daemon) -> list[psutil.Process]:
    children = psutil.Process(daemon.process.pid).children()
    return [one for one in children if "orchestrator.launch.ray_driver" in one.cmdline()]

"""Devices and links of two hosts are measured from one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from device_profiles.store import ProfileStore
from tests.support.daemon import configuration
from tests.support.hosts import Hosts, ray_over, two_hosts


@pytest.mark.ray
def test_the_way_between_two_hosts_is_measured_and_a_device_over_there(tmp_path: Path):
    with two_hosts() as hosts, ray_over(hosts):
        found = hosts.on_near(lambda: profile_over_the_cable(tmp_path, hosts))
        near, far = sorted((hosts.near_ip, hosts.far_ip))
    assert {(link["left"], link["right"]) for link in found["links"]} == {(near, near), (far, far), (near, far)}
    assert all(link["rtt_ms"] > 0.0 for link in found["links"])
    assert [one.adapter for one in ProfileStore(tmp_path / "store" / "profiles").models()] == ["simulated"]


def profile_over_the_cable(directory: Path, hosts: Hosts) -> Any:
    config = configuration(directory, script="base_ms=1", runtime="ray")
    config.write_text(config.read_text().replace("runtime: ray", f"runtime: ray, address: '{hosts.address}'"))
    arguments = ("--device", "simulated:SIM", "--node", hosts.far_ip, "--seconds", "0.3", "--json")
    command = [sys.executable, "-m", "orchestrator.cli.main", "profile", "--config", str(config), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

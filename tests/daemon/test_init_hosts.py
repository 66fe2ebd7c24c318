"""`outrider init --hosts` over a real Ray of two hosts: their devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_init import write_model
from tests.support.hosts import ray_over, two_hosts


@pytest.mark.slow
@pytest.mark.ray
def test_the_hosts_of_a_cluster_are_asked_for_their_devices(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "m.gguf", 2)
    (far := tmp_path / "far").mkdir()
    with two_hosts() as hosts, ray_over(hosts, far_disk=far):
        answer = hosts.on_near(lambda: run_init(tmp_path, model, hosts.address))
    assert {host["address"] for host in answer["hosts"]} == {hosts.near_ip, hosts.far_ip}
    assert {"CPU"} <= {device["device"] for host in answer["hosts"] for device in host["devices"]}
    written = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    assert written["cluster"] == {"address": hosts.address}
    assert written["model"]["source"] == str(model)


def run_init(directory: Path, model: Path, address: str) -> Any:
    options = ("--models", str(model), "--model", model.name, "--hosts", address, "--yes", "--json")
    command = [sys.executable, "-m", "orchestrator.cli.main", "init", *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

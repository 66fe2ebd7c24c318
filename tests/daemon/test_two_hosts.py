"""Two hosts: a draft on the other one, with the cable cut in the middle of a stream, and both hosts measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from device_profiles.store import ProfileStore
from tests.daemon.test_draft_workers import ASK, count_accepted, draft_of, own, text_while, until_it_drafts
from tests.daemon.test_life import collect
from tests.support.daemon import configuration, running
from tests.support.hosts import Hosts, ray_over, two_hosts
from tests.support.waiting import until

CUT_S = 1.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts with one Ray over both."""
    with two_hosts() as made, ray_over(made):
        yield made


@pytest.mark.slow
@pytest.mark.ray
def test_the_way_between_two_hosts_is_measured_and_a_device_over_there(tmp_path: Path, hosts):
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


@pytest.mark.ray
def test_a_cable_cut_or_a_draft_hung_in_a_stream_costs_no_token(tmp_path: Path, plain, hosts):
    expected = plain.client.completions.create(**ASK).choices[0].text
    hosts.on_near(lambda: draft_over_the_cable(tmp_path, hosts, expected))


def draft_over_the_cable(directory: Path, hosts: Hosts, expected: str) -> None:
    extra = own(overlap="always", answer_timeout_s=0.5, host=hosts.far_ip)
    config = configuration(directory, script="base_ms=8", runtime="ray", extra=extra)
    config.write_text(config.read_text().replace("runtime: ray", f"runtime: ray, address: '{hosts.address}'"))
    with running(config) as daemon:
        until(lambda: draft_of(daemon)["phase"] == "ready", 60)
        draft = draft_of(daemon)
        assert hosts.far_ip in draft["worker"]
        assert hosts.near_ip in daemon.status()["worker"]
        assert draft["ready"]["door"][1].startswith(f"tcp:{hosts.far_ip}:")
        until_it_drafts(daemon, expected)
        pieces: list[str] = []
        started = threading.Event()
        stream = daemon.client.completions.create(**ASK, stream=True)
        reader = threading.Thread(target=collect, args=(stream, pieces, started))
        reader.start()
        assert started.wait(120)
        hosts.cable("down")
        time.sleep(CUT_S)
        before = count_accepted(daemon)
        hosts.cable("up")
        reader.join(240)
        assert "".join(pieces) == expected
        until_it_drafts(daemon, expected)
        assert count_accepted(daemon) > before
        assert daemon.status()["totals"]["restarts"] == 0
        assert draft_of(daemon)["restarts"] >= 1
        hung = draft_of(daemon)["ready"]["pid"]
        assert text_while(daemon, hung, signal.SIGSTOP) == expected
        until_it_drafts(daemon, expected)
        newest = draft_of(daemon)["ready"]["pid"]
        assert newest != hung
        assert not psutil.pid_exists(hung)  # Ray asks a process itself to end, and this one does not hear it
        assert daemon.stop() == 0
        assert not psutil.pid_exists(newest)

"""Faults of shards while streams run: killed, stopped and cut off, no client is left with an error or a wrong token."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_shard_workers import ASK, SAMPLINGS, cut_cable, write_over_hosts, write_toy
from tests.daemon.test_shards import LAYERS, write_tiny
from tests.support.daemon import Daemon, running
from tests.support.many_hosts import ManyHosts, join_hosts
from tests.support.steady_clients import keep_asking

ASKS: list[dict[str, Any]] = [
    {**ASK, **sampling, "prompt": f"{word} sea is", "max_tokens": 160}
    for word in ("the", "a")
    for sampling in SAMPLINGS
]
_BLINK_S = 2.0
"""Shorter than what makes a host count as lost."""
_HELD_S = 20.0


def say_each(daemon: Daemon, asks: list[dict[str, Any]]) -> list[str]:
    return [daemon.client.completions.create(**ask).choices[0].text for ask in asks]


def strike(daemon: Daemon, asks: list[dict[str, Any]], expected: list[str], faults: list[Callable[[], None]]) -> None:
    """Let faults happen in turn, each while all streams are read."""
    with keep_asking(daemon.client, asks, expected) as clients:
        for fault in faults:
            clients.wait_reading(len(asks))
            fault()
            clients.wait_answers(2 * len(asks) + 1)
            clients.check()


def hurt_process(daemon: Daemon, number: int, how: int) -> None:
    """Of the processes of a target: 0 has the first layers and calls the others."""
    ready = daemon.status()["ready"]
    os.kill([ready["pid"], *ready["part_pids"]][number], how)


@pytest.mark.slow
def test_processes_of_shards_that_are_killed_or_stopped_cost_no_client_anything(tmp_path: Path, plain: Daemon):
    expected = say_each(plain, ASKS)
    with running(write_toy(tmp_path, "[{layers: 1}, {layers: 1, cores: [0]}, {layers: 2, cores: [0]}]")) as daemon:
        hurt = [(number, how) for how in (signal.SIGKILL, signal.SIGSTOP) for number in range(3)]
        strike(daemon, ASKS, expected, [partial(hurt_process, daemon, *one) for one in hurt])
        assert daemon.status()["totals"]["restarts"] >= len(hurt)
        assert daemon.stop() == 0


@pytest.mark.slow
def test_layers_of_a_real_runtime_that_are_killed_or_stopped_cost_no_client_anything(
    tmp_path: Path, shared_store: Path
):
    every_token = {"ignore_eos": True, "speculative_config": {"method": "off"}}
    ask = {"model": "tiny", "prompt": "hello the hello", "max_tokens": 100, "extra_body": every_token}
    asks: list[dict[str, Any]] = [{**ask, **sampling} for sampling in SAMPLINGS]
    shards = f", shards: [{{layers: 1, cores: [0]}}, {{layers: {LAYERS - 1}, cores: [0]}}]"
    with running(write_tiny(tmp_path / "whole", shared_store)) as daemon:
        whole, its = say_each(daemon, asks), daemon.status()["ready"]["class_fingerprint"]
    with running(write_tiny(tmp_path / "cut", shared_store, shards)) as daemon:
        cut = say_each(daemon, asks)
        assert cut == whole or daemon.status()["ready"]["class_fingerprint"] != its
        hurt = [(number, how) for how in (signal.SIGKILL, signal.SIGSTOP) for number in (1, 2)]
        strike(daemon, asks, cut, [partial(hurt_process, daemon, *one) for one in hurt])
        assert daemon.status()["totals"]["restarts"] >= len(hurt)
        assert daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.ray
def test_a_host_of_shards_that_is_killed_stopped_or_cut_off_costs_no_client_anything(
    tmp_path: Path, plain: Daemon, monkeypatch: pytest.MonkeyPatch
):
    expected = say_each(plain, ASKS)
    with join_hosts(monkeypatch, 2, 2) as hosts:
        hosts.run_on(0, lambda: serve_over_hosts(tmp_path, hosts, expected))


def serve_over_hosts(directory: Path, hosts: ManyHosts, expected: list[str]) -> None:
    with running(write_over_hosts(directory, hosts.address, hosts.hosts[1].address)) as daemon:
        faults = [blink, pause_host, cut, stop_host, kill_host]
        strike(daemon, ASKS, expected, [partial(fault, hosts) for fault in faults])
        assert daemon.status()["totals"]["restarts"] >= 1
        assert daemon.stop() == 0


def blink(hosts: ManyHosts) -> None:
    """Pull the cable, and plug it in again before anybody has noticed."""
    hosts.cable(1, "down")
    time.sleep(_BLINK_S)
    hosts.cable(1, "up")


def pause_host(hosts: ManyHosts) -> None:
    """Stop all of the host for a moment."""
    signal_host(hosts, signal.SIGSTOP)
    time.sleep(_BLINK_S)
    signal_host(hosts, signal.SIGCONT)


def cut(hosts: ManyHosts) -> None:
    cut_cable(hosts, 0)


def stop_host(hosts: ManyHosts) -> None:
    """Stop all of the host until it counts as lost. It is started anew then, as one that hung is."""
    signal_host(hosts, signal.SIGSTOP)
    time.sleep(_HELD_S)
    kill_host(hosts)


def kill_host(hosts: ManyHosts) -> None:
    """Kill all of the host, and start it anew."""
    signal_host(hosts, signal.SIGKILL)
    hosts.leave(1)
    hosts.join(1)


def signal_host(hosts: ManyHosts, how: int) -> None:
    """Send all processes of the second host a signal."""
    listed = subprocess.run(["ip", "netns", "pids", hosts.hosts[1].name], check=True, capture_output=True, text=True)
    for pid in map(int, listed.stdout.split()):
        os.kill(pid, how)

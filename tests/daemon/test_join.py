"""`outrider join` on a real other host: it comes back by itself after each fault, and streams go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.daemon import Daemon, configuration, running
from tests.support.hosts import Hosts, two_hosts
from tests.support.waiting import until

ASK: Any = {"model": "toy", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.0, "stream": True}
BACK_WITHIN_S = 240.0
"""Bounds the wait of a test, and says nothing of speed: the machine may have much else to do."""


@pytest.mark.ray
def test_a_joined_host_comes_back_when_its_node_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts() as hosts:
        hosts.on_near(lambda: serve_on_both(tmp_path, monkeypatch, hosts, [kill_raylet]))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("cut_s", [5.0, 60.0])
def test_a_joined_host_comes_back_when_its_link_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_s: float
) -> None:
    def cut_link(hosts: Hosts, _daemon: Daemon, _joined: Joined) -> None:
        hosts.cable("down")
        time.sleep(cut_s)
        hosts.cable("up")

    with two_hosts() as hosts:
        hosts.on_near(lambda: serve_on_both(tmp_path, monkeypatch, hosts, [cut_link]))


@pytest.mark.slow
@pytest.mark.ray
def test_a_joined_host_comes_to_a_new_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts() as hosts:
        hosts.on_near(lambda: serve_on_both(tmp_path, monkeypatch, hosts, [kill_head]))


class Joined:
    """`outrider join` on the far host, and what it said."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def list_lines(self) -> list[str]:
        return self._log.read_text(encoding="utf-8").splitlines()

    def count_joins(self) -> int:
        """Return how often it became a host of the cluster."""
        return sum("is a host of" in line for line in self.list_lines())

    def list_raylets(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.name() == "raylet"]


@contextmanager
def join_far(hosts: Hosts, directory: Path) -> Iterator[Joined]:
    (token := directory / "token").write_text(os.environ["RAY_AUTH_TOKEN"])
    program = [sys.executable, "-m", "orchestrator.cli.main", "join", hosts.near_ip, "--token-file", str(token)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    log = directory / "join.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", hosts.far, *program], stdout=output, stderr=output, env=environment
        )
    joined = Joined(process, log)
    try:
        yield joined
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0, joined.list_lines()
    finally:
        process.kill()
        process.wait()


class Clients:
    """Threads that ask for the same text again and again; `wrong`: what was not as expected."""

    def __init__(self, daemon: Daemon, count: int) -> None:
        self.wrong: list[str] = []
        self.answers = 0
        self._daemon = daemon
        self._expected = self._ask()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                text = self._ask()
            except Exception as error:
                text = repr(error)
            self.answers += 1
            if text != self._expected:
                self.wrong.append(text)

    def _ask(self) -> str:
        chunks = self._daemon.client.completions.create(**ASK)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def serve_on_both(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: Hosts,
    faults: list[Callable[[Hosts, Daemon, Joined], None]],
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.urandom(32).hex())
    replicas = f"[{{host: here}}, {{host: {hosts.far_ip}}}]"
    config = configuration(directory, script="base_ms=60", replicas=replicas)
    config.write_text(config.read_text().replace("runtime: local", f"address: '{hosts.address}', head: true"))
    with running(config) as daemon, join_far(hosts, directory) as joined:
        until(partial(is_whole_again, daemon, []), BACK_WITHIN_S)
        clients = Clients(daemon, 2)
        try:
            for fault in faults:
                before = list_workers(daemon)
                fault(hosts, daemon, joined)
                until(partial(is_whole_again, daemon, before), BACK_WITHIN_S)
        finally:
            clients.stop()
        assert clients.answers > 0
        assert clients.wrong == []


def kill_raylet(_hosts: Hosts, _daemon: Daemon, joined: Joined) -> None:
    count = joined.count_joins()
    (raylet,) = joined.list_raylets()
    raylet.kill()
    until(lambda: joined.count_joins() > count, BACK_WITHIN_S)


def kill_head(_hosts: Hosts, daemon: Daemon, joined: Joined) -> None:
    count = joined.count_joins()
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    (head,) = [child for child in children if child.name() == "gcs_server"]
    head.kill()
    until(lambda: joined.count_joins() > count, BACK_WITHIN_S)


def count_ready(daemon: Daemon) -> int:
    return sum(replica["phase"] == "ready" for replica in daemon.status()["replicas"])


def is_whole_again(daemon: Daemon, before: list[str]) -> bool:
    """Return whether two workers serve that are not all of those before. It takes its time: each look costs some."""
    time.sleep(0.5)
    return count_ready(daemon) == 2 and list_workers(daemon) != before


def list_workers(daemon: Daemon) -> list[str]:
    return [replica["worker"] for replica in daemon.status()["replicas"]]

"""Stopping: a second Ctrl-C waits for nobody, and a model that is loading keeps nobody waiting."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.daemon.test_life import LONG
from tests.support.daemon import configuration, read_url, running
from tests.support.waiting import is_alive

SOON_S = 5.0  # a stop that waits for a drain, or for a worker that does not listen, takes longer


def test_a_second_ctrl_c_ends_a_drain_at_once(tmp_path):
    config = configuration(tmp_path, script="base_ms=20", extra="limits: {drain_timeout_s: 60}")
    body = LONG | {"max_tokens": 3500, "stream": True}
    with running(config) as daemon, daemon.client.completions.create(**body) as stream:
        next(iter(stream))
        pid = daemon.status()["ready"]["pid"]
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_for("", phase="draining")
        time.sleep(0.5)
        assert daemon.process.poll() is None
        daemon.process.send_signal(signal.SIGTERM)  # a service manager that repeats itself hurries nobody
        time.sleep(0.5)
        assert daemon.process.poll() is None
        asked_s = time.monotonic()
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(120) == 0
        assert time.monotonic() - asked_s < SOON_S
        assert not psutil.pid_exists(pid)
        assert not daemon.admin.exists()


def test_one_ctrl_c_that_comes_twice_at_once_is_one(tmp_path):
    """A terminal sends it to the whole group, and a program in front may pass it on."""
    config = configuration(tmp_path, script="base_ms=10")
    body = LONG | {"max_tokens": 60, "stream": True}
    with running(config) as daemon, daemon.client.completions.create(**body) as stream:
        chunks = iter(stream)
        next(chunks)
        daemon.process.send_signal(signal.SIGINT)
        daemon.process.send_signal(signal.SIGINT)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert daemon.process.wait(120) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_loads_its_model_ends_soon(tmp_path, number):
    config = configuration(tmp_path, script="load_ms=60000")
    with Path(tmp_path, "log").open("wb") as log:
        command = [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            deadline = time.monotonic() + 240
            while (
                not read_url(tmp_path / "admin.sock") or "started: local pid" not in Path(tmp_path, "log").read_text()
            ):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            workers = psutil.Process(process.pid).children(recursive=True)
            asked_s = time.monotonic()
            process.send_signal(number)
            assert process.wait(120) == 0
            assert time.monotonic() - asked_s < SOON_S
        finally:
            process.kill()
    assert not [one for one in workers if is_alive(one.pid)]

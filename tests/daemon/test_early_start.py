"""The first worker is started before most of the daemon is imported, and ends with whatever keeps that from serving."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.daemon import configuration
from tests.support.waiting import until

LATER = (
    *("fastapi", "starlette", "uvicorn", "httpx", "prometheus_client", "opentelemetry", "ray", "openvino", "torch"),
    *(
        "huggingface_hub",
        "transformers",
        "tokenizers",
        "orchestrator.daemon.api",
        "orchestrator.daemon.control.controller",
    ),
    *("orchestrator.worker.engine", "orchestrator.planning", "orchestrator.planning.profiling", "policies.planning"),
)

SEEN = """
import json, sys

def observe(event, details):
    if event == "subprocess.Popen" and "orchestrator.worker.local_host" in [str(one) for one in details[1]]:
        with open({told!r}, "a") as told:
            told.write(json.dumps(sorted(sys.modules)) + "\\n")

sys.addaudithook(observe)
sys.argv = ["outrider", "serve", "--config", {config!r}]
from orchestrator.cli.main import main
main()
"""


def start(config: Path, told: Path) -> subprocess.Popen[bytes]:
    """Start a daemon as people do, that writes down its modules whenever it starts a worker."""
    with config.with_suffix(".log").open("wb") as output:
        code = SEEN.format(told=str(told), config=str(config))
        return subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)


def find_workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        children = psutil.Process(process.pid).children()
        return [one for one in children if "orchestrator.worker.local_host" in one.cmdline()]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "told.jsonl"


def test_the_first_worker_waits_for_no_import_that_it_does_not_need(tmp_path: Path, told: Path) -> None:
    config = configuration(tmp_path)
    process = start(config, told)
    try:
        until(lambda: '"serving"' in config.with_suffix(".log").read_text() or process.poll() is not None)
        assert process.poll() is None, config.with_suffix(".log").read_text()
        assert len(find_workers(process)) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    (line,) = told.read_text().splitlines()
    assert set(LATER) & set(json.loads(line)) == set()


def test_a_daemon_that_is_told_to_stop_before_it_is_whole_leaves_no_worker(tmp_path: Path, told: Path) -> None:
    process = start(configuration(tmp_path), told)
    until(lambda: bool(find_workers(process)))
    workers = find_workers(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    until(lambda: not any(one.is_running() for one in workers))


def test_a_daemon_that_cannot_listen_leaves_no_worker(tmp_path: Path, told: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = configuration(tmp_path)
        config.write_text(config.read_text().replace("port: 0", f"port: {taken.getsockname()[1]}"))
        process = start(config, told)
        until(lambda: bool(find_workers(process)) or process.poll() is not None)
        workers = find_workers(process)
        assert process.wait(60) == 1
    assert told.exists()
    until(lambda: not any(one.is_running() for one in workers))

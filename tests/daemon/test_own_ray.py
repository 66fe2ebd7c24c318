"""A Ray of the daemon's own, which takes seconds to start: its worker is lost, its log is whole, and it takes jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.batches.support import count_results, line_of, write_input
from tests.batches.test_submit import HAS_JOB_SERVER, NEEDS_JOB_SERVER, find_job_server
from tests.daemon.test_life import kill_worker_in_a_stream
from tests.daemon.test_log import abort_worker, check_entries, use
from tests.support.daemon import Daemon, configuration, running
from tests.support.waiting import until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = configuration(tmp_path_factory.mktemp("ray"), script="base_ms=5", runtime="ray")
    with pytest.MonkeyPatch.context() as patch:
        if HAS_JOB_SERVER:
            patch.setenv("RAY_AUTH_TOKEN", "a" * 40)
            config.write_text(config.read_text().replace("runtime: ray", "runtime: ray, job_server: true"))
        with running(config) as started:
            yield started


def test_a_killed_worker_costs_a_pause_and_no_token(daemon: Daemon) -> None:
    assert psutil.pid_exists(kill_worker_in_a_stream(daemon))


def test_every_line_is_json_and_none_has_a_text(daemon: Daemon) -> None:
    begin = len(daemon.log.read_text(encoding="utf-8"))

    def read() -> str:
        return daemon.log.read_text(encoding="utf-8")[begin:]

    use(daemon)
    aborted = abort_worker(daemon)
    until(lambda: read().count('"request ended"') == 4 + aborted)  # an answer comes before its line
    check_entries(read(), aborted)


@NEEDS_JOB_SERVER
def test_a_batch_is_a_job(daemon: Daemon, tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in.jsonl", [line_of(number) for number in range(20)]), tmp_path / "out"
    program = [sys.executable, "-m", "orchestrator.cli.main", "submit", "batch", "--address", find_job_server(daemon)]
    files = ["--input", str(source), "--output", str(output)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*program, *files, *more], capture_output=True, text=True, check=False, timeout=280)

    first = run("--submission-id", "j1", "--url", f"{daemon.url}/v1")
    assert first.returncode == 0, first.stderr
    assert "20 of 20 lines" in first.stdout
    assert count_results(output) == 20
    again = run("--submission-id", "j1", "--url", f"{daemon.url}/v1")
    assert "is there already" in again.stderr
    assert again.returncode == 0
    failed = run("--patience", "0", "--url", "http://127.0.0.1:9/v1", "--output", str(tmp_path / "other"))
    assert failed.returncode == 1
    assert "has not answered" in failed.stdout


def test_at_its_end_it_leaves_no_worker(daemon: Daemon) -> None:
    pid = daemon.status()["ready"]["pid"]
    assert daemon.stop() == 0
    assert not psutil.pid_exists(pid)
    assert json.loads(daemon.log.read_text(encoding="utf-8").splitlines()[-1])["event"] == "stopped"

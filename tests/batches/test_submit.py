"""Commands as Ray jobs: followed over a scripted job server, and on a real one where its libraries are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.launch import ray_jobs
from orchestrator.launch.ray_jobs import JobError, follow, format_entrypoint, submit
from orchestrator.launch.ray_settings import JOB_LIBRARIES, driver_environment
from tests.batches.support import (
    count_results,
    find_batch,
    kill_worker,
    line_of,
    read_results,
    wait_until,
    write_input,
)
from tests.support.daemon import Daemon, configuration, running

HAS_JOB_SERVER = all(importlib.util.find_spec(name) for name in JOB_LIBRARIES)


def info_of(status: str, entrypoint: str = "exec outrider batch", message: str = "") -> Any:
    over = status in ("SUCCEEDED", "FAILED", "STOPPED")
    told = SimpleNamespace(value=status, is_terminal=lambda: over)
    return SimpleNamespace(status=told, entrypoint=entrypoint, message=message)


@dataclass
class ScriptedJobs:
    """Says `steps` in turn: (status, log), or an error that is raised. The last one is said for ever."""

    steps: list[Any]
    known: list[str] = field(default_factory=list)
    submitted: list[dict[str, Any]] = field(default_factory=list)

    def submit_job(self, **asked: Any) -> str:
        self.submitted.append(asked)
        return asked["submission_id"] or "raysubmit_1"

    def get_job_info(self, job_id: str) -> Any:
        if self.known and job_id not in self.known:
            raise RuntimeError("Request failed with status code 404: no such job")
        if isinstance(self.steps[0], Exception):
            raise self.steps[0] if len(self.steps) == 1 else self.steps.pop(0)
        return info_of(self.steps[0][0], message="said by Ray\nmore")

    def get_job_logs(self, job_id: str) -> str:
        return str((self.steps.pop(0) if len(self.steps) > 1 else self.steps[0])[1])


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_jobs, "LOOK_EVERY_S", 0.01)


def test_a_log_is_told_once_as_it_grows_across_a_server_that_is_away():
    jobs = ScriptedJobs(
        [("RUNNING", "one\n"), ConnectionError("away"), ("RUNNING", "one\ntwo\n"), ("FAILED", "one\ntwo\nend")]
    )
    told: list[str] = []
    end = follow(jobs, "a", told.append)
    assert told == ["one\n", "two\n", "end"]
    assert (end.status, end.message, end.succeeded) == ("FAILED", "said by Ray", False)
    assert follow(ScriptedJobs([("SUCCEEDED", "")]), "a", told.append).succeeded


def test_a_server_that_stays_away_is_given_up(monkeypatch):
    monkeypatch.setattr(ray_jobs, "AWAY_S", 0.05)
    with pytest.raises(JobError, match="cannot be followed any more: away; it may run on"):
        follow(ScriptedJobs([ConnectionError("away")]), "a", print)


def test_an_id_that_is_there_is_followed_and_never_started_again():
    jobs = ScriptedJobs([("RUNNING", "")], known=["mine"])
    assert submit(jobs, "exec outrider batch", "mine", {}) == ("mine", True)
    assert submit(jobs, "exec outrider batch", "new", {"A": "b"}) == ("new", False)
    assert [asked["submission_id"] for asked in jobs.submitted] == ["new"]
    assert jobs.submitted[0]["runtime_env"] == {"env_vars": {"A": "b"}}
    with pytest.raises(JobError, match="runs another command"):
        submit(jobs, "exec outrider bench", "mine", {})


def test_what_is_run_keeps_its_words():
    assert format_entrypoint("outrider", ["batch", "--input", "/a b"]) == "exec outrider batch --input '/a b'"
    assert format_entrypoint("outrider", ["profile"], "/x y") == "cd '/x y' && exec outrider profile"


def test_a_job_server_of_our_own_is_refused_without_a_token_and_where_it_changes_nothing(tmp_path):
    with pytest.raises(Exception, match="start Ray with a job server without its token: set RAY_AUTH_TOKEN"):
        driver_environment("", has_token=True, environment={"HOME": str(tmp_path)}, jobs=True)
    given = {"RAY_AUTH_TOKEN": "x", "PATH": "/bin"}
    found = driver_environment("", has_token=True, environment=given, jobs=True)
    assert found["PATH"] == f"{os.path.dirname(sys.executable)}:/bin"
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace("runtime: local", "runtime: local, job_server: true"))
    with pytest.raises(ConfigError, match=r"cluster\.job_server: goes with a Ray of the daemon's own"):
        load_config(config)


NEEDS_JOB_SERVER = pytest.mark.skipif(not HAS_JOB_SERVER, reason="Ray's job server needs outrider extras install jobs")


def configure_jobs(directory: Path, script: str = "") -> Path:
    """Write a configuration with a Ray of the daemon's own that takes jobs."""
    config = configuration(directory, script=script, runtime="ray", extra="drafts: []")
    config.write_text(config.read_text().replace("runtime: ray", "runtime: ray, job_server: true"))
    return config


def find_job_server(daemon: Daemon) -> str:
    entries = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return str(next(entry["address"] for entry in entries if entry["event"] == "ray takes jobs"))


@pytest.mark.ray
@pytest.mark.slow
@NEEDS_JOB_SERVER
def test_a_job_whose_process_is_killed_once_and_its_worker_twice_writes_each_line_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 40)
    lines = [*(line_of(number) for number in range(60)), "this is no JSON"]
    source, output = write_input(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with running(configure_jobs(tmp_path, "base_ms=10")) as daemon:
        submit_batch = [sys.executable, "-m", "orchestrator.cli.main", "submit", "batch"]
        submit_batch += ["--address", find_job_server(daemon), "--url", f"{daemon.url}/v1", "--concurrency", "4"]
        submit_batch += ["--input", str(source), "--output", str(output)]

        def start(job: str) -> subprocess.Popen[str]:
            command = [*submit_batch, "--submission-id", job]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        first = start("first")
        wait_until(lambda: count_results(output) >= 8)
        kill_worker(daemon)
        wait_until(lambda: count_results(output) >= 20)
        os.kill(find_batch(output), signal.SIGKILL)
        told, _ = first.communicate(timeout=120)
        assert first.returncode == 1, told
        assert f"{source}:61: is no JSON" in told
        assert "job first: FAILED" in told
        kept = count_results(output)
        assert kept < len(lines), "it was killed before its end"
        second = start("second")
        wait_until(lambda: count_results(output) > kept)
        kill_worker(daemon)
        told, _ = second.communicate(timeout=240)
        assert second.returncode == 0, told
        assert "61 of 61 lines, 1 with an error" in told
        assert daemon.status()["totals"]["restarts"] == 2
    results = read_results(output)
    names = [result["custom_id"] for result in results if result["error"] is None]
    assert sorted(names) == sorted(f"line-{number}" for number in range(60))
    (bad,) = [result["error"] for result in results if result["error"] is not None]
    assert (bad["code"], bad["line"]) == ("invalid_json_line", 61)

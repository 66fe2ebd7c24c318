"""`config check` and `doctor` ask Ray's head whether it is there, and for the libraries that a configuration needs."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from orchestrator.cli.doctor import examine
from orchestrator.config.load import load_config, parse_config
from orchestrator.daemon.bootstrap import readiness
from orchestrator.daemon.bootstrap.readiness import check_readiness
from orchestrator.errors import ConfigError
from orchestrator.launch import ray_settings
from orchestrator.launch.ray_settings import find_head_problem

HEAD = "model: {source: 'simulated:toy', adapter: simulated}\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    def write_lines(*lines: str) -> Path:
        path = tmp_path / "c.yaml"
        where = f"store: {{directory: {tmp_path}}}\nstate: {{directory: {tmp_path}}}\n"
        path.write_text(HEAD + where + "\n".join(lines) + "\n")
        return path

    return write_lines


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_head_that_listens_is_told_and_one_that_is_away_is_a_warning(write, listener, outrider):
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    path = write("cluster:", f"  address: {address}")
    found = outrider("config", "check", str(path))
    assert (found.returncode, found.stderr) == (0, "")
    assert f"Ray at {address} answers" in " ".join(found.stdout.split())
    listener.close()
    found = outrider("config", "check", str(path))
    assert found.returncode == 0
    assert f"{path}:5: cluster.address: {address} does not answer: Connection refused" in found.stderr
    assert "ray start --head" in found.stderr
    assert "answers" not in found.stdout
    told = json.loads(outrider("doctor", "--json", "--config", str(path)).stdout)
    (ray,) = [one for one in told if one["name"] == "Ray"]
    assert ray["verdict"] == "warn"
    assert f"{address} does not answer" in ray["found"]
    assert ray["todo"]


def test_a_name_server_that_does_not_answer_holds_nobody(monkeypatch):
    released = threading.Event()

    def connect_late(*_: object) -> None:
        released.wait()
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect_late)
    assert find_head_problem("head.example.org:6379") == "head.example.org:6379 does not answer within 1.5 s"
    released.set()


def test_auto_is_what_ray_start_left_here(tmp_path, monkeypatch, listener):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert "nobody has started Ray on this machine" in find_head_problem("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{listener.getsockname()[1]}\n")
    assert find_head_problem("auto") == ""
    assert find_head_problem("head") == "head is no HOST:PORT"
    assert find_head_problem("127.0.0.1:99999") == "127.0.0.1:99999 is no HOST:PORT"


def test_what_is_not_installed_is_named_with_its_extra(write, monkeypatch):
    path = write("cluster:", "  runtime: ray", "  job_server: true", "tracing:", "  endpoint: http://127.0.0.1:4318")
    config, lines = load_config(path), parse_config(path.read_text(), path)[1]
    monkeypatch.setattr(ray_settings, "JOB_LIBRARIES", ("no_such_library", "json"))
    monkeypatch.setattr(readiness, "OTEL_LIBRARY", "no_such_package.exporter")
    with pytest.raises(ConfigError) as refused:
        check_readiness(config, path, lines)
    jobs, traces = str(refused.value).splitlines()
    assert jobs.startswith(f"{path}:6: cluster.job_server: no_such_library not installed: outrider extras install jobs")
    assert traces.startswith(f"{path}:8: tracing.endpoint: no_such_package.exporter is not installed: outrider extras ")
    assert "install otel" in traces
    assert [one.found for one in examine(path) if one.verdict == "fail"] == [jobs, traces]


def test_a_token_that_is_missing_here_is_a_warning(write, monkeypatch, listener, tmp_path):
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(f"cluster: {{address: '127.0.0.1:{listener.getsockname()[1]}'}}")
    config, lines = load_config(path), parse_config(path.read_text(), path)[1]
    (warning,) = check_readiness(config, path, lines).warnings
    assert warning.startswith(f"{path}:4: cluster.address: cannot join Ray")
    assert "set RAY_AUTH_TOKEN" in warning


def test_an_address_of_rays_client_protocol_is_refused_at_its_line(write):
    path = write("cluster:", "  address: ray://head:10001")
    with pytest.raises(ConfigError, match=r"c.yaml:5: cluster.address: Ray's client protocol is not supported; write"):
        load_config(path)

"""The commands as a person runs them: exit codes, one readable line on failure, JSON that parses."""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading

import pytest

from adapters.libllama import is_portable
from orchestrator.cli.daemon_socket import StatusError, query_daemon
from orchestrator.cli.doctor import _frameworks
from tests.support.daemon import outrider_process


def test_version_and_help():
    assert outrider_process("--version").stdout.startswith("outrider 0.")
    shown = outrider_process("--help").stdout
    assert all(command in shown for command in ("serve", "status", "config", "bench", "doctor"))


def test_config_check_shows_effective_values(tmp_path, outrider):
    path = tmp_path / "c.yaml"
    path.write_text("model: {source: 'simulated:toy', adapter: simulated}\nlimits: {kv_cache: 64 MiB}\n")
    assert "ok" in outrider("config", "check", str(path)).stdout
    values = json.loads(outrider("config", "check", str(path), "--json").stdout)
    assert values["limits"]["kv_cache"] == 64 << 20
    assert values["limits"]["max_running"] == 16


def test_config_check_shows_every_value_as_it_would_be_written(tmp_path, outrider):
    path = tmp_path / "[bold]c.yaml"
    long = "/store/" + "x" * 120
    path.write_text(
        "model: {source: 'simulated:toy', adapter: simulated, name: '[red]n[/red]'}\n"
        f"limits: {{kv_cache: 64 MiB}}\ndrafts: []\nstore: {{directory: {long}}}\n"
    )
    shown = outrider("config", "show", str(path)).stdout
    cells = "".join(line.split("│")[2].strip() for line in shown.splitlines() if line.count("│") == 3)
    assert "[red]n[/red]" in cells
    assert "64 MiB" in cells
    assert long in cells


@pytest.mark.parametrize("command", [("config", "check"), ("serve", "--config"), ("status", "--config")])
@pytest.mark.parametrize("kind", ["missing", "directory", "binary"])
def test_an_unreadable_configuration_is_one_line_and_exit_1(tmp_path, command, kind, outrider):
    path = tmp_path / "c.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
    done = outrider(*command, str(path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"outrider: {path}: ")


def test_status_needs_no_model_file_only_the_socket(tmp_path, outrider):
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{source: gone.gguf}}\napi: {{admin_socket: {tmp_path}/a.sock}}\n")
    done = outrider("status", "--config", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"outrider: no daemon answers on {tmp_path}/a.sock")


def test_a_socket_that_nobody_listens_on_is_said_so_and_nothing_is_left_open(tmp_path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    for tried in (path, tmp_path / "none.sock"):
        with pytest.raises(StatusError, match="no daemon answers on"):
            query_daemon(tried)
    gc.collect()  # what is still open warns now, and a warning is an error


@pytest.mark.parametrize(
    "told", [b"", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n", b"HTTP/1.0 2"]
)
def test_an_answer_that_ends_within_its_headers_is_none(tmp_path, told):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(told)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StatusError, match="no daemon answers on"):
            query_daemon(path)
        thread.join()


def test_a_traceback_is_there_for_those_who_ask(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_TRACEBACK", "1")
    assert "Traceback" in outrider_process("config", "check", str(tmp_path / "missing")).stderr


@pytest.mark.parametrize("command", [("config", "check"), ("serve", "--config")])
def test_a_wrong_configuration_is_one_line_and_exit_1(tmp_path, command, outrider):
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  source: simulated:toy\n  adapter: simulated\nlimits:\n  max_runing: 3\n")
    done = outrider(*command, str(path))
    assert done.returncode == 1
    assert done.stderr == f"outrider: {path}:5: limits.max_runing: unknown key; did you mean 'max_running'?\n"


def test_no_configuration_at_all(tmp_path, monkeypatch, outrider):
    monkeypatch.chdir(tmp_path)
    done = outrider("config", "check")
    assert done.returncode == 1
    assert "--config" in done.stderr


def test_schema_is_json(outrider):
    assert json.loads(outrider("config", "schema").stdout)["title"] == "Outrider cluster.yaml"


def test_usage_errors_exit_2(outrider):
    assert outrider("serve", "--port", "99999").returncode == 2
    assert outrider("nonsense").returncode == 2


def test_doctor_finds_this_machine_ready(outrider):
    done = outrider("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 0
    assert checks["openvino"]["verdict"] == "ok"
    assert checks["package policies"]["found"] == "installed from this checkout"
    assert ("build-kernels" in checks["kernels of llama_cpp"]["todo"]) is is_portable()


def test_doctor_takes_another_build_of_onnx_runtime_for_it(tmp_path, monkeypatch):
    """Distributions as pip leaves them, one without onnxruntime's and one with a build of it for another device."""
    for found in ("warn", "ok"):
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        checks = {check.name: check for check in _frameworks()}
        assert checks["onnxruntime"].verdict == found
        assert checks["ik-llama-cpp-python"].todo == "outrider extras install llama, or model.adapter: openvino_rt"
        assert checks["onnxruntime"].found == ("not installed" if found == "warn" else "1.31.1 (onnxruntime-gpu)")
        metadata = tmp_path / "onnxruntime_gpu-1.31.1.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n")

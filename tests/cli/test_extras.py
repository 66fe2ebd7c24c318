"""What an installation may lack or share: extras are named where they are needed, import names where two have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.cli.doctor import examine
from tests.support import daemon as daemons
from tests.support.daemon import configuration, running

EXTRAS = ("ray", "textual", "simpy", "httpx_sse")


@pytest.fixture
def without_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for one daemon. No process that is started finds a package of the extras."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n")
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{Path(__file__).parents[2]}")
    return tmp_path


def run_outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.cli.entry", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_one_machine_serves_without_them(without_extras, monkeypatch):
    def start(arguments: list[str], output: int, errors: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "orchestrator.cli.entry", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=errors)

    monkeypatch.setattr(daemons, "start_outrider", start)
    with running(configuration(without_extras)) as daemon:
        answer = daemon.client.completions.create(model="toy", prompt="a", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert daemon.stop() == 0


def test_the_extra_is_named_at_the_line_that_asks_for_ray(without_extras):
    path = configuration(without_extras, runtime="ray")
    check = run_outrider("config", "check", str(path))
    assert check.returncode == 1
    assert f"{path}:2: cluster.runtime: Ray is not installed: outrider extras install ray" in check.stderr


def test_the_screen_names_its_extra(without_extras):
    screen = run_outrider("top")
    assert screen.returncode == 1
    assert "outrider extras install top" in screen.stderr
    assert "Traceback" not in screen.stderr


def test_a_distribution_that_has_one_of_our_import_names_is_named(tmp_path, monkeypatch):
    metadata = tmp_path / "stranger-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("adapters\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = {check.name: check for check in examine(None) if check.name.startswith("package ")}
    assert packages["package adapters"].verdict == "fail"
    assert packages["package adapters"].todo == "pip uninstall stranger"
    assert packages["package orchestrator"].verdict == "ok"


def write_wheel(directory: Path, name: str, version: str) -> None:
    """Write a wheel that has nothing but its metadata."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """A directory of wheels, which is all that pip knows; it installs beside it, into `target`."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {
        "CONFIG_FILE": os.devnull,
        "FIND_LINKS": tmp_path / "wheels",
        "TARGET": tmp_path / "target",
        "RETRIES": 1,
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def test_pip_brings_exactly_what_was_tested_where_newer_ones_are(wheels, monkeypatch):
    (redis,) = json.loads(run_outrider("extras", "list", "--json").stdout)["redis"]
    for version in (redis["tested"], "99.0.0"):
        write_wheel(wheels, "redis", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = run_outrider("extras", "install", "redis", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["packages"] == [redis]
    assert [path.name for path in wheels.parent.glob("target/*.dist-info")] == [f"redis-{redis['tested']}.dist-info"]


def test_what_keeps_pip_from_it_is_told_in_a_line(wheels, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    away = run_outrider("extras", "install", "redis")
    assert (away.returncode, len(away.stderr.splitlines())) == (1, 1)
    assert "pip reaches no package index: set PIP_INDEX_URL" in away.stderr
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lacking = run_outrider("extras", "install", "redis")
    assert (lacking.returncode, len(lacking.stderr.splitlines())) == (1, 1)
    assert "pip does not bring redis 8." in lacking.stderr


def test_an_environment_without_pip_is_named_with_what_does_the_same(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pip'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    done = run_outrider("extras", "install", "ray", "onnx")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "-m ensurepip`, or uv pip install --python" in done.stderr
    assert done.stderr.rstrip().endswith("'onnx>=1.20' 'onnxruntime>=1.31'")
    dry = run_outrider("extras", "install", "ray", "--dry-run")
    assert dry.returncode == 0
    assert "--constraint" in dry.stdout
    unknown = run_outrider("extras", "install", "onx")
    assert "there is no extra 'onx'; there is conformance, demo" in unknown.stderr


def test_versions_that_decide_bits_and_were_not_tested_are_named(tmp_path, monkeypatch):
    metadata = tmp_path / "numpy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    name = "versions that decide bits"
    (before,) = [check for check in examine(None) if check.name == name]
    assert (before.verdict, before.found) == ("ok", "as tested")
    monkeypatch.syspath_prepend(str(tmp_path))
    (after,) = [check for check in examine(None) if check.name == name]
    assert after.verdict == "warn"
    assert after.found.startswith("numpy 1.0 (tested: ")

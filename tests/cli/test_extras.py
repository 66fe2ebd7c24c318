"""What an installation may lack or share: extras are named where they are needed, import names where two have them."""

from __future__ import annotations

import subprocess
import sys
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
    assert f"{path}:2: cluster.runtime: Ray is not installed: pip install 'outrider[ray]'" in check.stderr


def test_the_screen_names_its_extra(without_extras):
    screen = run_outrider("top")
    assert screen.returncode == 1
    assert "pip install 'outrider[top]'" in screen.stderr
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

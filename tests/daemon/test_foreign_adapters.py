"""Adapters of other distributions: a real one is listed, served with and tested; broken ones end nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import configuration, outrider_process, running
from tests.support.foreign_adapter import SUITE, install_tiny_adapter, write_distribution

ASK: dict[str, Any] = {"model": "toy", "prompt": "the state of the art ", "max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def tiny_site(tmp_path_factory) -> Path:
    return install_tiny_adapter(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(tiny_site, monkeypatch) -> Path:
    """The tiny adapter is installed, for every process that is started."""
    put_on_path(monkeypatch, tiny_site)
    return tiny_site


def put_on_path(monkeypatch: pytest.MonkeyPatch, *sites: Path) -> None:
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, sites), *([before] if before else [])]))


def tiny_configuration(directory: Path) -> Path:
    path = configuration(directory)
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: tiny, device: TINY"))
    return path


def list_devices(config: Path) -> dict[str, dict[str, object]]:
    found = outrider_process("devices", "--json", "--config", str(config))
    assert found.returncode == 0, found.stderr
    return {row["runtime"]: row for row in json.loads(found.stdout)}


def examine() -> dict[str, dict[str, str]]:
    found = outrider_process("doctor", "--json")
    return {check["name"]: check for check in json.loads(found.stdout)}


def test_an_installed_adapter_is_listed_with_its_distribution(tiny, tmp_path):
    row = list_devices(tiny_configuration(tmp_path))["tiny"]
    assert (row["device"], row["runtime_version"]) == ("TINY", "tiny-accelerator 1.2.3")
    check = examine()["adapter tiny"]
    assert check["verdict"] == "ok"
    assert "tiny-accelerator 1.2.3: TINY" in check["found"]


def test_a_daemon_serves_with_it_and_says_the_same_as_ours(tiny, tmp_path):
    (tmp_path / "ours").mkdir()
    with running(configuration(tmp_path / "ours")) as daemon:
        expected = daemon.client.completions.create(**ASK).choices[0].text
    with running(tiny_configuration(tmp_path)) as daemon:
        assert daemon.status()["ready"]["device"] == "TINY"
        assert daemon.client.completions.create(**ASK).choices[0].text == expected


def run_suite(directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the shipped suite as the adapter's author does, in a project of its own."""
    (directory / "test_tiny.py").write_text(SUITE)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(directory)]
    command = [sys.executable, "-m", "pytest", *options, "test_tiny.py"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the suite needs none, and ours take long
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_its_author_runs_the_conformance_suite(tiny, tmp_path):
    found = run_suite(tmp_path)
    assert found.returncode == 0, found.stdout
    assert int(found.stdout.split(" passed")[0].split()[-1]) >= 25


def test_the_suite_fails_where_rows_depend_on_the_batch(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_FAULT", "rows")
    found = run_suite(tmp_path)
    assert found.returncode == 1
    assert "tiny: in none of its 2 numerical classes a row keeps its bits" in found.stdout


@pytest.fixture
def broken(tiny_site, tmp_path, monkeypatch) -> Path:
    """Beside the tiny adapter: two that want one name, one of ours, a bad name, and four that break."""
    site = tmp_path / "broken"
    write_distribution(site, "first-npu", "first_npu", "", npu="first_npu:Adapter")
    write_distribution(site, "second-npu", "second_npu", "", npu="second_npu:Adapter")
    write_distribution(site, "false-torch", "false_torch", "", torch_device="false_torch:Adapter")
    write_distribution(site, "bad-name", "bad_name", "", **{"Bad-Name": "bad_name:Adapter"})
    write_distribution(site, "no-import", "no_import", "import not_there_at_all", unimportable="no_import:Adapter")
    write_distribution(site, "exits", "exits", "import sys; sys.exit(3)", exiting="exits:Adapter")
    write_distribution(site, "no-methods", "no_methods", "class Adapter: name = 'empty'", empty="no_methods:Adapter")
    write_distribution(site, "no-attribute", "no_attribute", "", nameless="no_attribute:Adapter")
    put_on_path(monkeypatch, site, tiny_site)
    return site


def test_clashes_and_broken_adapters_are_told_and_end_nothing(broken, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_FAULT", "devices")
    expected = {
        "npu": "claimed by first-npu and second-npu",
        "Bad-Name": "is no adapter's name",
        "unimportable": "not_there_at_all",
        "exiting": "the adapter exiting of exits 0.1 cannot be made: SystemExit(3)",
        "empty": "has no devices, classes, recipe, prepare, load",
        "nameless": "has no attribute 'Adapter'",
        "tiny": "the adapter tiny of tiny-accelerator 1.2.3 lists no devices: RuntimeError('the tiny driver",
    }
    checks, rows = examine(), list_devices(configuration(tmp_path))
    for name, words in expected.items():
        assert checks[f"adapter {name}"]["verdict"] == "warn"
        assert words in checks[f"adapter {name}"]["found"]
        assert words in str(rows[name]["unavailable"])
    assert "'torch_device' is Outrider's own" in checks["adapter torch_device"]["found"]
    with running(configuration(tmp_path)) as daemon:
        assert daemon.client.completions.create(**ASK).choices[0].text


def test_planning_passes_a_broken_adapter_by(broken, monkeypatch):
    monkeypatch.setenv("TINY_FAULT", "devices")
    code = "from orchestrator.machine.devices import list_devices_here; print(len(list_devices_here().seen))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) >= 1


def test_an_unknown_adapter_is_told_with_its_line_and_what_is_installed(tiny, broken, tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text("model:\n  source: simulated:toy\n  adapter: tinny\n")
    found = outrider_process("serve", "--config", str(config))
    assert found.returncode == 1
    assert (
        f"{config}:3: model.adapter: must be 'llama_cpp', 'openvino_llama', 'onnx_rt', 'openvino_rt', 'simulated'"
        in found.stderr
    )
    assert "'tiny'" in found.stderr
    assert "not 'tinny'" in found.stderr
    config.write_text("model:\n  source: simulated:toy\n  adapter: npu\n")
    found = outrider_process("serve", "--config", str(config))
    assert "the name 'npu' is claimed by first-npu and second-npu: uninstall all but one" in found.stderr


def test_a_named_adapter_that_breaks_ends_the_start_with_one_line(broken, tmp_path):
    path = configuration(tmp_path)
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: unimportable"))
    found = outrider_process("serve", "--config", str(path))
    assert found.returncode == 1
    assert "the adapter unimportable of no-import 0.1 cannot be made: ModuleNotFoundError" in found.stderr

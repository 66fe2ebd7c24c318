"""The wheel: every module and data file of the source is in it, and the command runs from where it was installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "device_profiles", "orchestrator", "policies")
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    sys.stdout.write(importlib.import_module(name).__file__ + "\\n")
from device_profiles.known_devices import load_known_devices
sys.stdout.write(str(len(load_known_devices())))
"""


def run(*arguments: str, **options) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def list_files(root: Path) -> set[str]:
    """Return the files of our packages under a directory."""
    paths = (path for name in PACKAGES for path in root.joinpath(name).rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in paths if path.suffix != ".pyc"}


def test_the_wheel_holds_all_that_the_source_holds_and_runs(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for name in PACKAGES:  # what an earlier build left beside the source would be packed again
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check")
    run("-m", "pip", "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "pip", "install", *offline, "--no-compile", "--target", str(target), str(wheel))

    assert list_files(target) == list_files(ROOT)
    assert (target / "bin" / "outrider").is_file()
    there = {"env": os.environ | {"PYTHONPATH": str(target)}, "cwd": tmp_path}
    assert "serve" in run("-m", "orchestrator.cli.main", "--help", **there)
    modules = sorted(str(Path(name).parent).replace("/", ".") for name in list_files(ROOT) if "__init__" in name)
    *places, devices = run("-c", IMPORT_ALL, *modules, **there).splitlines()
    assert len(places) == len(modules)
    assert all(Path(place).is_relative_to(target) for place in places)
    assert int(devices) == len(list(ROOT.glob("device_profiles/library/*.yaml")))

"""The laboratory's wheel: every module and data file of its source is in it, and it wants the Outrider beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

LAB = Path(__file__).parents[1]


def test_the_wheel_holds_all_that_the_source_holds(tmp_path: Path) -> None:
    source = tmp_path / "source"  # what an earlier build left beside ours would be packed again
    shutil.copytree(LAB / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(LAB / name, source)
    offline = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--no-build-isolation")
    command = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("outrider_lab-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("outrider_lab/")}
    files = (path for path in (LAB / "src" / "outrider_lab").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert held == {path.relative_to(LAB / "src").as_posix() for path in files}


def test_it_needs_the_outrider_of_its_own_version() -> None:
    product, lab = (
        tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for root in (LAB.parents[1], LAB)
    )
    assert lab["version"] == product["version"]
    assert f"outrider=={product['version']}" in lab["dependencies"]

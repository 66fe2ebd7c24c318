"""Environments of their own for packages that are not to be among ours: what is here is seen there, too."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest


def make_environment(place: Path, packages: list[str]) -> str:
    """Install packages without their dependencies into a new environment, and return its python. Those that are here
    are seen there, behind its own. Where pip does not find a package, the test is skipped."""
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    site = next((place / "lib").glob("python*/site-packages"))
    (site / "zz_shared.pth").write_text(sysconfig.get_paths()["purelib"])
    install = [python, "-m", "pip", "install", "-q", "--no-deps", *packages]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{packages[0]} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def run_there(python: str, *arguments: str | Path) -> str:
    """Run that python with these arguments, without the hub, and return what it prints. Fails where it ends badly."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [python, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout

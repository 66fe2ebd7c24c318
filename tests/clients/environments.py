"""Environments of their own for clients, and what a daemon refused them."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.daemon import Daemon

_KEPT = ("PATH", "LANG", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")


def install(command: Sequence[str], directory: Path) -> None:
    """Run an installer to its end; the test is skipped where it finds nothing."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")


def make_environment(directory: Path, packages: Sequence[str], *, shared: bool = False) -> Path:
    """Install packages into a new environment in `directory`/venv, and return its Python. `shared`: libraries that are
    here, torch among them, serve it too, where a package would bring gigabytes."""
    venv.create(directory / "venv", with_pip=True)
    python = directory / "venv" / "bin" / "python"
    if shared:
        site = next((directory / "venv" / "lib").glob("python*/site-packages"))
        (site / "zz_shared.pth").write_text(sysconfig.get_paths()["purelib"])
    install([str(python), "-m", "pip", "install", "-q", *packages], directory)
    return python


def bare_environment(directory: Path) -> dict[str, str]:
    """Return what a client sees of this machine: no key, no proxy, no files of the user's."""
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    return {**kept, "HOME": str(directory), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def list_refused(daemon: Daemon) -> list[str]:
    """Return the lines of a daemon's log that tell of refused requests."""
    lines = daemon.log.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if '"request refused"' in line]

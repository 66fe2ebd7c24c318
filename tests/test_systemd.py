"""What the notifier says to systemd. The unit file and a whole daemon: tests/daemon/test_systemd.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SAY = (
    "from orchestrator.systemd import Notifier; n = Notifier(); "
    r"n.status('loading\nREADY=1'); n.ready(); n.stopping()"
)


def say(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    return subprocess.run(
        [sys.executable, "-c", SAY], env=inherited | environment, capture_output=True, text=True, check=False
    )


def test_systemd_hears_each_state_and_no_text_can_claim_readiness(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(10)
        assert say({"NOTIFY_SOCKET": str(tmp_path / "notify")}).returncode == 0
        heard = [notify.recv(4096).decode() for _ in range(3)]
    assert heard == ["STATUS=loading READY=1", "READY=1\nSTATUS=serving", "STOPPING=1\nSTATUS=draining"]


def test_without_systemd_nothing_is_said():
    done = say({})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

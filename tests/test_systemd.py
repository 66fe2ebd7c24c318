"""What the notifier says to systemd. The unit file and a whole daemon: tests/systemd."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

SAY = (
    "from orchestrator.daemon.systemd.notify import Notifier; n = Notifier(); "
    r"n.begin_reload(); n.status('loading\nREADY=1'); n.ready(); n.begin_reload(); n.end_reload(); "
    r"n.begin_reload(); n.end_reload('keys.txt\nREADY=1'); n.stopping(60.0); n.begin_reload(); n.end_reload()"
)


def say(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    return subprocess.run(
        [sys.executable, "-c", SAY], env=inherited | environment, capture_output=True, text=True, check=False
    )


def test_systemd_hears_each_state_and_neither_a_text_nor_a_reload_claims_readiness_too_soon(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(10)
        assert say({"NOTIFY_SOCKET": str(tmp_path / "notify")}).returncode == 0
        notify.setblocking(False)
        heard = []
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.append(notify.recv(4096).decode())
    begun = [message.splitlines()[1] for message in heard if message.startswith("RELOADING=1\n")]
    assert all(line.removeprefix("MONOTONIC_USEC=").isdecimal() for line in begun)
    assert [message for message in heard if not message.startswith("RELOADING=1\n")] == [
        "STATUS=loading READY=1",
        "READY=1\nSTATUS=serving",
        "READY=1\nSTATUS=serving",
        "READY=1\nSTATUS=serving; the last reload failed: keys.txt READY=1",
        "STOPPING=1\nSTATUS=draining",
        "EXTEND_TIMEOUT_USEC=60000000",
    ]
    assert len(begun) == 2


def test_without_systemd_nothing_is_said():
    done = say({})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

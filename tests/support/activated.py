"""Plays systemd for a real daemon: its sockets, its notify socket, SIGHUP, and a restart under load."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# The process id must be the daemon's own, which is known only once it runs; so a shell says it, and becomes the daemon.
_BECOME = 'LISTEN_PID=$$; export LISTEN_PID; exec "$@"'
WITHIN_S = 240.0


@dataclass
class PlayedSystemd:
    """Holds the sockets of a unit. `heard`: every state that daemons have said, in order."""

    directory: Path
    api: socket.socket
    admin: socket.socket
    notify: socket.socket
    heard: list[dict[str, str]] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where the API is."""
        return f"http://127.0.0.1:{self.api.getsockname()[1]}"

    def start(self, config: Path) -> subprocess.Popen[bytes]:
        """Start a daemon with our sockets as files 3 and 4; returns once it has said READY."""
        command = [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(config)]
        spare = [os.dup(given.fileno()) for given in (self.api, self.admin)]
        moved = f"exec 3<&{spare[0]} 4<&{spare[1]}; {_BECOME}"
        environment = {**os.environ, "LISTEN_FDS": "2", "NOTIFY_SOCKET": str(self.directory / "notify")}
        try:
            with config.with_suffix(".log").open("ab") as log:
                process = subprocess.Popen(
                    ["bash", "-c", moved, "bash", *command], pass_fds=spare, env=environment, stderr=log, stdout=log
                )
        finally:
            for one in spare:
                os.close(one)
        self.started.append(process)
        self.wait_for("READY", process)
        return process

    def wait_for(self, name: str, process: subprocess.Popen[bytes] | None = None) -> dict[str, str]:
        """Return the next message that says this."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            self.notify.settimeout(0.5)
            try:
                told = dict(line.split("=", 1) for line in self.notify.recv(4096).decode().splitlines())
            except TimeoutError:
                if process is not None and process.poll() is not None:
                    raise AssertionError(f"the daemon ended with {process.returncode}") from None
                continue
            self.heard.append(told)
            if name in told:
                return told
        raise AssertionError(f"{name} was never said: {self.heard}")


@contextmanager
def play_systemd(directory: Path) -> Iterator[PlayedSystemd]:
    """Open the sockets; daemons that still run at the end are killed."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as api,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as admin,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
    ):
        api.bind(("127.0.0.1", 0))
        api.listen(4096)
        admin.bind(str(directory / "admin.sock"))
        admin.listen(128)
        notify.bind(str(directory / "notify"))
        played = PlayedSystemd(directory, api, admin, notify)
        try:
            yield played
        finally:
            for process in played.started:
                if process.poll() is None:
                    process.kill()
                process.wait()

"""A real Redis on a Unix socket, for tests of what is kept there."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.waiting import until

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="needs redis-server or valkey-server: apt install redis-server"
)


class RedisServer:
    """A server that can be stopped, killed and started again; it keeps nothing on disk."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}?db=0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        assert PROGRAM is not None
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self._directory)]
        self._process = subprocess.Popen([PROGRAM, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers)

    def _answers(self) -> bool:
        with self.connect() as client:
            try:
                return bool(client.ping())
            except redis.exceptions.ConnectionError:
                return False

    def connect(self) -> redis.Redis:
        """Return a client; to be closed."""
        return redis.Redis(unix_socket_path=str(self.socket))

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)


@contextmanager
def running_redis(directory: Path) -> Iterator[RedisServer]:
    """Start a server, and see that it is gone at the end."""
    server = RedisServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.kill()

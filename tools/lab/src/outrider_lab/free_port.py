"""Servers that are started here: a port for each, the wait until it serves, and its end."""

from __future__ import annotations

import math
import socket
import subprocess
import time
from contextlib import suppress

import httpx


def find_free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_served(server: subprocess.Popen[bytes], url: str, within_s: float = math.inf) -> bool:
    """Return whether a server that was started says 200 at this address within so long. False at once where it ends."""
    end_s = time.monotonic() + within_s
    while server.poll() is None and time.monotonic() < end_s:
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2.0).status_code == httpx.codes.OK:
                return True
        time.sleep(0.1)
    return False


def end_server(server: subprocess.Popen[bytes], within_s: float = 10.0) -> None:
    """End a server that was started; one that has not ended within so long is killed."""
    server.terminate()
    try:
        server.wait(within_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()

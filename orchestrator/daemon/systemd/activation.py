"""Takes the listening sockets that systemd opened for us, so that a restart refuses no connection."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import DaemonError

_FIRST_FD: Final = 3  # systemd's
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_MOST: Final = 64  # more than a unit of ours has


@dataclass(frozen=True, slots=True)
class GivenSockets:
    """What systemd listens on for us: the API's TCP socket, and the Unix socket of the admin commands."""

    api: socket.socket | None = None
    admin: socket.socket | None = None


def take_sockets(environment: MutableMapping[str, str] | None = None) -> GivenSockets:
    """Take the sockets that are meant for this process; workers inherit neither them nor their names. Raises
    DaemonError for sockets that no daemon can use."""
    variables = os.environ if environment is None else environment
    pid, count = variables.get("LISTEN_PID", ""), variables.get("LISTEN_FDS", "")
    for name in _VARIABLES:
        variables.pop(name, None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return GivenSockets()
    sockets: dict[str, socket.socket] = {}
    for descriptor in range(_FIRST_FD, _FIRST_FD + min(int(count), _MOST)):
        given = _open(descriptor)
        kind = "admin" if given.family == socket.AF_UNIX else "api"
        if kind in sockets:
            what = "Unix" if kind == "admin" else "TCP"
            raise DaemonError(f"systemd gave more than one {what} socket; leave one ListenStream of that kind")
        sockets[kind] = given
    return GivenSockets(sockets.get("api"), sockets.get("admin"))


def _open(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        given = socket.socket(fileno=descriptor)
        listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise DaemonError(
            f"file {descriptor} of systemd is no socket: {error.strerror}; see the socket unit"
        ) from error
    usable = given.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    if not listens or not usable or given.type != socket.SOCK_STREAM:
        raise DaemonError(f"file {descriptor} of systemd does not listen; write ListenStream, and Accept=no")
    return given

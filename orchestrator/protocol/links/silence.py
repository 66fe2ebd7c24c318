"""Has the kernel find out whether the other side of a connection is still there."""

from __future__ import annotations

import socket


def notice_silence(connected: socket.socket, *, silent_s: int, every_s: int, probes: int, unheard_ms: int = 0) -> None:
    """Probe a TCP connection that was silent for `silent_s`, so often and so many times, until it is lost.
    `unheard_ms`: so long what was sent may go without a confirmation (0: as the kernel has it). Other systems than
    Linux know these options by other names; there the other side is asked every two hours."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": silent_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": probes}
    if unheard_ms:
        options["TCP_USER_TIMEOUT"] = unheard_ms
    for name, value in options.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

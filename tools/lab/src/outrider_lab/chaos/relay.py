"""A cable between two network name spaces that passes through this process, so that it can be slow or cut.

    python -m outrider_lab.chaos.relay NEAR FAR NAME

Makes an Ethernet device NAME in each name space and passes frames between them. Orders come on standard input, one a
line: `cut`, `up`, `delay MILLISECONDS`. Ends with its input. The kernel here has no `tc netem`.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path

from outrider_lab.bench.cluster.hosts import enter_host

TUN = Path("/dev/net/tun")
DEVICE = "eth0"
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65_536


def open_device(namespace: str, name: str) -> int:
    """Make an Ethernet device on a host; returns the file that its frames pass through."""
    enter_host(namespace)
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


class Cable:
    """Passes frames between two files."""

    def __init__(self, near: int, far: int) -> None:
        self._other = {near: far, far: near}
        self._waiting: deque[tuple[float, int, bytes]] = deque()
        self._delay_s = 0.0
        self._cut = False

    def run(self, orders: int) -> None:
        """Pass frames on until the orders end."""
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready, _, _ = select.select([orders, *self._other], [], [], wait_s)
            if orders in ready:
                text = os.read(orders, 4096)
                if not text:
                    return
                for line in text.decode().split("\n"):
                    self._obey(line.split())
            for device in self._other:
                if device in ready:
                    self._take(device)
            self._pass_due()

    def _obey(self, words: list[str]) -> None:
        if words[:1] == ["delay"]:
            self._delay_s = float(words[1]) / 1000.0
        elif words in (["cut"], ["up"]):
            self._cut = words == ["cut"]

    def _take(self, device: int) -> None:
        try:
            while frame := os.read(device, _FRAME_BYTES):
                if not self._cut:
                    self._waiting.append((time.monotonic() + self._delay_s, self._other[device], frame))
        except OSError:  # no further frame, or the device is down
            return

    def _pass_due(self) -> None:
        # A delay that was shortened does not let frames overtake: the order of one wire is kept.
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, device, frame = self._waiting.popleft()
            try:
                os.write(device, frame)
            except OSError:
                continue


def main() -> None:
    near, far, name = sys.argv[1:]
    cable = Cable(open_device(near, name), open_device(far, name))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    cable.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()

"""Tells systemd how the daemon is doing (sd_notify); says nothing where there is no systemd."""

from __future__ import annotations

import os
import time
from typing import Final

from sdnotify import SystemdNotifier

from device_profiles.units import US_PER_S

_OFTEN_S: Final = 5.0  # where systemd asks for no watchdog. Not tuned.
_NS_PER_US: Final = 1000  # a unit
_SERVING: Final = "serving"


class Notifier:
    """States of a `Type=notify` or `Type=notify-reload` unit."""

    def __init__(self) -> None:
        self._notifier = SystemdNotifier()
        self._serves = False
        self._serving = _SERVING

    def ready(self, text: str = _SERVING) -> None:
        """The daemon serves; `text` says what."""
        self._serves, self._serving = True, text
        self._tell_ready(text)

    def begin_reload(self) -> None:
        """Files are read again. Says nothing before the daemon serves, nor when it ends: READY follows, and would be
        untrue."""
        if self._serves:
            moment_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // _NS_PER_US
            self._notifier.notify(f"RELOADING=1\nMONOTONIC_USEC={moment_us}\nSTATUS=reading files again")

    def end_reload(self, problem: str = "") -> None:
        """It is done. `problem`: why something stays as it was; systemd has no failed reload, so the status says it."""
        if self._serves:
            self._tell_ready(f"{self._serving}; the last reload failed: {problem}" if problem else self._serving)

    def _tell_ready(self, status: str) -> None:
        self._notifier.notify(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, text: str) -> None:
        """Show one line in `systemctl status`."""
        self._notifier.notify(f"STATUS={_one_line(text)}")

    @property
    def alive_every_s(self) -> float:
        """How often `alive` is to be said: thrice within WatchdogSec."""
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        return min(_OFTEN_S, int(microseconds) / US_PER_S / 3.0) if microseconds.isdecimal() else _OFTEN_S

    def alive(self) -> None:
        """The daemon still looks after its workers."""
        self._notifier.notify("WATCHDOG=1")

    def extend(self, seconds: float) -> None:
        """A load or a drain goes on: the start or stop may take so much longer from now."""
        self._notifier.notify(f"EXTEND_TIMEOUT_USEC={int(seconds * US_PER_S)}")

    def stopping(self, drain_s: float) -> None:
        """The daemon drains for so long at the most, and ends."""
        self._serves = False
        self._notifier.notify("STOPPING=1\nSTATUS=draining")
        self.extend(drain_s)


def _one_line(text: str) -> str:
    """Return a text without line breaks: behind one it could say READY=1."""
    return " ".join(text.split())

"""Tells systemd how the daemon is doing (sd_notify); says nothing where there is no systemd."""

from __future__ import annotations

import os
from typing import Final

from sdnotify import SystemdNotifier

_OFTEN_S: Final = 5.0
_US_PER_S: Final = 1e6


class Notifier:
    """States of a `Type=notify` unit."""

    def __init__(self) -> None:
        self._notifier = SystemdNotifier()

    def ready(self, text: str = "serving") -> None:
        """The daemon serves; `text` says what."""
        self._notifier.notify(f"READY=1\nSTATUS={' '.join(text.split())}")

    def status(self, text: str) -> None:
        """Show one line in `systemctl status`."""
        # One line only: behind a line break a text could say READY=1.
        self._notifier.notify(f"STATUS={' '.join(text.split())}")

    @property
    def alive_every_s(self) -> float:
        """How often `alive` is to be said: thrice within WatchdogSec."""
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        return min(_OFTEN_S, int(microseconds) / _US_PER_S / 3.0) if microseconds.isdecimal() else _OFTEN_S

    def alive(self) -> None:
        """The daemon still looks after its workers."""
        self._notifier.notify("WATCHDOG=1")

    def extend_start(self, seconds: float) -> None:
        """A load goes on: the start may take so much longer from now."""
        self._notifier.notify(f"EXTEND_TIMEOUT_USEC={int(seconds * _US_PER_S)}")

    def stopping(self) -> None:
        """The daemon drains and ends."""
        self._notifier.notify("STOPPING=1\nSTATUS=draining")

"""Tells systemd how the daemon is doing (sd_notify); says nothing where there is no systemd."""

from __future__ import annotations

from sdnotify import SystemdNotifier


class Notifier:
    """States of a `Type=notify` unit."""

    def __init__(self) -> None:
        self._notifier = SystemdNotifier()

    def ready(self) -> None:
        """The daemon serves."""
        self._notifier.notify("READY=1\nSTATUS=serving")

    def status(self, text: str) -> None:
        """Show one line in `systemctl status`."""
        # One line only: behind a line break a text could say READY=1.
        self._notifier.notify(f"STATUS={' '.join(text.split())}")

    def stopping(self) -> None:
        """The daemon drains and ends."""
        self._notifier.notify("STOPPING=1\nSTATUS=draining")

"""What systemd runs behind the daemon's end (ExecStopPost): a service that was stopped leaves no worker behind.

After a crash the workers stay: systemd starts the daemon again, and that one adopts them. The daemon's ordinary stop
has ended them already; they are left where it had to be killed because it took too long.
"""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.launch.homes import kill, kill_all, read_guard

_STOPPED = ("success", "timeout")


def main() -> None:
    """End the workers of every daemon in systemd's STATE_DIRECTORY, unless the service crashed."""
    directory = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if directory and os.environ.get("SERVICE_RESULT") in _STOPPED:
        for workers in Path(directory).glob("daemon-*/workers"):
            kill_all(workers)
            if (guard := read_guard(workers)) is not None:
                kill(*guard)


if __name__ == "__main__":
    main()

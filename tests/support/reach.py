"""A daemon that says which of our modules ran: `python -m tests.support.reach DESCRIPTOR serve ...`.

The descriptor is that of a socket. For each line that comes, a line goes back with the modules of which a function ran
since the line before.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from orchestrator.cli.main import main
from tests.support.daemon import Daemon, following

PACKAGES = ("adapters.", "device_profiles.", "orchestrator.", "policies.")


class ModuleLog:
    """The modules of which a function has run, in any thread that was started since this was."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def start(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def take(self) -> list[str]:
        """Return their names, and begin anew."""
        names, self._names = self._names, set()
        return sorted(names)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            name = frame.f_globals.get("__name__") or ""
            if name.startswith(PACKAGES):
                self._names.add(name)


@contextmanager
def watching(config: Path) -> Iterator[tuple[Daemon, Callable[[], set[str]]]]:
    """Start a daemon, and give it with what returns the modules that ran since it was called last."""
    ours, theirs = socket.socketpair()
    with ours, theirs, config.with_suffix(".log").open("wb") as output:
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=[theirs.fileno()])
        with following(process, config) as daemon, ours.makefile("rw") as lines:
            daemon.wait_ready()

            def take() -> set[str]:
                print(file=lines, flush=True)
                return set(lines.readline().split())

            yield daemon, take


def _answer(link: socket.socket, log: ModuleLog) -> None:
    with link.makefile("rw") as lines:
        for _ in lines:
            print(*log.take(), file=lines, flush=True)


if __name__ == "__main__":
    link, log = socket.socket(fileno=int(sys.argv.pop(1))), ModuleLog()
    threading.Thread(target=_answer, args=(link, log), daemon=True).start()
    log.start()
    main()

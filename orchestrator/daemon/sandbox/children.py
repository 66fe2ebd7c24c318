"""A child of the sandbox as its daemon sees it: how it is asked, how it is ended, and whose doing its end was."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from adapters.framing import ProtocolError
from orchestrator.daemon.sandbox.jobs import NEVER_BEGAN, Job, Status, receive_result, send_job

_END_S: Final = 1.0  # until the nursery says how a child ended
_LEAST_CORE: Final = 0.1
"""A job that had less of a core than this, while it ran, was kept from it by the machine."""
_FOREIGN: Final = {NEVER_BEGAN, *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))}
"""Ends that are no doing of the job: what is out of memory or stack ends by itself, or by SIGSEGV or SIGABRT."""
_PIECE_S: Final = 5.0  # from one piece of a result to the next
_MOST_RESULT_BYTES: Final = 64 * 1024 * 1024


class JobEnded(Exception):
    """The job did not come to its end, by its own doing. `too_slow`: for want of time; else of memory or stack. `ends`:
    in so many children, one after the other."""

    def __init__(self, *, too_slow: bool, ends: int = 1) -> None:
        super().__init__()
        self.too_slow = too_slow
        self.ends = ends


class Killed(Exception):
    """Something else ended the child, or kept it from working."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that waits for a job. `held`: a descriptor of it. `end`: one where its end is told."""

    link: socket.socket
    held: int
    end: int
    pid: int

    def kill(self) -> None:
        """End it, whatever it does."""
        self._stop()
        self.release()

    def _stop(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.held, signal.SIGKILL)

    def _read_core_s(self) -> float:
        """Return the seconds of a core that it has taken so far."""
        with suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid makes them
        return 0.0

    def _find_end(self, error: Exception, timeout_s: float, began_core_s: float) -> JobEnded | Killed:
        """Return what an error of `_do` says of the job: that it ended the child, or that something else did."""
        if isinstance(error, ProtocolError):
            return JobEnded(too_slow=False)
        too_slow = isinstance(error, TimeoutError)
        if too_slow:
            self._stop()
        words = os.read(self.end, 64).split() if _is_readable(self.end, _END_S) else []
        if not words:  # the nursery has ended too, or cannot say
            return Killed()
        status, core_s = int(words[0]), float(words[1]) - began_core_s
        too_slow = too_slow or status == -signal.SIGALRM
        if too_slow:
            return JobEnded(too_slow=True) if core_s >= _LEAST_CORE * timeout_s else Killed()
        return Killed() if status in _FOREIGN else JobEnded(too_slow=False)

    def release(self) -> None:
        """Let it end by itself."""
        self.link.close()
        os.close(self.held)
        os.close(self.end)

    def has_ended(self) -> bool:
        """Whether it cannot take a job any more."""
        return _is_readable(self.link, 0.0)

    def ask(self, job: Job) -> tuple[Status, str, bool]:
        """Return how a job ended, what it says, and whether the child does no other. Raises JobEnded and Killed; the
        child is of no use then, nor behind any other error."""
        began_core_s = self._read_core_s()
        try:
            return self._do(job)
        except (ProtocolError, OSError) as error:
            raise self._find_end(error, job[-1], began_core_s) from None

    def _do(self, job: Job) -> tuple[Status, str, bool]:
        """Raises ProtocolError and OSError; TimeoutError where it takes longer than it may."""
        deadline_s = time.monotonic() + job[-1]
        self.link.settimeout(job[-1])
        send_job(self.link, job)
        if not _is_readable(self.link, max(0.0, deadline_s - time.monotonic())):
            raise TimeoutError
        self.link.settimeout(_PIECE_S)
        return receive_result(self.link, _MOST_RESULT_BYTES)


def _is_readable(link: socket.socket | int, timeout_s: float) -> bool:
    """Wait until there is something to read, or the other end has closed; False where that did not happen in time."""
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(link, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))

"""The daemon's side of the sandbox: what is compiled or run there, how long it may take, and what it came to."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from orchestrator.errors import RequestError
from orchestrator.own_packages import with_our_packages
from orchestrator.sandbox.jobs import ChildGone, Job, Status, receive_result, send_job

_START_S: Final = 60.0  # until the nursery has loaded; on a machine with much to do
_FORK_S: Final = 10.0
_PIECE_S: Final = 5.0  # from one piece of a result to the next
_MOST_IDLE: Final = 2
_MOST_RESULT_BYTES: Final = 64 * 1024 * 1024
_INHERITED: Final = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process that forks is to have no other threads."""

_log = logging.getLogger(__name__)


class JobRefused(Exception):
    """The job's own words on why it cannot be done."""


class JobEnded(Exception):
    """The job did not come to its end. `too_slow`: for want of time; else of memory or stack."""

    def __init__(self, *, too_slow: bool) -> None:
        super().__init__()
        self.too_slow = too_slow


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that waits for a job. `held`: a descriptor of it."""

    link: socket.socket
    held: int

    def kill(self) -> None:
        """End it, whatever it does."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.held, signal.SIGKILL)
        self.release()

    def release(self) -> None:
        """Let it end by itself."""
        self.link.close()
        os.close(self.held)

    def has_ended(self) -> bool:
        """Whether it cannot take a job any more."""
        return _is_readable(self.link, 0.0)

    def do(self, job: Job) -> tuple[Status, str, bool]:
        """Return how a job ended, what it says, and whether the child does no other. Raises ChildGone and OSError;
        TimeoutError where it takes longer than it may."""
        deadline_s = time.monotonic() + job[-1]
        self.link.settimeout(job[-1])
        send_job(self.link, job)
        if not _is_readable(self.link, max(0.0, deadline_s - time.monotonic())):
            raise TimeoutError
        self.link.settimeout(_PIECE_S)
        return receive_result(self.link, _MOST_RESULT_BYTES)


class Sandbox:
    """Does jobs in child processes, from any thread. A child does one job at a time and is used again. One that died,
    or was ended, is replaced at once. `template_timeout_s` bounds templates, and callers bound the rest."""

    def __init__(self, template_timeout_s: float = 5.0) -> None:
        self.template_timeout_s = template_timeout_s
        self._idle: list[_Child] = []
        self._nursery: _Nursery | None = None
        self._asking = threading.Lock()  # of the nursery: one child after the other
        self._closed = False

    def start(self) -> None:
        """Load what jobs need, ahead of the first one; returns at once."""
        threading.Thread(target=self._restock, name="start the sandbox", daemon=True).start()

    def do(self, work: str, arguments: tuple[Any, ...], timeout_s: float) -> str:
        """Return what a job says. Blocks. Raises JobRefused, JobEnded, and RequestError 503 where no process can be
        started."""
        job = (work, arguments, timeout_s)
        waiting = self._take_idle()
        try:
            return self._run(job, waiting or self._fork())
        except JobEnded as end:
            if waiting is None or end.too_slow:
                raise
        return self._run(job, self._fork())  # what waited may have been ended for what others do to the machine

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._closed = True
        while (child := self._take_idle()) is not None:
            child.release()
        if self._nursery is not None:
            self._nursery.end()

    def _run(self, job: Job, child: _Child) -> str:
        try:
            status, text, last = child.do(job)
        except (ChildGone, OSError) as error:
            child.kill()
            self._restock()
            raise _end(job, too_slow=isinstance(error, TimeoutError)) from None
        self._put_back(child, last=last)
        if status is Status.MEMORY:
            raise _end(job, too_slow=False)
        if status is Status.REFUSED:
            raise JobRefused(text)
        if status is Status.FAILED:
            raise RuntimeError(f"the sandbox failed: {text}")
        return text

    def _take_idle(self) -> _Child | None:
        with suppress(IndexError):
            while True:
                child = self._idle.pop()
                if not child.has_ended():
                    return child
                child.kill()
        return None

    def _put_back(self, child: _Child, *, last: bool) -> None:
        if last:
            child.release()
            self._restock()
        elif self._closed or len(self._idle) >= _MOST_IDLE:
            child.release()
        else:
            self._idle.append(child)

    def _restock(self) -> None:
        """Have a child that waits, where that is possible."""
        if not self._idle and not self._closed:
            with suppress(RequestError):
                self._idle.append(self._fork())

    def _fork(self) -> _Child:
        """Return a new child. Raises RequestError 503."""
        with self._asking:
            for _ in range(2):  # a nursery that has died is replaced
                try:
                    if self._closed:
                        break
                    self._nursery = self._nursery or _Nursery()
                    return self._nursery.fork()
                except (OSError, ValueError) as error:
                    _log.warning("the process that checks grammars and templates is started again: %s", error)
                    if self._nursery is not None:
                        self._nursery.end()
                    self._nursery = None
        raise RequestError(
            "the process that checks grammars and templates cannot be started; the log says why",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            kind="server_error",
            code="sandbox_away",
            retry_after_s=1,
        )


class _Nursery:
    """The process of orchestrator.sandbox.nursery. Raises OSError where it cannot be started."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _popen(theirs.fileno(), _list_environment())
        self._ready = False

    def fork(self) -> _Child:
        """Return a child that waits for a job. Raises OSError and ValueError."""
        if not self._ready:
            self._link.settimeout(_START_S)
            if not self._link.recv(64):
                raise ConnectionError("it ended while it started")
            self._ready = True
        self._link.settimeout(_FORK_S)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._link, [b"fork"], [theirs.fileno()])
            _, descriptors, _, _ = socket.recv_fds(self._link, 64, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise ConnectionError("it has ended")
        except OSError:
            ours.close()
            raise
        return _Child(ours, descriptors[0])

    def end(self) -> None:
        """End it, and its children with it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._link.close()  # last: a thread may wait for it


def _end(job: Job, *, too_slow: bool) -> JobEnded:
    why = f"it took longer than {job[-1]:g} s" if too_slow else "it needed more memory or stack than it may have"
    _log.warning("a %s was ended in the sandbox: %s", job[0], why)
    return JobEnded(too_slow=too_slow)


def _popen(descriptor: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "orchestrator.sandbox.nursery", str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def _is_readable(link: socket.socket, timeout_s: float) -> bool:
    """Wait until there is something to read, or the other end has closed; False where that did not happen in time."""
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(link, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def _list_environment() -> dict[str, str]:
    """Return what the process needs of the daemon's environment, which may have keys in it."""
    kept = {
        name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(("PYTHON", "LC_"))
    }
    return with_our_packages(kept | _ONE_THREAD)

"""The daemon's side of the sandbox: what is compiled or run there, how long it may take, and what it came to."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from orchestrator.daemon.sandbox.children import Child, JobEnded, Killed
from orchestrator.daemon.sandbox.jobs import Job, Status
from orchestrator.errors import RequestError
from orchestrator.own_packages import with_our_packages
from orchestrator.side_lane import SideLane

_START_S: Final = 60.0  # until the nursery has loaded; on a machine with much to do
_FORK_S: Final = 10.0
_MOST_IDLE: Final = 2
_INHERITED: Final = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process that forks is to have no other threads."""

_log = logging.getLogger(__name__)


class JobRefused(Exception):
    """The job's own words on why it cannot be done."""


class Sandbox:
    """Does jobs in child processes, from any thread. A child does one job at a time and is used again. One that died,
    or was ended, is replaced at once. `template_timeout_s` bounds templates, and callers bound the rest."""

    def __init__(self, template_timeout_s: float = 5.0) -> None:
        self.template_timeout_s = template_timeout_s
        self._idle: list[Child] = []
        self._nursery: _Nursery | None = None
        self._asking = threading.Lock()  # of the nursery: one child after the other
        self._forks = SideLane("new children of the sandbox", gives_way=False)
        self._closed = False

    def start(self) -> None:
        """Load what jobs need, ahead of the first one; returns at once."""
        self._forks.submit(self._restock)

    def do(self, work: str, arguments: tuple[Any, ...], timeout_s: float) -> str:
        """Return what a job says. Blocks for as long as a child may take to start, and then for `timeout_s`.

        Raises JobRefused and JobEnded, and RequestError 503 where no process can be started, or where something else
        ends them. A job that ended its child, or whose child was ended, is tried in a new one in the time that is left.
        """
        child = self._take_idle() or self._fork()
        deadline_s = time.monotonic() + timeout_s
        try:
            return self._run((work, arguments, timeout_s), child)
        except (JobEnded, Killed) as end:
            first = end
        if not isinstance(first, JobEnded) or not first.too_slow:
            with suppress(TimeoutError):
                return self._run_again(work, arguments, deadline_s, first)
        if isinstance(first, JobEnded):
            raise first
        raise _away("the process that checks grammars and templates was ended, or had no time to run: send it again")

    def _run_again(self, work: str, arguments: tuple[Any, ...], deadline_s: float, first: JobEnded | Killed) -> str:
        """Raises TimeoutError where nothing is found out in time, and as `do`."""
        child = self._fork_within(deadline_s - time.monotonic())
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            self._put_back(child, last=False)
            raise TimeoutError
        try:
            return self._run((work, arguments, left_s), child)
        except JobEnded as end:
            if end.too_slow:  # it had less than its time
                raise TimeoutError from None
            raise JobEnded(too_slow=False, ends=2 if isinstance(first, JobEnded) else 1) from None
        except Killed:
            raise TimeoutError from None

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._closed = True
        while (child := self._take_idle()) is not None:
            child.release()
        if self._nursery is not None:
            self._nursery.end()

    def _run(self, job: Job, child: Child) -> str:
        """Raises JobRefused, JobEnded and Killed."""
        try:
            status, text, last = child.ask(job)
        except BaseException as error:
            child.kill()  # nobody knows what it is at
            if isinstance(error, JobEnded | Killed):
                self.start()
                _log_end(job, error)
            raise
        self._put_back(child, last=last)
        if status is Status.MEMORY:
            end = JobEnded(too_slow=False)
            _log_end(job, end)
            raise end
        if status is Status.REFUSED:
            raise JobRefused(text)
        if status is Status.FAILED:
            raise RuntimeError(f"the sandbox failed: {text}")
        return text

    def _take_idle(self) -> Child | None:
        with suppress(IndexError):
            while True:
                child = self._idle.pop()
                if not child.has_ended():
                    return child
                child.kill()
        return None

    def _put_back(self, child: Child, *, last: bool) -> None:
        if last:
            child.release()
            self.start()
        elif self._closed or len(self._idle) >= _MOST_IDLE:
            child.release()
        else:
            self._idle.append(child)

    def _restock(self) -> None:
        """Have a child that waits, where that is possible."""
        if not self._idle and not self._closed:
            with suppress(RequestError):
                self._idle.append(self._fork())

    def _fork(self) -> Child:
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
        raise _away("the process that checks grammars and templates cannot be started; the log says why")

    def _fork_within(self, timeout_s: float) -> Child:
        """Return a new child. One that comes later waits for another job. Raises TimeoutError and RequestError 503."""
        task = self._forks.submit(self._fork)
        try:
            return task.result(max(0.0, timeout_s))
        except TimeoutError:
            if not task.cancel():
                task.add_done_callback(self._keep)
            raise

    def _keep(self, task: Future[Child]) -> None:
        if task.exception() is None:
            self._put_back(task.result(), last=False)


class _Nursery:
    """The process of orchestrator.daemon.sandbox.nursery. Raises OSError where it cannot be started."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _popen(theirs.fileno(), _list_environment())
        self._ready = False

    def fork(self) -> Child:
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
            pid, descriptors, _, _ = socket.recv_fds(self._link, 64, 2, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise ConnectionError("it has ended")
            held, end = descriptors
            return Child(ours, held, end, int(pid))
        except BaseException:
            ours.close()
            raise

    def end(self) -> None:
        """End it, and its children with it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._link.close()  # last: a thread may wait for it


def _log_end(job: Job, end: JobEnded | Killed) -> None:
    if isinstance(end, Killed):
        why = "something else ended its process, or left it no time"
    else:
        slow = f"it took longer than {job[-1]:.3g} s"
        why = slow if end.too_slow else "it needed more memory or stack than it may have"
    _log.warning("a %s was ended in the sandbox: %s", job[0], why)


def _away(message: str) -> RequestError:
    return RequestError(
        message,
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        kind="server_error",
        code="sandbox_away",
        retry_after_s=1,
    )


def _popen(descriptor: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "orchestrator.daemon.sandbox.nursery", str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def _list_environment() -> dict[str, str]:
    """Return what the process needs of the daemon's environment, which may have keys in it."""
    kept = {
        name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(("PYTHON", "LC_"))
    }
    return with_our_packages(kept | _ONE_THREAD)

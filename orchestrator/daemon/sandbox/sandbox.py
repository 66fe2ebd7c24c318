"""The daemon's side of the sandbox: its children, what is compiled or run there, how long it may take, and what it came
to. Chat templates are programs from outside: one that goes on for ever is ended.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from adapters.chat_template import ChatTemplate, TemplateEnded, TemplateError
from adapters.framing import ProtocolError
from orchestrator.daemon.sandbox.jobs import NEVER_BEGAN, Job, Status, receive_result, send_job
from orchestrator.errors import RequestError
from orchestrator.own_packages import with_our_packages
from orchestrator.side_lane import SideLane

_END_S: Final = 5.0  # until the nursery says how a child ended, which may have to wait for a core. Not tuned.
_LEAST_CORE: Final = 0.1
"""A job that had less of a core than this, while it ran, was kept from it by the machine."""
_FOREIGN: Final = {NEVER_BEGAN, *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))}
"""Ends that are no doing of the job: what is out of memory or stack ends by itself, or by SIGSEGV or SIGABRT."""
_PIECE_S: Final = 5.0  # from one piece of a result to the next
# ADR 0099: the daemon believes only text of bounded length.
_MOST_RESULT_BYTES: Final = 64 * 1024 * 1024
_START_S: Final = 60.0  # until the nursery has loaded; on a machine with much to do
# ADR 0099: a fork takes 2 to 5 ms; on a machine with much to do.
_FORK_S: Final = 10.0
# ADR 0099: a child costs 2 to 5 ms, and a kept one memory. Not tuned.
_MOST_IDLE: Final = 2
_INHERITED: Final = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process that forks is to have no other threads."""
_log = logging.getLogger(__name__)


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
            core_s = self._read_core_s() - began_core_s
            self._stop()
            if core_s >= _LEAST_CORE * timeout_s:  # known without the nursery, which may have no time to say it
                return JobEnded(too_slow=True)
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
        self._closed = threading.Event()

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
        self._closed.set()
        self._release_idle()
        if self._nursery is not None:
            self._nursery.end()

    def _release_idle(self) -> None:
        while (child := self._take_idle()) is not None:
            child.release()

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
        elif len(self._idle) >= _MOST_IDLE:
            child.release()
        else:
            self._idle.append(child)
        if self._closed.is_set():  # perhaps meanwhile, in another thread
            self._release_idle()

    def _restock(self) -> None:
        """Have a child that waits, where that is possible."""
        if not self._idle and not self._closed.is_set():
            with suppress(RequestError):
                self._put_back(self._fork(), last=False)

    def _fork(self) -> Child:
        """Return a new child. Raises RequestError 503."""
        with self._asking:
            for _ in range(2):  # a nursery that has died is replaced
                try:
                    if self._closed.is_set():
                        break
                    self._nursery = self._nursery or _Nursery()
                    if not self._closed.is_set():  # else `close` may have come too early to see it
                        return self._nursery.fork()
                    self._nursery.end()
                except (OSError, ValueError) as error:
                    if not self._closed.is_set():
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
    return RequestError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, code="sandbox_away", retry_after_s=1)


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


class SandboxedTemplate(ChatTemplate):
    """A chat template that is rendered elsewhere; all else of it is as before."""

    def __init__(self, template: ChatTemplate, sandbox: Sandbox) -> None:
        self.__dict__.update(template.__dict__)
        self._pickled = pickle.dumps(template)
        self._sandbox = sandbox

    def render(self, *arguments: Any, **named: Any) -> str:
        """See ChatTemplate. Raises TemplateEnded, and RequestError 503 as Sandbox.do does."""
        timeout_s = self._sandbox.template_timeout_s
        try:
            return self._sandbox.do("template", (self._pickled, arguments, named), timeout_s)
        except JobRefused as refusal:
            raise TemplateError(str(refusal)) from None
        except JobEnded as end:
            why = f"takes longer than {timeout_s:g} s" if end.too_slow else "takes more memory than it may have"
            raise TemplateEnded(f"the model's chat template {why}, and was ended") from None

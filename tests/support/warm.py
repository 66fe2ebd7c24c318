"""Commands without the second that their imports take: `python -m tests.support.warm` imports what `outrider serve`
does, once, and forks for each daemon or command that a test wants.

The fork runs the command line itself, with the environment, directory, cores and output that a new process would have
from the test. A daemon's local workers are forks of it, for the same reason, and so are those of tests/control. Tests
of the start start the program as people do: in test_life.py, test_stop.py, tests/systemd, and workers in tests/workers.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

from orchestrator.launch.local import _popen as _start_cold_worker

_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 16
_HIGH = 512  # above all descriptors that a worker inherits under their own numbers
_END_S = 5.0  # of the process that forks, once nobody asks it
_UNWRITTEN = 120  # what Python ends with where it cannot write the rest of its output
_ORPHANED_S = 0.001  # between two looks after a parent that is about to end
_SET_CHILD_SUBREAPER = 36  # of prctl
_LIMITS = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
_ROOT = Path(__file__).resolve().parents[2]


def _list_python_settings() -> dict[str, str]:
    """What Python reads where it starts, and a fork does not."""
    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}


_STARTED_WITH = _list_python_settings()
"""A test that changes them gets a process that starts."""


class WarmProcess:
    """What subprocess.Popen says of a process, of one that is another process' child. `told` ends with its code."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of a signal; None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("outrider serve", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self._told, 64))
            os.close(self._told)
        return self.returncode


class _Starter:
    """The process that forks. It ends with this one."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=_ROOT)
        atexit.register(self._end)

    def _end(self) -> None:
        self._link.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # a child of a test has the other end, too
            self._process.kill()

    @property
    def is_near(self) -> bool:
        """Whether its forks are in the network namespace of this thread."""
        return os.readlink(f"/proc/{self._process.pid}/ns/net") == os.readlink("/proc/thread-self/ns/net")

    def start(self, arguments: list[str], output: int, errors: int) -> WarmProcess:
        """Run `outrider` with these arguments; its outputs go to two file descriptors."""
        request = {"arguments": arguments, "environment": dict(os.environ), **_read_place()}
        told, telling = os.pipe()
        with self._asking:
            try:
                socket.send_fds(self._link, [json.dumps(request).encode()], [output, errors, telling])
            finally:
                os.close(telling)
            return WarmProcess(int(self._link.recv(64)), told)

    def start_worker(
        self, options: list[str], inherited: list[int], printing: int, environment: dict[str, str]
    ) -> _ForkedWorker:
        """Run the process of a worker, as a child of this process."""
        request = {"worker": options, "inherited": inherited, "environment": environment, **_read_place()}
        with self._asking:
            _take_orphans(True)
            try:
                socket.send_fds(self._link, [json.dumps(request).encode()], [printing, *inherited])
                pid = int(self._link.recv(64))
                while psutil.Process(pid).ppid() != os.getpid():
                    time.sleep(_ORPHANED_S)
            finally:
                _take_orphans(False)
        forked_workers.add(pid)
        return _ForkedWorker(pid)


forked_workers: set[int] = set()
"""Workers that `start_worker` started: their command line does not say what they are."""


def _read_place() -> dict[str, Any]:
    """Return what a new process has of this one, beside its environment."""
    return {
        "directory": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(one) for one in _LIMITS],
    }


def _take_orphans(take: bool) -> None:
    """Choose whether a process below this one gets this one as its parent when its own has ended."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(take), 0, 0, 0)


def start_worker(
    options: list[str], inherited: list[int], printing: int, environment: dict[str, str]
) -> _ForkedWorker | subprocess.Popen[bytes]:
    """Implements orchestrator.launch.local._popen, for tests that hold a cluster themselves."""
    if _list_python_settings() == _STARTED_WITH and _starter().is_near:
        return _starter().start_worker(options, inherited, printing, environment)
    return _start_cold_worker(options, inherited, printing, environment)


@functools.cache
def _starter() -> _Starter:
    return _Starter()


def start_outrider(arguments: list[str], output: int, errors: int) -> WarmProcess | subprocess.Popen[bytes]:
    """Start `outrider ARGUMENTS`; its outputs go to two file descriptors, which may be one."""
    if _list_python_settings() == _STARTED_WITH and _starter().is_near:
        return _starter().start(arguments, output, errors)
    command = [sys.executable, "-m", "orchestrator.cli.main", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=errors)


def _import_all() -> ModuleType:
    """Import what a daemon and its workers import by themselves, some of it late, and make what each of them makes but
    once; return the command line.

    A daemon's threads look for NVIDIA devices while it forks its first worker. A fork never gets past the lock of a
    module that another thread imports, so that is imported before.
    """
    import httpcore  # noqa: F401
    import pydantic.v1  # noqa: F401 -- FastAPI asks whether a model is of this kind
    import pynvml  # noqa: F401
    from fastapi import FastAPI  # noqa: F401

    from adapters.simulated import adapter  # noqa: F401
    from orchestrator.cli import main, serve  # noqa: F401
    from orchestrator.config.model import ClusterConfig
    from orchestrator.daemon import run as daemon  # noqa: F401
    from orchestrator.daemon.sandbox.jobs import prepare
    from orchestrator.launch.local import digest_code
    from orchestrator.worker import local_host  # noqa: F401
    from orchestrator.worker.engine import worker_engine  # noqa: F401
    from orchestrator.worker.loading import draft_worker, engine  # noqa: F401

    prepare()
    ClusterConfig.model_rebuild()
    digest_code()
    with contextlib.suppress(ImportError):  # a daemon that plans looks at the devices of each runtime
        import torch  # noqa: F401 -- not transformers, with which the hub's library would read its environment too early
    return main


class _ForkedWorker:
    """What ProcessHandle asks of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


def _fork_worker(options: list[str], inherited: list[int], printing: int, environment: dict[str, str]) -> _ForkedWorker:
    """Implements orchestrator.launch.local._popen: the process of a worker, which has all imports behind it."""
    return _ForkedWorker(_fork_into(functools.partial(_run_worker, options), inherited, printing, environment))


def _run_worker(options: list[str]) -> int:
    sys.argv = ["orchestrator.worker.local_host", *options]
    from orchestrator.worker.local_host import main

    return main()


class _ForkedNursery(_ForkedWorker):
    """What the sandbox asks of subprocess.Popen."""

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Do nothing: it is no child of the daemon's."""


class _NurseryForks:
    """A process that forks nurseries for a daemon. It has one thread: a fork of the daemon could find a lock held by a
    thread that it has not, and every child of such a nursery would wait for it for ever."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._link.close()
            os.setsid()  # what the daemon's group is sent is not for this process
            self._fork_for(theirs)
        theirs.close()

    def start(self, descriptor: int, environment: dict[str, str]) -> _ForkedNursery:
        """Implements orchestrator.daemon.sandbox.sandbox._popen."""
        socket.send_fds(self._link, [json.dumps(environment).encode()], [descriptor])
        return _ForkedNursery(int(self._link.recv(64)))

    @staticmethod
    def _fork_for(link: socket.socket) -> NoReturn:
        """Fork until the daemon has gone."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits
        while True:
            request, descriptors, _, _ = socket.recv_fds(link, _MOST_BYTES, 1)
            if not request:
                os._exit(0)
            (descriptor,) = descriptors
            pid = _fork_into(functools.partial(_run_nursery, descriptor), [descriptor], 2, json.loads(request))
            os.close(descriptor)
            link.send(str(pid).encode())


def _run_nursery(descriptor: int) -> int:
    sys.argv = ["orchestrator.daemon.sandbox.nursery", str(descriptor)]
    from orchestrator.daemon.sandbox.nursery import main

    main()
    return 0


def _fork_into(run: Callable[[], int], inherited: list[int], printing: int, environment: dict[str, str]) -> int:
    """Return the number of a new process that ends with the code that `run` returns."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:

        def run_as_worker() -> int:
            _become_worker(inherited, printing, environment)
            return run()

        _run_to_end(run_as_worker)
    return pid


def _run_to_end(run: Callable[[], int | None]) -> NoReturn:
    """Run, and end this process with the code that comes of it, as the interpreter would. All that was imported is left
    to the kernel: to take it down takes a quarter of a second of a core, most of what a short command needs."""
    code = 1
    try:
        code = run() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201  # as Python does
    except BaseException:
        traceback.print_exc()
    try:
        atexit._run_exitfuncs()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = _UNWRITTEN
        os._exit(code)


def _become_worker(inherited: list[int], printing: int, environment: dict[str, str]) -> None:
    """Be what a new process would be, and forget the daemon: its signals, its descriptors, its loop, its log."""
    gc.freeze()
    atexit._clear()
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    asyncio._set_running_loop(None)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(printing, 1)
    os.dup2(printing, 2)
    begin = 3
    for descriptor in (*sorted(inherited), 1 << 16):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.environ.clear()
    os.environ.update(environment)
    logging.root.handlers.clear()
    for one in (logging.root, *(each for each in logging.root.manager.loggerDict.values())):
        if isinstance(one, logging.Logger):
            one.handlers.clear()
            one.setLevel(logging.WARNING if one is logging.root else logging.NOTSET)
            one.propagate = True


def main() -> None:
    """Fork for whoever is at the other end, until that has gone."""
    link = socket.socket(fileno=int(sys.argv[1]))
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()
    command_line = _import_all()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for daemons
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not message:
            return
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(message)
    if "worker" in request:
        _serve_worker(request, descriptors, link)
    output, errors, telling = descriptors
    pid = os.fork()
    if pid:
        link.send(str(pid).encode())
        _tell_end(pid, telling, (link.detach(), output, errors))
    link.detach()  # closed with all others
    _become(request, output, errors)
    from orchestrator.daemon.sandbox import sandbox
    from orchestrator.launch import local

    local._popen = _fork_worker  # type: ignore[assignment]
    sandbox._popen = _NurseryForks().start  # type: ignore[assignment]

    def run_command() -> None:
        try:
            command_line.main()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]

    _run_to_end(run_command)


def _serve_worker(request: dict[str, Any], descriptors: list[int], link: socket.socket) -> NoReturn:
    """Fork the process of a worker, and end: whoever wanted it is its parent then."""
    forking = os.getpid()
    pid = os.fork()
    if pid:
        link.send(str(pid).encode())
        os._exit(0)
    while os.getppid() == forking:  # or the kernel would end it with that one
        time.sleep(_ORPHANED_S)
    link.detach()
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, _HIGH) for one in descriptors]
    for one, wanted in zip(high[1:], request["inherited"], strict=True):
        os.dup2(one, wanted)

    def run() -> int:
        _take_place(request)
        _become_worker(request["inherited"], high[0], request["environment"])
        return _run_worker(request["worker"])

    _run_to_end(run)


def _tell_end(pid: int, telling: int, unused: Sequence[int]) -> NoReturn:
    """Wait for a daemon's end, and say how it ended."""
    for descriptor in unused:
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(telling, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: dict[str, Any], output: int, errors: int) -> None:
    """Be what a new process would be."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(request["environment"])
    _take_place(request)
    time.tzset()
    sys.argv = ["outrider", *request["arguments"]]


def _take_place(request: dict[str, Any]) -> None:
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["cores"])
    for limit, values in zip(_LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, tuple(values))


if __name__ == "__main__":
    main()

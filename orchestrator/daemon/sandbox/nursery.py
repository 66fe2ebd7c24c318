"""The process that makes the children of the sandbox: `python -m orchestrator.daemon.sandbox.nursery FD`.

It has loaded what they need and never touches a text from outside, so a new child is there in milliseconds. It ends
with its daemon, whose end of the socket then closes, and its children end with it. Nothing in here knows the daemon: it
has no descriptor, no key and no memory of it.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from adapters.parent_process import end_with_parent
from orchestrator.daemon.sandbox.jobs import MEMORY_BYTES, NEVER_BEGAN, do, prepare, receive_job, send_result

STACK_BYTES: Final = 2 * 1024 * 1024
"""Of a child. A worker's threads have four times as much, so what a child compiles, a worker does. ADR 0099."""
_MOST_MEMORY_BYTES: Final = max(MEMORY_BYTES.values())
_KEPT_BYTES: Final = 24 * 1024 * 1024
"""A child that took more is not used again: it would keep that. ADR 0099: 24 MiB."""
# ADR 0099: a child has no file but its socket; the rest is Python's own.
_DESCRIPTORS: Final = 16
_MOST_DESCRIPTORS: Final = 1024  # that the nursery could have
# ADR 0099: a timer of its own ends a child where the daemon stands still. Not tuned.
_GRACE_S: Final = 1.0
_PAGE_BYTES: Final = resource.getpagesize()
_MOST_OOM_SCORE: Final = "1000"


def main() -> None:
    """Fork whenever the daemon sends the child's end of a socket pair, until it has gone. It gets a descriptor of the
    child's process, and one that tells how this ended."""
    link = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the daemon is asked to end, and says so when it has
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prepare()
    gc.freeze()
    with suppress(ConnectionError):  # the daemon has gone, perhaps before this was ready
        _serve(link)


def _serve(link: socket.socket) -> None:
    link.send(b"ready")
    poll, children = select.poll(), dict[int, tuple[int, int]]()
    poll.register(link, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                _tell_end(ready, *children.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(link, 64, 1)
            if not message:
                return
            held, child = _fork(link, descriptors[0])
            children[held] = child
            poll.register(held, select.POLLIN)


def _fork(link: socket.socket, descriptor: int) -> tuple[int, tuple[int, int]]:
    """Return a descriptor of a new child, its number, and where its end is to be told."""
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_child(descriptor, nursery)
    os.close(descriptor)
    held = os.pidfd_open(pid)
    read, write = os.pipe()
    socket.send_fds(link, [str(pid).encode()], [held, read])
    os.close(read)
    return held, (pid, write)


def _tell_end(held: int, pid: int, write: int) -> None:
    """Say how a child ended: its status, or its signal below zero, and the seconds of a core that it took."""
    _, status, usage = os.wait4(pid, 0)
    os.close(held)
    with suppress(OSError):  # nobody asks
        os.write(write, f"{os.waitstatus_to_exitcode(status)} {usage.ru_utime + usage.ru_stime}".encode())
    os.close(write)


def _run_child(descriptor: int, nursery: int) -> NoReturn:
    """Do jobs in a thread, as the stack of a thread has the same size wherever it is."""
    try:
        link = _confine(descriptor, nursery)
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_do_jobs, args=(link,))
        thread.start()
        thread.join()
        os._exit(0)
    finally:
        os._exit(NEVER_BEGAN)


def _do_jobs(link: socket.socket) -> None:
    """Do one job after the other until the daemon closes, or this process has grown."""
    began, last = _peak_bytes(), False
    most_data, began_data = resource.getrlimit(resource.RLIMIT_DATA)[1], _measure_bytes()[1]
    with suppress(OSError, MemoryError):
        while not last:
            job = receive_job(link)
            resource.setrlimit(resource.RLIMIT_DATA, (min(most_data, began_data + MEMORY_BYTES[job[0]]), most_data))
            # A last resort, for a daemon that stands still: the signal's own effect is the end of the process.
            signal.setitimer(signal.ITIMER_REAL, job[-1] + _GRACE_S)
            status, text = do(job)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            last = _peak_bytes() - began > _KEPT_BYTES
            send_result(link, status, text, last=last)


def _confine(descriptor: int, nursery: int) -> socket.socket:
    """Let go of all but the link, and bound this process for good."""
    end_with_parent()
    if os.getppid() != nursery:
        os._exit(NEVER_BEGAN)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.dup2(descriptor, 3)
    os.closerange(4, _MOST_DESCRIPTORS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_MOST_OOM_SCORE, encoding="ascii")
    mapped, data = _measure_bytes()
    _limit(resource.RLIMIT_DATA, data + 2 * STACK_BYTES + _MOST_MEMORY_BYTES)
    _limit(resource.RLIMIT_AS, mapped + 2 * _MOST_MEMORY_BYTES)  # allocators reserve more than they use
    _limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    _limit(resource.RLIMIT_FSIZE, 0)
    return socket.socket(fileno=3)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _measure_bytes() -> tuple[int, int]:
    """Return what this process has mapped, and what of that is data."""
    mapped, *_, data, _ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(mapped) * _PAGE_BYTES, int(data) * _PAGE_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

"""A lane for work beside an event loop or a decode loop: one thread, one piece of work after the other.

A process does not wait for it at its end, and work that hangs in native code does not hold what waits behind it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

MOST_LEFT = 4
"""Threads that may be left behind at a time; then what waits has to wait. ADR 0047: each holds a core for as long as
its work takes."""
LARGE_GRAMMAR_BYTES = 8 * 1024
"""A longer grammar takes the lane of large ones, in daemon and worker (ADR 0047): no smaller one took over 0.13 s, one
of 514 KiB took 46 s."""
LOWEST_PRIORITY = 19  # Linux's
_STARTING = threading.Lock()
"""A thread's stack is set for all that start now."""
_T = TypeVar("_T")

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


@dataclass(slots=True)
class _Turn:
    """The thread that takes the next piece of work; one with another number was left behind."""

    number: int = 0
    left: int = 0


class SideLane:
    """`gives_way`: its thread has the lowest priority, so that decoding on the same cores goes first. `stack_bytes`: of
    its thread; 0: as the system has it."""

    def __init__(self, name: str, *, gives_way: bool, stack_bytes: int = 0) -> None:
        self._name = name
        self._gives_way = gives_way
        self._stack_bytes = stack_bytes
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._turn = _Turn()
        self._changing = threading.Lock()
        self._started = False
        weakref.finalize(self, self._works.put, None)

    def submit(self, work: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Queue a piece of work. Cancelled before its turn, it is never done."""
        task: Future[_T] = Future()
        with self._changing:
            if not self._started:
                self._started = True
                self._start()
        self._works.put((task, work, arguments))
        return task

    def leave_behind(self, task: Future[Any]) -> None:
        """Let another thread do what waits; the one that is at this task ends with it. Does nothing where too many have
        been left behind, or where the task has ended."""
        with self._changing:
            if task.done() or self._turn.left >= MOST_LEFT:
                return
            self._turn.number += 1
            self._turn.left += 1
            self._start()

    @contextmanager
    def going_on(self, task: Future[Any], patience_s: float) -> Iterator[None]:
        """Leave a task behind that takes longer than about so long, while this thread's event loop waits for it."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            if task.running():
                self.leave_behind(task)
            else:
                timers[:] = [loop.call_later(patience_s, look)]

        timers.append(loop.call_later(patience_s, look))
        try:
            yield
        finally:
            timers[0].cancel()

    def _start(self) -> None:
        arguments = (self._works, self._turn, self._turn.number, self._changing, self._gives_way)
        thread = threading.Thread(target=_work_off, args=arguments, name=self._name, daemon=True)
        with _STARTING:
            before = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(before)


def _work_off(
    works: queue.SimpleQueue[_Work | None], turn: _Turn, number: int, changing: threading.Lock, gives_way: bool
) -> None:
    if gives_way:
        with suppress(OSError, AttributeError):  # Linux gives each thread a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    while (found := works.get()) is not None:
        task, work, arguments = found
        if task.set_running_or_notify_cancel():
            try:
                result = work(*arguments)
            except BaseException as error:
                task.set_exception(error)
            else:
                task.set_result(result)
                del result
        del found, task, work, arguments
        with changing:
            if turn.number != number:
                turn.left -= 1
                return

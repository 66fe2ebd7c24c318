"""Work of a load in a process of its own: waited for as long as it does something, and not for ever."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import IO, Final

from adapters.hardware import count_logical_cores
from orchestrator.machine.work_meter import LOOK_S, WorkMeter

_LONGEST_S: Final = 900.0
"""Of processor time, on each core: compilers of some devices take minutes, none takes so long. ADR 0107."""
_LONGEST_IDLE_S: Final = 100.0
"""Before the worker itself counts as hanging. ADR 0107: LOAD_IDLE_S is 120 s."""

ANSWER: Final = b"\x1e"
"""In front of JSON on a line, as in RFC 7464."""

OnLook = Callable[[float], None]
"""Called every second with the processor time that a process has had, in s."""


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """What a process printed, and why there is nothing of use in it; "" where it ended well. `status`: its exit status,
    a signal below zero, and 0 where it was given up."""

    output: bytes
    failure: str
    status: int


def run_child(command: Sequence[str], job: bytes, on_look: OnLook) -> ChildEnd:
    """Run a command with `job` as its input. It is given up where it computes for too long, or does nothing: a machine
    that is busy with something else makes it take longer, and is no reason."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            output, errors, given_up = _wait(child, job, on_look)
        finally:
            child.kill()
    if given_up:
        return ChildEnd(b"", given_up, 0)
    return ChildEnd(output, _describe_end(child.returncode, errors), child.returncode)


def _wait(child: subprocess.Popen[bytes], job: bytes, on_look: OnLook) -> tuple[bytes, bytes, str]:
    meter, unsent = WorkMeter(child.pid), job or None
    while True:
        try:
            return *child.communicate(unsent, timeout=LOOK_S), ""
        except subprocess.TimeoutExpired:
            unsent = None
        if excess := _look(meter, on_look):
            return b"", b"", excess


def _look(meter: WorkMeter, on_look: OnLook) -> str:
    """Return why a process is given up; "" where it is not."""
    meter.measure()
    on_look(meter.cpu_s)
    if meter.cpu_s > _LONGEST_S * count_logical_cores():
        return f"given up after {meter.cpu_s:.0f} s of processor time"
    return f"given up: it did nothing for {meter.idle_s:.0f} s" if meter.idle_s > _LONGEST_IDLE_S else ""


class AnsweringChild:
    """A process that answers each line of its input by a line that begins with ANSWER; other lines are of libraries.
    For an answer it is waited as for the end in `run_child`."""

    def __init__(self, command: Sequence[str], on_look: OnLook) -> None:
        self._on_look = on_look
        self._errors = TemporaryFile()  # noqa: SIM115 -- it is closed with the process
        self._child = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._child.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask_question(self, question: bytes) -> ChildEnd:
        """Return the answer; where there is none, why, and the process has ended."""
        assert self._child.stdin is not None  # noqa: S101 -- it has a pipe
        meter = WorkMeter(self._child.pid)
        with suppress(BrokenPipeError):  # it has ended, and says why
            self._child.stdin.write(question + b"\n")
        while True:
            try:
                line = self._lines.get(timeout=LOOK_S)
            except Empty:
                if excess := _look(meter, self._on_look):
                    self._child.kill()
                    return ChildEnd(b"", excess, 0)
                continue
            if line.startswith(ANSWER):
                return ChildEnd(line.removeprefix(ANSWER), "", 0)
            if not line:
                return self._describe_end()

    def _read(self, output: IO[bytes]) -> None:
        """Take its lines in, and an empty one at their end."""
        for line in iter(output.readline, b""):
            self._lines.put(line)
        self._lines.put(b"")

    def _describe_end(self) -> ChildEnd:
        status = self._child.wait()
        self._errors.seek(0)
        return ChildEnd(b"", _describe_end(status, self._errors.read()) or "it ended without an answer", status)

    def close(self) -> None:
        """End the process, whatever it does. Idempotent."""
        self._child.kill()
        self._reader.join()
        with self._child:
            self._errors.close()


def _describe_end(status: int, errors: bytes) -> str:
    if status < 0:
        return f"its process ended by {signal.Signals(-status).name}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return (lines[-1] if lines else "it failed") if status else ""

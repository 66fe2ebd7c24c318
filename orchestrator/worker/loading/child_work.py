"""Work of a load in a process of its own: waited for as long as it does something, and not for ever."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from adapters.hardware import count_logical_cores
from orchestrator.machine.work_meter import LOOK_S, WorkMeter

_LONGEST_S: Final = 900.0
"""Of processor time, on each core: compilers of some devices take minutes, none takes so long. ADR 0107."""
_LONGEST_IDLE_S: Final = 100.0
"""Before the worker itself counts as hanging. ADR 0107: LOAD_IDLE_S is 120 s."""

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
        meter.measure()
        on_look(meter.cpu_s)
        if meter.cpu_s > _LONGEST_S * count_logical_cores():
            return b"", b"", f"given up after {meter.cpu_s:.0f} s of processor time"
        if meter.idle_s > _LONGEST_IDLE_S:
            return b"", b"", f"given up: it did nothing for {meter.idle_s:.0f} s"


def _describe_end(status: int, errors: bytes) -> str:
    if status < 0:
        return f"its process ended by {signal.Signals(-status).name}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return (lines[-1] if lines else "it failed") if status else ""

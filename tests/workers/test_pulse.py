"""What a worker says of a load that waits: for a process that it started, for a disk, or for nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_COMPUTES = "while True: sum(range(1000))"
_COMPUTES_A_WHILE = "import time\nwhile time.process_time() < 5.0: sum(range(1000))"
_TRICKLES = """
import tempfile, time
with tempfile.TemporaryFile() as file:
    while True:
        file.write(b"x" * 4096), file.flush()
        time.sleep(0.5)
"""
_SLEEPS = "import time\nwhile True: time.sleep(60)"
_LOADS = """
import json, subprocess, sys, threading
from adapters.parent_process import end_with_parent
from orchestrator.protocol.contract import Step
from orchestrator.protocol.events import Progress
from orchestrator.worker.host import PulseEmitter

program, again, expected_ms = sys.argv[1:]

def emit(event):
    pulse = event.pulse
    print(json.dumps({"quiet_ms": pulse.quiet_ms, "idle_ms": pulse.idle_ms, "cpu_ms": pulse.cpu_ms}), flush=True)
    if again:
        emitter.observe_event(Progress("convert: 1 MiB of 2 MiB", 0.5))

emitter = PulseEmitter(emit, lambda: Step("step", float(expected_ms)))
emitter.start()
if program:
    subprocess.run([sys.executable, "-c", program], preexec_fn=end_with_parent)
threading.Event().wait()
"""
"""A load in a process of its own: threads of other tests are at work in this one."""


class Load:
    """A worker that loads, and what it says of that."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> dict[str, float]:
        """Wait for the next pulse."""
        assert self.process.stdout is not None
        told: dict[str, float] = json.loads(self.process.stdout.readline())
        return told


@contextmanager
def load(program: str = "", *, again: bool = False, expected_ms: float = -1.0) -> Iterator[Load]:
    """Have a worker that waits for this program, and says the same progress `again` and again where that is asked.
    `expected_ms`: of the round that it is at, where it is at one."""
    command = [sys.executable, "-c", _LOADS, program, "again" if again else "", str(expected_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Load(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("program", [_COMPUTES, _TRICKLES], ids=["computes", "moves bytes"])
def test_a_load_that_waits_for_a_process_that_works_is_not_idle(program: str) -> None:
    with load(program) as worker:
        while (pulse := worker.read())["quiet_ms"] <= 4000.0 or pulse["idle_ms"]:
            pass


def test_the_processor_time_of_a_process_counts_while_it_runs_and_when_it_has_ended() -> None:
    with load(_COMPUTES_A_WHILE) as worker:
        while (pulse := worker.read())["cpu_ms"] <= 200.0:
            pass
        while (later := worker.read())["idle_ms"] <= 0.0:
            pass
        assert later["cpu_ms"] >= pulse["cpu_ms"]


@pytest.mark.parametrize("again", [False, True], ids=["and is silent", "and says the same again"])
def test_a_load_whose_process_does_nothing_is_idle(again: bool) -> None:
    with load(_SLEEPS, again=again) as worker:
        while worker.read()["idle_ms"] <= 4000.0:
            pass


def test_a_time_in_which_the_worker_was_stopped_is_not_idle() -> None:
    with load() as worker:
        before = worker.read()
        os.kill(worker.process.pid, signal.SIGSTOP)
        time.sleep(6.0)
        os.kill(worker.process.pid, signal.SIGCONT)
        longest_ms = jump_ms = 0.0
        while longest_ms < 5000.0:
            after = worker.read()
            if after["quiet_ms"] - before["quiet_ms"] > longest_ms:
                longest_ms, jump_ms = after["quiet_ms"] - before["quiet_ms"], after["idle_ms"] - before["idle_ms"]
            before = after
        assert jump_ms <= 2000.0


def test_a_round_in_a_worker_that_was_stopped_for_a_while_has_not_taken_that_long() -> None:
    """The processor was somebody else's: the worker says so as soon as it runs again, and is not taken for hung."""
    with load(expected_ms=500.0) as worker:
        while worker.read()["quiet_ms"] <= 500.0:
            pass
        os.kill(worker.process.pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.kill(worker.process.pid, signal.SIGCONT)
        began_s, pulses = time.monotonic(), [worker.read() for _ in range(4)]
        reading_s = time.monotonic() - began_s
        assert pulses[-1]["quiet_ms"] < 4000.0 + 1000.0 * reading_s
        while worker.read()["quiet_ms"] <= 8000.0:
            pass  # and a round that does nothing is told of

"""What a worker says of a load that waits: for a process that it started, for a disk, or for nobody."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator.workers.contract import Step
from orchestrator.workers.messages import Event, Progress, StillWorking
from orchestrator.workers.pulse import PulseEmitter
from policies.serving.failover.watchdog import Pulse

_DEADLINE_S = 120.0
_COMPUTES = "print(flush=True)\nwhile True: sum(range(1000))"
_TRICKLES = """
import sys, tempfile, time
print(flush=True)
with tempfile.TemporaryFile() as file:
    while True:
        file.write(b"x" * 4096), file.flush()
        time.sleep(0.5)
"""
_SLEEPS = "import time\nprint(flush=True)\nwhile True: time.sleep(60)"
_LOADS = """
import json, threading
from orchestrator.workers.contract import Step
from orchestrator.workers.pulse import PulseEmitter

def emit(event):
    print(json.dumps([event.pulse.quiet_ms, event.pulse.idle_ms]), flush=True)

PulseEmitter(emit, lambda: Step("load", -1.0)).start()
threading.Event().wait()
"""


@contextmanager
def run_child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@contextmanager
def watch_load() -> Iterator[queue.SimpleQueue[Event]]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    emitter = PulseEmitter(events.put, lambda: Step("load", -1.0))
    emitter.start()
    try:
        yield events
    finally:
        emitter.stop()


def wait_for_pulse(events: queue.SimpleQueue[Event], holds: Callable[[Pulse], bool]) -> Pulse:
    until_s = time.monotonic() + _DEADLINE_S
    while time.monotonic() < until_s:
        event = events.get(timeout=_DEADLINE_S)
        assert isinstance(event, StillWorking)
        if holds(event.pulse):
            return event.pulse
    raise AssertionError("no such pulse came")


@pytest.mark.parametrize("program", [_COMPUTES, _TRICKLES], ids=["computes", "moves bytes"])
def test_a_load_that_waits_for_a_process_that_works_is_not_idle(program: str) -> None:
    with run_child(program), watch_load() as events:
        wait_for_pulse(events, lambda pulse: pulse.quiet_ms > 4000.0 and pulse.idle_ms == 0.0)


def test_the_processor_time_of_a_process_counts_while_it_runs_and_when_it_has_ended() -> None:
    with watch_load() as events:
        with run_child(_COMPUTES):
            spent = wait_for_pulse(events, lambda pulse: pulse.cpu_ms > 200.0).cpu_ms
        later = wait_for_pulse(events, lambda pulse: pulse.idle_ms > 0.0)
        assert later.cpu_ms >= spent


def test_a_load_whose_process_does_nothing_is_idle() -> None:
    with run_child(_SLEEPS), watch_load() as events:
        wait_for_pulse(events, lambda pulse: pulse.idle_ms > 4000.0)


def test_a_load_that_says_the_same_again_has_not_come_further() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    emitter = PulseEmitter(events.put, lambda: Step("load", -1.0))
    emitter.start()

    def say_the_same(pulse: Pulse) -> bool:
        emitter.observe(Progress("convert: 1 MiB of 2 MiB", 0.5))
        return pulse.idle_ms > 3000.0

    try:
        wait_for_pulse(events, say_the_same)
    finally:
        emitter.stop()


def test_a_time_in_which_the_worker_was_stopped_is_not_idle() -> None:
    worker = subprocess.Popen([sys.executable, "-c", _LOADS], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        quiet_ms, idle_ms = json.loads(worker.stdout.readline())
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(6.0)
        os.kill(worker.pid, signal.SIGCONT)
        longest_ms = jump_ms = 0.0
        while longest_ms < 5000.0:
            before_ms, (quiet_ms, idle_ms) = (quiet_ms, idle_ms), json.loads(worker.stdout.readline())
            if quiet_ms - before_ms[0] > longest_ms:
                longest_ms, jump_ms = quiet_ms - before_ms[0], idle_ms - before_ms[1]
        assert jump_ms <= 2000.0
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()

"""Runs inside a worker process and knows no Ray: hosts one engine, and its frames as every cluster carries them.

The process of the local runtime is `local_host`.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from adapters.hardware import count_logical_cores
from device_profiles.units import MS_PER_S
from orchestrator.errors import WorkerStartFailed
from orchestrator.machine.cores import pin_to_cores
from orchestrator.machine.work_meter import LOOK_S, WorkMeter
from orchestrator.protocol.commands import Command
from orchestrator.protocol.contract import Engine, Step
from orchestrator.protocol.events import Event, Failed, Progress, StillWorking
from orchestrator.protocol.frames import decode_commands, encode
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, Refused, RoundReport
from policies.serving.failover.watchdog import PULSE_S, Pulse

_FINISHED = (Progress, Ready, RoundReport, Gauges, Refused)
"""The events that say that the engine itself has come further; other threads of a worker have their own."""
STARTING = Step("start", -1.0)
THREAD_DIED = 3
"""The exit code of a worker one of whose threads died."""

# ADR 0049: far enough that the kernel takes a worker and not its daemon. 1000 is Linux's most.
_OOM_SCORE_ABOVE, _MOST_OOM_SCORE = 500, 1000


class PulseEmitter:
    """Says that a worker is still at a step, while it says nothing else. It watches one engine's thread from another,
    and control tells a hang from a long round by it. `describe_step` says what it is at (protocol.contract.Engine)."""

    def __init__(self, emit: Callable[[Event], None], describe_step: Callable[[], Step | None]) -> None:
        self._emit = emit
        self._describe_step = describe_step
        self._finished = 0
        self._progress: Progress | None = None
        self._ended = threading.Event()
        self._cores = count_logical_cores()

    def observe_event(self, event: Event) -> None:
        """The engine has said this. Who says the same again has not come further."""
        if isinstance(event, _FINISHED) and event != self._progress:
            self._finished += 1
            self._progress = event if isinstance(event, Progress) else None

    def start(self) -> None:
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        seen: tuple[int, bool] | None = None
        watched: _Round | _Load | None = None
        while not self._ended.wait(PULSE_S):
            step, finished = self._describe_step(), self._finished
            now = (finished, step is not None and step.expected_ms < 0.0)
            if step is None or watched is None or now != seen:
                seen, watched = now, _Load() if now[1] else _Round()
                continue
            self._emit(StillWorking(step.stage, watched.measure(step.expected_ms, self._cores)))


class _Round:
    """A step with a prediction, from now on. Time in which nobody let this thread run says nothing of the step."""

    def __init__(self) -> None:
        self._since_s, self._cpu_s = time.monotonic(), time.process_time()
        self._looked_s = self._since_s

    def measure(self, expected_ms: float, cores: int) -> Pulse:
        now_s = time.monotonic()
        late_s = now_s - self._looked_s - PULSE_S
        if late_s > PULSE_S:
            self._since_s += late_s
        self._looked_s = now_s
        quiet_ms = (now_s - self._since_s) * MS_PER_S
        return Pulse(expected_ms, quiet_ms, (time.process_time() - self._cpu_s) * MS_PER_S, cores)


class _Load:
    def __init__(self) -> None:
        self._since_s = self._looked_s = time.monotonic()
        self._meter: WorkMeter | None = None  # most steps are over before there is anything to look at

    def measure(self, expected_ms: float, cores: int) -> Pulse:
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            if self._meter is None:
                self._meter = WorkMeter()
            else:
                self._meter.measure()
        cpu_s, idle_s = (self._meter.cpu_s, self._meter.idle_s) if self._meter is not None else (0.0, 0.0)
        quiet_ms = (now_s - self._since_s) * MS_PER_S
        return Pulse(expected_ms, quiet_ms, cpu_s * MS_PER_S, cores, idle_s * MS_PER_S)


def load_engine(entry: str, options: dict[str, Any]) -> Engine:
    """Return what `entry` ("package.module:function") makes of the options.

    Raises WorkerStartFailed when there is no such function, and what the function itself raises.
    """
    module_name, colon, function_name = entry.partition(":")
    if not (module_name and colon and function_name):
        raise WorkerStartFailed(f"the worker's entry {entry!r} is not of the form package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise WorkerStartFailed(f"the worker cannot import {entry}: {error}; install outrider where it runs") from error
    return cast(Callable[[dict[str, Any]], Engine], function)(options)


class EventOutbox:
    """Events on their way out. `emit` never waits for the reader; the reader takes all there is as one frame.

    It needs no bound of its own: what may pile up is bounded by the `max_tokens` of the requests taken in.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def emit(self, event: Event) -> None:
        """Queue an event. Thread-safe."""
        self._events.put(event)

    def close(self) -> None:
        """Let `take` return [] once everything queued before has been taken."""
        self._events.put(None)

    def take(self) -> list[Event]:
        """Wait for an event and return it with all queued behind it; [] after `close`. One reader only."""
        event = self._events.get()
        taken: list[Event] = []
        while event is not None:
            taken.append(event)
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return taken
        if taken:
            self._events.put(None)  # the end is told by the next call, on its own
        return taken


class EngineHost:
    """One engine and its way in and out. `run` belongs to one thread, `deliver` and `frames` to one each. The process
    is pinned to `cores` before the engine's module is imported."""

    def __init__(self, entry: str, options: dict[str, Any], cores: Sequence[int] = ()) -> None:
        self._entry = entry
        self._options = options
        self._cores = cores
        self._engine: Engine | None = None
        self._loaded = threading.Event()
        self._outbox = EventOutbox()
        self._pulse = PulseEmitter(self._outbox.emit, self._describe_step)

    def run(self) -> int:
        """Load the engine and run it until it is stopped. Returns the exit code: 1 after an exception."""
        try:
            try:
                pin_to_cores(self._cores)
                self._pulse.start()
                self._engine = load_engine(self._entry, self._options)
            finally:
                self._loaded.set()
            self._engine.run(self._emit)
        except WorkerStartFailed as error:
            self._outbox.emit(Failed(str(error), restartable=False))
            return 1
        except Exception as error:
            traceback.print_exc()
            # An engine that cannot even be built is no better the second time; one that broke may be.
            self._outbox.emit(Failed(one_line(error), restartable=self._engine is not None))
            return 1
        finally:
            self._pulse.stop()
            self._outbox.close()
        return 0

    def _emit(self, event: Event) -> None:
        self._pulse.observe_event(event)
        self._outbox.emit(event)

    def _describe_step(self) -> Step | None:
        return self._engine.describe_step() if self._engine is not None else STARTING

    def deliver(self, frame: bytes) -> None:
        """Pass on a frame of commands, once the engine is there. Raises msgspec.DecodeError."""
        self.obey(decode_commands(frame))

    def obey(self, commands: Sequence[Command]) -> None:
        self._loaded.wait()
        if self._engine is not None:
            for command in commands:
                self._engine.submit(command)

    def frames(self) -> Iterator[bytes]:
        """Yield frames of events until the engine has ended. Blocks while there is none."""
        for events in self.batches():
            yield encode(events)

    def batches(self) -> Iterator[list[Event]]:
        """Yield events until the engine has ended: all there are at a time. Blocks while there is none."""
        while events := self._outbox.take():
            yield events


def one_line(error: BaseException) -> str:
    """Return an exception as "Type: first line of its message"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def die_before_the_daemon() -> None:
    """Let the kernel choose this process before the daemon, which it inherits its score from, when memory is out."""
    score = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):  # not on Linux, or not allowed: then as before
        score.write_text(str(min(_MOST_OOM_SCORE, int(score.read_text()) + _OOM_SCORE_ABOVE)), encoding="ascii")


def end_process_with_its_threads() -> None:
    """End this process, with a reason, when any of its threads ends by an exception: it would decode for nobody."""
    threading.excepthook = _end_process


def _end_process(failed: threading.ExceptHookArgs) -> None:
    error = failed.exc_value or failed.exc_type()
    traceback.print_exception(error)
    name = failed.thread.name if failed.thread is not None else "unknown"
    print(f"the thread {name} died, and the worker with it: {one_line(error)}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(THREAD_DIED)

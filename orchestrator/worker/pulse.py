"""Says that a worker is still at a step, while it says nothing else: what control tells a hang from a long round by."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from adapters.hardware import count_logical_cores
from device_profiles.units import MS_PER_S
from orchestrator.machine.work_meter import LOOK_S, WorkMeter
from orchestrator.protocol.contract import Step
from orchestrator.protocol.events import Event, Progress, StillWorking
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, Refused, RoundReport
from policies.serving.failover.watchdog import PULSE_S, Pulse

_FINISHED = (Progress, Ready, RoundReport, Gauges, Refused)
"""The events that say that the engine itself has come further; other threads of a worker have their own."""
STARTING = Step("start", -1.0)


class PulseEmitter:
    """Watches one engine's thread from another. `describe_step` says what it is at (protocol.contract.Engine)."""

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
    """A step of a load, from now on."""

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

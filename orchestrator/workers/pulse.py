"""Says that a worker is still at a step, while it says nothing else: what control tells a hang from a long round by."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from device_profiles.units import MS_PER_S
from orchestrator.workers.contract import Step
from orchestrator.workers.messages import Event, Gauges, Progress, Ready, Refused, RoundReport, StillWorking
from policies.serving.failover.watchdog import PULSE_S, Pulse

_FINISHED = (Progress, Ready, RoundReport, Gauges, Refused)
"""The events that say that the engine itself has come further; other threads of a worker have their own."""
STARTING = Step("start", -1.0)


class PulseEmitter:
    """Watches one engine's thread from another. `describe_step` says what it is at (workers.contract.Engine)."""

    def __init__(self, emit: Callable[[Event], None], describe_step: Callable[[], Step | None]) -> None:
        self._emit = emit
        self._describe_step = describe_step
        self._finished = 0
        self._ended = threading.Event()
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def observe(self, event: Event) -> None:
        """The engine has said this."""
        if isinstance(event, _FINISHED):
            self._finished += 1

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def stop(self) -> None:
        """The engine has ended."""
        self._ended.set()

    def _run(self) -> None:
        seen, since_s, cpu_s = -1, 0.0, 0.0
        while not self._ended.wait(PULSE_S):
            step, finished = self._describe_step(), self._finished
            if step is None or finished != seen:
                seen, since_s, cpu_s = finished, time.monotonic(), time.process_time()
                continue
            quiet_ms = (time.monotonic() - since_s) * MS_PER_S
            pulse = Pulse(step.expected_ms, quiet_ms, (time.process_time() - cpu_s) * MS_PER_S, self._cores)
            self._emit(StillWorking(step.stage, pulse))

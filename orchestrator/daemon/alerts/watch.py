"""The daemon's own watch: evaluates alerts, remembers which fire, and hands on what changed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.clock import Clock, SystemClock
from orchestrator.daemon.alerts.evaluator import ActiveAlert, Evaluator, Sample
from orchestrator.daemon.alerts.table import METRICS, Alert
from orchestrator.daemon.alerts.webhook import Notice, Webhook
from orchestrator.telemetry import LoopGuard, get_logger

_KEPT_ENDED = 20  # what a person reads. Not tuned.
_log = get_logger(__name__)

ReadSamples = Callable[[Iterable[str]], Iterable[tuple[str, dict[str, str], float]]]


@dataclass(frozen=True, slots=True)
class _Fired:
    alert: Alert
    labels: dict[str, str]
    value: float
    since_s: float


class AlertWatch:
    """`read` gives the samples of some metrics as they are now. Times are multiplied by `time_factor`. `every_s`:
    seconds between evaluations. `webhook` is told of alerts that fire or end."""

    def __init__(
        self,
        read: ReadSamples,
        *,
        time_factor: float = 1.0,
        every_s: float = 15.0,
        webhook: Webhook | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._read = read
        self._every_s = every_s
        self._webhook = webhook
        self._clock = clock or SystemClock()
        self._evaluator = Evaluator(time_factor)
        self._active: list[ActiveAlert] = []
        self._firing: dict[tuple[str, ...], _Fired] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=_KEPT_ENDED)
        self._evaluations = 0

    async def run(self) -> None:
        """Evaluate until cancelled."""
        sending = None if self._webhook is None else asyncio.create_task(self._webhook.run(), name="send alerts")
        try:
            guard = LoopGuard("the watch over alerts")
            while True:
                with guard.hold():
                    self.look()
                await asyncio.sleep(self._every_s)
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def look(self) -> None:
        """Evaluate once, and hand on what changed."""
        samples = [Sample(*sample) for sample in self._read(METRICS)]
        wall_s = self._clock.wall_s()
        self._active = self._evaluator.evaluate(self._clock.monotonic_s(), samples)
        self._evaluations += 1
        firing = {(active.alert.name, *active.labels.values()): active for active in self._active if active.firing}
        for key, active in firing.items():
            if key not in self._firing:
                fired = _Fired(active.alert, dict(active.labels), active.value, wall_s)
                self._firing[key] = fired
                _log.warning("alert", alert=active.alert.name, **self._tell_labels(fired), runbook=active.alert.runbook)
                self._send(fired, None)
        for key in [key for key in self._firing if key not in firing]:
            fired = self._firing.pop(key)
            self._ended.append({**self._describe(fired, fired.since_s), "state": "ended", "ended": _tell_wall(wall_s)})
            _log.info("alert ended", alert=fired.alert.name, **self._tell_labels(fired))
            self._send(fired, wall_s)

    def view(self) -> dict[str, Any]:
        """Return alerts that fire or wait for their time, and those that ended last, as plain data."""
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        active = [
            {
                **self._describe(active, wall_s - (now_s - active.since_s)),
                "state": "firing" if active.firing else "pending",
            }
            for active in self._active
        ]
        return {"evaluations": self._evaluations, "alerts": active, "ended": list(self._ended)}

    def _send(self, fired: _Fired, ended_s: float | None) -> None:
        if self._webhook is not None:
            labels = {"alertname": fired.alert.name, "severity": fired.alert.severity, **fired.labels}
            ended = None if ended_s is None else _tell_wall(ended_s)
            self._webhook.put(Notice(labels, fired.alert.annotate(), _tell_wall(fired.since_s), ended))

    @staticmethod
    def _tell_labels(fired: _Fired) -> dict[str, str]:
        return {f"of_{name}" if name in ("alert", "event") else name: value for name, value in fired.labels.items()}

    @staticmethod
    def _describe(active: ActiveAlert | _Fired, since_s: float) -> dict[str, Any]:
        alert = active.alert
        return {
            "alert": alert.name,
            "severity": alert.severity,
            "labels": dict(active.labels),
            "value": active.value if abs(active.value) != float("inf") else None,
            "since": _tell_wall(since_s),
            "meaning": alert.meaning,
            "not_meaning": alert.not_meaning,
            "look": alert.look,
            "remedy": alert.remedy,
            "runbook": alert.runbook,
        }


def _tell_wall(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

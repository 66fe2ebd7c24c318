"""Evaluates alerts over samples, as Prometheus does with the rules that are written of the same table."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.daemon.alerts.expressions import Absent, Condition, Labels, Ratio, Read
from orchestrator.daemon.alerts.table import ALERTS, METRICS, Alert

Key = tuple[str, ...]
_SLACK_S = 1e-6  # more than rounding makes of a time


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a series."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class ActiveAlert:
    """An alert whose conditions hold for these labels since `since_s`. `value`: the figure of its first condition;
    `firing`: they held for long enough."""

    alert: Alert
    labels: Mapping[str, str]
    value: float
    since_s: float
    firing: bool


@dataclass(slots=True)
class _Series:
    labels: Mapping[str, str]
    points: deque[tuple[float, float]] = field(default_factory=deque)

    def grow(self, since_s: float, over_s: float) -> float | None:
        """Return how much the counter grew a second; None where there are not two values."""
        points = [value for at_s, value in self.points if at_s >= since_s - _SLACK_S]
        if len(points) < 2:
            return None
        pairs = itertools.pairwise(points)
        return sum(after - before if after >= before else after for before, after in pairs) / over_s


class Evaluator:
    """Holds samples for as long as any alert looks back. Times are seconds of one clock; those of alerts are multiplied
    by `time_factor`."""

    def __init__(self, time_factor: float = 1.0, alerts: Sequence[Alert] = ALERTS) -> None:
        self._factor = time_factor
        self._alerts = alerts
        reads = [read for alert in alerts for condition in alert.conditions for read in condition.reads]
        self._keep_s = max(read.over_s for read in reads) * time_factor
        self._series: dict[str, dict[Key, _Series]] = {}
        self._since_s: dict[tuple[str, Key], float] = {}
        self._now_s = 0.0

    def evaluate(self, now_s: float, samples: Iterable[Sample]) -> list[ActiveAlert]:
        """Take the samples of this moment, and return the alerts whose conditions hold."""
        self._take(now_s, samples)
        active = [held for alert in self._alerts for held in self._check(alert)]
        self._since_s = {(held.alert.name, tuple(held.labels.values())): held.since_s for held in active}
        return active

    def _take(self, now_s: float, samples: Iterable[Sample]) -> None:
        self._now_s = now_s
        for sample in samples:
            if sample.name in METRICS and not math.isnan(sample.value):
                key = tuple(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                series = self._series.setdefault(sample.name, {}).setdefault(key, _Series(sample.labels))
                series.points.append((now_s, sample.value))
        for held in self._series.values():
            for key, series in list(held.items()):
                while series.points and series.points[0][0] < now_s - self._keep_s - _SLACK_S:
                    series.points.popleft()
                if not series.points:
                    del held[key]

    def _check(self, alert: Alert) -> Iterator[ActiveAlert]:
        figures: dict[Key, float] | None = None
        for condition in alert.conditions:
            held = self._hold(condition, alert.by)
            figures = held if figures is None else {key: value for key, value in figures.items() if key in held}
        for key, value in (figures or {}).items():
            since_s = self._since_s.get((alert.name, key), self._now_s)
            firing = self._now_s - since_s >= alert.for_s * self._factor - _SLACK_S
            yield ActiveAlert(alert, dict(zip(alert.by, key, strict=True)), value, since_s, firing)

    def _hold(self, condition: Condition | Absent, by: Labels) -> dict[Key, float]:
        if isinstance(condition, Absent):
            return {} if self._read(Read(condition.metric), ()) else {(): 1.0}
        bounds = None if condition.times is None else self._read(condition.times, by)
        held = {}
        for key, value in self._compute(condition.figure, by).items():
            if bounds is not None and key not in bounds:
                continue
            bound = condition.bound * (1.0 if bounds is None else bounds[key])
            if value > bound if condition.is_ == ">" else value < bound:
                held[key] = value
        return held

    def _compute(self, figure: Read | Ratio, by: Labels) -> dict[Key, float]:
        if isinstance(figure, Read):
            return self._read(figure, by)
        under = self._read(figure.under, by)
        return {key: _divide(over, under[key]) for key, over in self._read(figure.over, by).items() if key in under}

    def _read(self, read: Read, by: Labels) -> dict[Key, float]:
        over_s = read.over_s * self._factor
        groups: dict[Key, list[float]] = {}
        for series in self._series.get(read.metric, {}).values():
            if any(series.labels.get(name) != value for name, value in read.only):
                continue
            value: float | None
            if over_s:
                value = series.grow(self._now_s - over_s, over_s)
            else:
                at_s, last = series.points[-1]
                value = last if at_s >= self._now_s - _SLACK_S else None
            if value is not None:
                groups.setdefault(tuple(series.labels.get(name, "") for name in by), []).append(value)
        fold = max if read.fold == "max" else sum
        return {key: fold(values) for key, values in groups.items()}


def _divide(over: float, under: float) -> float:
    """Return the quotient as Prometheus has it."""
    if under:
        return over / under
    return math.copysign(math.inf, over) if over else math.nan

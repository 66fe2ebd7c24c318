"""How metrics are made: what every series is named and labelled by, and counts that outlive workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

# Else each counter and histogram has a `_created` twin: hundreds of lines that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LABELS = ("model_name", "engine")

Engine = tuple[str, str]
"""The labels of one replica: the model's name, and its number."""


@dataclass(slots=True)
class PerWorker:
    """A count that each worker begins at 0, made one that only grows."""

    counter: Counter
    _seen: dict[tuple[str, ...], tuple[int, float, Counter]] = field(default_factory=dict)

    def update(self, pid: int, count: float, *labels: str) -> None:
        """Take what the worker with this pid has counted so far, under these labels, its replica's among them."""
        known = self._seen.get(labels)
        before, seen, series = known if known is not None else (pid, 0.0, self.counter.labels(*labels))
        seen = seen if pid == before else 0.0
        if count > seen:
            series.inc(count - seen)
        self._seen[labels] = (pid, max(seen, count), series)


@dataclass(slots=True)
class Present:
    """A gauge of what is there now: a series goes with what it tells of, and the others stay as they are."""

    gauge: Gauge
    _series: dict[tuple[str, ...], Gauge] = field(default_factory=dict)

    def show(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Set all there is, by labels."""
        for labels in self._series.keys() - values.keys():
            self.gauge.remove(*labels)
            del self._series[labels]
        for labels, value in values.items():
            if labels not in self._series:
                self._series[labels] = self.gauge.labels(*labels)
            self._series[labels].set(value)


@dataclass(slots=True)
class Registered:
    """Makes metrics of one registry; every one has the labels `model_name` and `engine`, the replica's number."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"outrider_{name}", text, [*_LABELS, *more], registry=self.registry)

    def gauge(self, name: str, text: str, *more: str) -> Gauge:
        return Gauge(f"outrider_{name}", text, [*_LABELS, *more], registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *more: str) -> Histogram:
        return Histogram(f"outrider_{name}", text, [*_LABELS, *more], registry=self.registry, buckets=buckets)

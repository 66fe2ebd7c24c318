"""How metrics are made: what every series is named and labelled by, and counts that outlive workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

# Else each counter and histogram has a `_created` twin: hundreds of lines that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LABELS = ("model_name", "engine")

Engine = tuple[str, str]
"""The labels of one replica: the model's name, and its number."""
Labels = tuple[str, ...]
Reading = float | None | Mapping[Any, float]
"""One value (None: it is not known), or values by a figure's own label, or by a tuple of its labels."""
Source = TypeVar("Source")


@dataclass(slots=True)
class PerWorker:
    """A count that each worker begins at 0, made one that only grows."""

    counter: Counter
    _seen: dict[Labels, tuple[int, float, Counter]] = field(default_factory=dict)

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
    _series: dict[Labels, Gauge] = field(default_factory=dict)

    def show(self, values: Mapping[Labels, float], *, keep: bool = False) -> None:
        for labels in () if keep else self._series.keys() - values.keys():
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


class Figure(NamedTuple, Generic[Source]):
    """A metric: its name without the prefix, its help, how it is read, `labels` of its own, `bounds` of a histogram."""

    kind: str
    name: str
    text: str
    read: Callable[[Source], Reading]
    labels: Labels = ()
    bounds: tuple[float, ...] = ()


Figures = tuple[Figure[Source], ...]


def gauge(name: str, text: str, read: Callable[[Source], Reading], *labels: str) -> Figure[Source]:
    return Figure("gauge", name, text, read, labels)


def counter(name: str, text: str, read: Callable[[Source], Reading], *labels: str) -> Figure[Source]:
    return Figure("counter", name, text, read, labels)


def histogram(
    name: str, text: str, bounds: tuple[float, ...], read: Callable[[Source], Reading], *labels: str
) -> Figure[Source]:
    """Return a figure of which each value counts, by these upper ends of buckets."""
    return Figure("histogram", name, text, read, labels, bounds)


class Table(Generic[Source]):
    """Figures that are read of things of one kind. `labels`: those that tell such things of one replica apart."""

    def __init__(self, make: Registered, figures: Figures[Source], *labels: str) -> None:
        self._gauges = list[tuple[Callable[[Source], Reading], Present]]()
        self._counts = list[tuple[Callable[[Source], Reading], PerWorker]]()
        self._histograms = list[tuple[Callable[[Source], Reading], Histogram]]()
        for figure in figures:
            about = (figure.name, figure.text)
            if figure.kind == "gauge":
                self._gauges.append((figure.read, Present(make.gauge(*about, *labels, *figure.labels))))
            elif figure.kind == "counter":
                self._counts.append((figure.read, PerWorker(make.counter(*about, *labels, *figure.labels))))
            else:
                made = make.histogram(*about, figure.bounds, *labels, *figure.labels)
                self._histograms.append((figure.read, made))

    def show(
        self, sources: Mapping[Labels, Source], pids: Mapping[Labels, int] | None = None, *, keep: bool = False
    ) -> None:
        """Tell how all there are stand, by their labels. `pids`: of the workers that count, by the replica; without
        them counts never begin anew. `keep`: what was told of others stays."""
        for read, present in self._gauges:
            present.show(dict(_read_all(sources, read)), keep=keep)
        for read, count in self._counts:
            for labels, value in _read_all(sources, read):
                count.update((pids or {}).get(labels[:2], 0), value, *labels)

    def add(self, labels: Labels, event: Source) -> None:
        for read, count in self._counts:
            for own, value in _spread(read(event)):
                count.counter.labels(*labels, *own).inc(value)
        for read, made in self._histograms:
            for own, value in _spread(read(event)):
                made.labels(*labels, *own).observe(value)


def _read_all(sources: Mapping[Labels, Source], read: Callable[[Source], Reading]) -> Iterable[tuple[Labels, float]]:
    return (((*labels, *own), value) for labels, source in sources.items() for own, value in _spread(read(source)))


def _spread(reading: Reading) -> Iterable[tuple[Labels, float]]:
    if isinstance(reading, Mapping):
        return [((own,) if isinstance(own, str) else own, value) for own, value in reading.items()]
    return () if reading is None else [((), reading)]

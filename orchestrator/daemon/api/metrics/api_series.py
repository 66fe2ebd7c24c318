"""Connections, bodies, batches, kept answers and spans of this process, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.daemon.api.batches.records import LIVE
from orchestrator.daemon.api.body_bounds import BodyBudget
from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.journal.standing import PROBLEM_KINDS, JournalView
from orchestrator.daemon.tracing.port import ExportCounts


class IntakeSeries:
    """`connections`: None where nobody watches them."""

    def __init__(self, make: Registered, connections: Connections | None, bodies: BodyBudget | None) -> None:
        self._connections = connections
        self._bodies = bodies
        self._open = make.gauge("api_connections", "Connections by whether they are idle.", "state")
        self._closed = make.counter("api_connections_closed", "Connections that were ended, by the reason.", "reason")
        self._held = make.gauge("api_body_bytes", "Bytes of bodies that are read or translated.")
        self._refused = make.counter("api_bodies_refused", "Bodies beyond the budget of bytes.")
        self._told: Counter[str] = Counter()
        self._refusals_told = 0

    def refresh(self, of: Engine) -> None:
        if self._connections is not None:
            idle = self._connections.idle
            self._open.labels(*of, "idle").set(idle)
            self._open.labels(*of, "busy").set(len(self._connections) - idle)
            for reason, count in self._connections.closed.items():
                self._closed.labels(*of, reason).inc(count - self._told[reason])
            self._told = self._connections.closed.copy()
        if self._bodies is not None:
            self._held.labels(*of).set(self._bodies.held)
            self._refused.labels(*of).inc(self._bodies.refused - self._refusals_told)
            self._refusals_told = self._bodies.refused


class BatchCounts(Protocol):
    """What is told of batches: lines of this daemon by how they ended, and the records."""

    line_counts: dict[str, int]
    store: Any


class BatchSeries:
    """`source`: None where there are no batches."""

    def __init__(self, make: Registered) -> None:
        self.source: BatchCounts | None = None
        self._batches = make.gauge("batches", "Batches that have not ended, by their status.", "status")
        self._lines = make.counter("batch_lines", "Lines of batches, by how they ended.", "outcome")
        self._bytes = make.gauge("batch_file_bytes", "Bytes of the files of batches on the disk.")
        self._told: Counter[str] = Counter()

    def refresh(self, of: Engine) -> None:
        if self.source is None:
            return
        now = Counter(batch.status for batch in self.source.store.batches.values())
        for status in sorted(LIVE):
            self._batches.labels(*of, status).set(now[status])
        for outcome, count in self.source.line_counts.items():
            self._lines.labels(*of, outcome).inc(count - self._told[outcome])
        self._told = Counter(self.source.line_counts)
        self._bytes.labels(*of).set(self.source.store.used_bytes)


class JournalSeries:
    """`source`: None where answers are not kept."""

    def __init__(self, make: Registered) -> None:
        self.source: Callable[[], JournalView] | None = None
        self._answers = make.gauge("journal_answers", "Answers that may be resumed.")
        self._wanted = make.gauge("journal_reserve_bytes", "Bytes of the disk that are to be allocated ahead.")
        self._allocated = make.gauge("journal_allocated_bytes", "Bytes of the disk that are.")
        self._problems = make.gauge("journal_problems", "1 while it cannot keep something, or may not.", "kind")

    def refresh(self, of: Engine) -> None:
        if self.source is None:
            return
        view = self.source()
        kinds = {problem.kind for problem in view.problems}
        self._answers.labels(*of).set(view.answers)
        self._wanted.labels(*of).set(view.reserve_bytes)
        self._allocated.labels(*of).set(view.allocated_bytes)
        for kind in PROBLEM_KINDS:
            self._problems.labels(*of, kind).set(kind in kinds)


class TraceSeries:
    """`source`: None where there is no tracing."""

    def __init__(self, make: Registered) -> None:
        self.source: Callable[[], ExportCounts] | None = None
        self._spans = make.counter("trace_spans", "Spans by what became of them.", "outcome")
        self._told = ExportCounts(0, 0, 0)

    def refresh(self, of: Engine) -> None:
        if self.source is None:
            return
        now = self.source()
        for outcome, count, before in zip(ExportCounts._fields, now, self._told, strict=True):
            self._spans.labels(*of, outcome).inc(count - before)
        self._told = now

"""Batches that the daemon answers, as metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from orchestrator.daemon.api.batches.records import LIVE
from orchestrator.daemon.api.metrics.series import Engine, Registered


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
        """Tell what is so now."""
        if self.source is None:
            return
        now = Counter(batch.status for batch in self.source.store.batches.values())
        for status in sorted(LIVE):
            self._batches.labels(*of, status).set(now[status])
        for outcome, count in self.source.line_counts.items():
            self._lines.labels(*of, outcome).inc(count - self._told[outcome])
        self._told = Counter(self.source.line_counts)
        self._bytes.labels(*of).set(self.source.store.used_bytes)

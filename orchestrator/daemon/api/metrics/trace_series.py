"""What becomes of spans, as metrics."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.tracing.port import ExportCounts


class TraceSeries:
    """`source`: None where there is no tracing."""

    def __init__(self, make: Registered) -> None:
        self.source: Callable[[], ExportCounts] | None = None
        self._spans = make.counter("trace_spans", "Spans by what became of them.", "outcome")
        self._told = ExportCounts(0, 0, 0)

    def refresh(self, of: Engine) -> None:
        """Tell what is so now."""
        if self.source is None:
            return
        now = self.source()
        for outcome, count, before in zip(ExportCounts._fields, now, self._told, strict=True):
            self._spans.labels(*of, outcome).inc(count - before)
        self._told = now

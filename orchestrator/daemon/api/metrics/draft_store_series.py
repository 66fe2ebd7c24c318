"""What the draft store is asked, and what comes of it, as metrics."""

from __future__ import annotations

from orchestrator.daemon.api.metrics.series import Engine, PerWorker, Registered
from orchestrator.daemon.control.port import DraftStoreView, RecentOutputsView

_ONE = 0  # the service lives as long as the registry: its counts never begin anew


class DraftStoreSeries:
    """No series where answers stay in the worker's memory."""

    def __init__(self, make: Registered) -> None:
        self._up = make.gauge("draft_store_up", "1 while the draft store works, 0 while it counts as away.")
        self._waiting = make.gauge("draft_store_waiting", "Answers that wait to be written.")
        self._lookups = PerWorker(make.counter("draft_store_lookups", "Lookups by how they went.", "outcome"))
        self._writes = PerWorker(make.counter("draft_store_writes", "Answers by what became of them.", "outcome"))
        self._recent_tokens = make.gauge("recent_outputs_tokens", "Tokens of users' last answers that are remembered.")
        self._recent_given = PerWorker(make.counter("recent_outputs_requests", "Requests that got some of them."))
        self._errors = PerWorker(make.counter("draft_store_errors", "Failures of the store.", "kind"))
        self._bytes = PerWorker(make.counter("draft_store_bytes", "Bytes of values.", "direction"))

    def refresh_recent(self, of: Engine, recent: RecentOutputsView) -> None:
        """Tell what is remembered of users."""
        self._recent_tokens.labels(*of).set(recent.tokens)
        self._recent_given.update(_ONE, recent.given, *of)

    def refresh(self, of: Engine, store: DraftStoreView) -> None:
        """Tell what is so now."""
        self._up.labels(*of).set(store.state == "ok")
        self._waiting.labels(*of).set(store.waiting)
        lookups = {"hit": store.hits, "miss": store.misses, "late": store.late, "skipped": store.skipped}
        for outcome, count in lookups.items():
            self._lookups.update(_ONE, count, *of, outcome)
        for outcome, count in (("written", store.written), ("dropped", store.dropped)):
            self._writes.update(_ONE, count, *of, outcome)
        for kind, count in (("failed", store.errors), ("damaged", store.damaged)):
            self._errors.update(_ONE, count, *of, kind)
        for direction, count in (("read", store.read_bytes), ("written", store.written_bytes)):
            self._bytes.update(_ONE, count, *of, direction)

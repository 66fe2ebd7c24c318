"""What each worker process was announced to hold, and the most that it held."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Gauge

from orchestrator.daemon.control.port import StateView
from orchestrator.protocol.draft_messages import RemoteState

TARGET = "target"


class MemoryMetrics:
    """Gauges by worker and device. What is not known, or of a worker that is not there, is not told."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        labels = ("worker", "device")
        self._planned = gauge("planned_memory_bytes", "What a worker was announced to hold at its peak.", *labels)
        self._peak = gauge("peak_memory_bytes", "The most host memory that a worker's process held.", *labels)

    def refresh(self, model: str, view: StateView) -> None:
        """Take what workers say of themselves now."""
        self._planned.clear()
        self._peak.clear()
        drafters: dict[tuple[str, str], RemoteState | None] = {}
        for replica in view.replicas:
            gauges = replica.gauges
            if replica.ready is not None:
                labels = (model, str(replica.engine), TARGET, replica.ready.device.name)
                peak = gauges.peak_rss_bytes if gauges is not None else 0
                self._tell(labels, replica.ready.device.planned_memory_bytes, peak)
            drafters |= {(replica.name, state.name): state.remote for state in (gauges.drafters if gauges else [])}
        for draft in view.drafts:
            if draft.ready is not None:
                state = draft.ready.drafter
                remotes = [drafters.get((target, draft.name)) for target in draft.targets]
                peak = max((remote.peak_rss_bytes for remote in remotes if remote is not None), default=0)
                labels = (model, str(draft.number), draft.name, state.device)
                self._tell(labels, state.planned_memory_bytes, peak)

    def _tell(self, labels: tuple[str, ...], planned_bytes: int, peak_bytes: int) -> None:
        for gauge, count in ((self._planned, planned_bytes), (self._peak, peak_bytes)):
            if count:
                gauge.labels(*labels).set(count)

"""The health of devices, hosts, links and workers, and what standbys did, as metrics."""

from __future__ import annotations

from collections import Counter

from orchestrator.daemon.api.metrics.series import Registered
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.replicas.shortfall import is_out, list_wanted


class HealthSeries:
    """No series of a part that nothing went wrong with."""

    def __init__(self, make: Registered) -> None:
        self._parts = make.gauge("part_health", "1 for the state that a part is in.", "kind", "name", "state")
        self._wanted = make.gauge("replicas_planned", "Replicas that are to serve.")
        self._ready = make.gauge("replicas_ready", "Replicas that serve.")
        self._out = make.gauge("replicas_failed", "Planned replicas that were refused, or are lost at every start.")
        self._standbys = make.gauge("standbys", "Standbys that are loaded and do not serve.")
        self._taken = make.counter("standby_takeovers", "Times a standby took the target's place.", "bits")
        self._told: Counter[str] = Counter()

    def refresh(self, model: str, view: StateView) -> None:
        """Tell what is so now."""
        self._parts.clear()
        for part in view.health:
            self._parts.labels(model, "0", part.kind, part.name, part.state).set(1)
        wanted = list_wanted(view)
        self._wanted.labels(model, "0").set(len(wanted))
        self._ready.labels(model, "0").set(sum(replica.phase == "ready" for replica in wanted))
        self._out.labels(model, "0").set(sum(map(is_out, wanted)))
        self._standbys.labels(model, "0").set(sum(replica.phase == "ready" for replica in view.standbys))
        for bits, count in view.taken_over.items():
            self._taken.labels(model, "0", bits).inc(count - self._told[bits])
        self._told = Counter(view.taken_over)

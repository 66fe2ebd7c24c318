"""Connections and bodies of the public API, as metrics."""

from __future__ import annotations

from collections import Counter

from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.api.shares import BodyBudget


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
        """Tell what is so now."""
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

"""How many replicas load asks for, as a metric."""

from __future__ import annotations

from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.control.port import ScaleView


class ScaleSeries:
    """No series where the number of replicas does not follow load."""

    def __init__(self, make: Registered) -> None:
        self._wanted = make.gauge("replicas_wanted", "Replicas that load asks for.")

    def refresh(self, of: Engine, scaling: ScaleView) -> None:
        """Tell what is so now."""
        self._wanted.labels(*of).set(scaling.wanted)

"""What the running plan predicts, and what came of it, as metrics."""

from __future__ import annotations

from orchestrator.api.metrics.series import Engine, Registered
from orchestrator.control.port import PlanView


class PlanSeries:
    """No series where nothing was left to a plan."""

    def __init__(self, make: Registered) -> None:
        self._predicted = make.gauge("plan_predicted_tokens_per_second", "Output tokens a second that it predicts.")
        self._measured = make.gauge("plan_measured_tokens_per_second", "Output tokens a second of rounds that decode.")
        self._ratio = make.gauge("plan_drift_ratio", "Measured by predicted time of rounds, a running mean.")
        self._moves = make.counter("plan_moves", "Times that workers were replaced for another plan.")
        self._moved = 0

    def refresh(self, of: Engine, plan: PlanView) -> None:
        """Tell what is so now."""
        self._predicted.labels(*of).set(plan.predicted_tokens_per_s)
        self._measured.labels(*of).set(plan.measured_tokens_per_s)
        self._ratio.labels(*of).set(plan.ratio)
        self._moves.labels(*of).inc(plan.moves - self._moved)
        self._moved = plan.moves

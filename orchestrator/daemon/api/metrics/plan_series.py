"""What the running plan predicts, and what came of it, as metrics."""

from __future__ import annotations

from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.control.port import PlanView


class PlanSeries:
    """No series where nothing was left to a plan."""

    def __init__(self, make: Registered) -> None:
        self._predicted = make.gauge("plan_predicted_tokens_per_second", "Output tokens a second that it predicts.")
        self._measured = make.gauge("plan_measured_tokens_per_second", "Output tokens a second of rounds that decode.")
        self._ratio = make.gauge("plan_drift_ratio", "Measured by predicted time of rounds, a running mean.")
        self._factor = make.gauge(
            "plan_misprediction_factor", "The drift ratio or a correction, or 1 by it, where above 1."
        )
        self._moves = make.counter("plan_moves", "Times that workers were replaced for another plan.")
        self._cost = make.gauge(
            "plan_predicted_cost_per_million_tokens", "Cost of a million output tokens that it predicts.", "currency"
        )
        self._joules = make.gauge("plan_predicted_joules_per_token", "Energy of an output token that it predicts.")
        self._moved = 0

    def refresh(self, of: Engine, plan: PlanView) -> None:
        """Tell what is so now."""
        self._predicted.labels(*of).set(plan.predicted_tokens_per_s)
        self._measured.labels(*of).set(plan.measured_tokens_per_s)
        self._ratio.labels(*of).set(plan.ratio)
        known = [ratio for ratio in (plan.ratio, *plan.corrections) if ratio > 0.0]
        self._factor.labels(*of).set(max((max(ratio, 1.0 / ratio) for ratio in known), default=1.0))
        for gauge in (self._cost, self._joules):
            gauge.clear()  # where it is not known there is no series
        if plan.predicted_cost_per_million_tokens:
            self._cost.labels(*of, plan.currency).set(plan.predicted_cost_per_million_tokens)
        if plan.predicted_joules_per_token:
            self._joules.labels(*of).set(plan.predicted_joules_per_token)
        self._moves.labels(*of).inc(plan.moves - self._moved)
        self._moved = plan.moves

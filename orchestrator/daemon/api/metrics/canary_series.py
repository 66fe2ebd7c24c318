"""Figures of the canary's two variants, as metrics."""

from __future__ import annotations

from math import isfinite

from orchestrator.daemon.api.metrics.request_timing import RequestTotals
from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.control.port import PROMOTED, ROLLED_BACK, TRIAL, TrialView

# Upper ends of a histogram's buckets, part of the metrics' language.
LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # as above


class TrialSeries:
    """No series where there is no canary."""

    def __init__(self, make: Registered) -> None:
        self._requests = make.counter("arm_requests", "Requests that ended, by variant.", "arm")
        self._drafted = make.counter("arm_draft_tokens", "Draft tokens verified, by variant.", "arm")
        self._accepted = make.counter("arm_accepted_tokens", "Draft tokens accepted, by variant.", "arm")
        self._tokens = make.counter("arm_generation_tokens", "Tokens generated, by variant.", "arm")
        self._tolerated = make.counter("arm_tolerated_tokens", "Tokens only the tolerance accepted, by variant.", "arm")
        self._ttft = make.histogram("arm_time_to_first_token_seconds", "TTFT, by variant.", LATENCY_S, "arm")
        self._tpot = make.histogram("arm_request_time_per_output_token_seconds", "TPOT, by variant.", TOKEN_S, "arm")
        bounds = ("arm", "at")
        self._means = {
            "ttft_ms": make.gauge("arm_ttft_ms", "Mean TTFT of the trial, and its 95 % interval.", *bounds),
            "tpot_ms": make.gauge("arm_tpot_ms", "Mean TPOT of the trial, and its 95 % interval.", *bounds),
            "acceptance": make.gauge("arm_acceptance_rate", "Mean acceptance of requests, and its interval.", *bounds),
            "agreement": make.gauge("arm_agreement", "Mean share of tokens that are the target's own choice.", *bounds),
        }
        self._share = make.gauge("canary_share", "Share of the requests that the canary gets now.")
        self._phase = make.gauge("canary_phase", "1 for the phase that the canary is in.", "phase")

    def count_request(self, of: Engine, variant: str, done: RequestTotals) -> None:
        """Count a request that came to its end."""
        self._requests.labels(*of, variant).inc()
        self._drafted.labels(*of, variant).inc(done.drafted)
        self._accepted.labels(*of, variant).inc(done.accepted)
        self._tokens.labels(*of, variant).inc(done.tokens)
        self._tolerated.labels(*of, variant).inc(done.tolerated)
        if done.ttft_s is not None:
            self._ttft.labels(*of, variant).observe(done.ttft_s)
        if done.tpot_s is not None:
            self._tpot.labels(*of, variant).observe(done.tpot_s)

    def refresh(self, of: Engine, view: TrialView) -> None:
        self._share.labels(*of).set(view.effective_share)
        for phase in (TRIAL, PROMOTED, ROLLED_BACK):
            self._phase.labels(*of, phase).set(view.phase == phase)
        for name, gauge in self._means.items():
            gauge.clear()
            for variant, figures in view.arms.items():
                moments = getattr(figures, name)
                ends = {"mean": moments.mean, "low": moments.interval.low, "high": moments.interval.high}
                for at, value in ends.items():
                    if moments.seen and isfinite(value):
                        gauge.labels(*of, variant, at).set(value)

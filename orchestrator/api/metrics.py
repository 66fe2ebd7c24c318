"""Prometheus metrics: vLLM's names and meanings under the `outrider_` prefix. docs/metrics.md gives the formulas."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from orchestrator.api.streaming import Answer
from orchestrator.cluster.port import Round
from orchestrator.control.port import Control, StateView

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """One registry a daemon; every metric has the label `model_name`."""

    def __init__(self, control: Control) -> None:
        self.registry = CollectorRegistry()
        self._control = control
        label = ["model_name"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"outrider_{name}", text, [*label, *more], registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider_{name}", text, label, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"outrider_{name}", text, label, registry=self.registry, buckets=buckets)

        self._drafts = counter("spec_decode_num_drafts", "Drafts verified, one a sequence and round.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._positions = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a position.", "position"
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._success = counter("request_success", "Requests that ended well.", "finished_reason")
        self._restarts = counter("worker_restarts", "Restarts of the worker since the daemon started.")
        self._restarts_counted = 0
        self._running = gauge("num_requests_running", "Requests in the decode loop.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for a place.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._rate = gauge("acceptance_rate", "Accepted by drafted tokens since the daemon started.")
        self._ttft = histogram("time_to_first_token_seconds", "Time to the first token.", _LATENCY_S)
        self._tpot = histogram("request_time_per_output_token_seconds", "TPOT of a request.", _TOKEN_S)
        self._itl = histogram("inter_token_latency_seconds", "Gap between two deltas.", _TOKEN_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Latency of a request.", _LATENCY_S)
        self._round = histogram("round_seconds", "Time of a round.", _TOKEN_S)

    @property
    def _model(self) -> str:
        ready = self._control.view().ready
        return ready.model if ready is not None else ""

    def observe_round(self, done: Round) -> None:
        """Count a round of the worker."""
        model = self._model
        self._drafts.labels(model).inc(done.drafts)
        self._drafted.labels(model).inc(done.drafted)
        self._accepted.labels(model).inc(done.accepted)
        for position, count in enumerate(done.accepted_per_position):
            self._positions.labels(model, str(position)).inc(count)
        self._generated.labels(model).inc(sum(len(delta.tokens) for delta in done.deltas))
        self._round.labels(model).observe(done.round_ms / 1000.0)

    def observe_answer(self, answer: Answer, prompt_tokens: int) -> None:
        """Count a request that ended well."""
        model = self._model
        self._success.labels(model, answer.finish).inc()
        self._prompt.labels(model).inc(prompt_tokens)
        self._ttft.labels(model).observe(answer.first_s - answer.started_s)
        self._e2e.labels(model).observe(answer.last_s - answer.started_s)
        for gap_s in answer.gaps_s:
            self._itl.labels(model).observe(gap_s)
        if answer.tokens > 1:
            self._tpot.labels(model).observe((answer.last_s - answer.first_s) / (answer.tokens - 1))

    def render(self) -> bytes:
        """Return the exposition text, with control's own figures as they are now."""
        if self._control.view().ready is not None:  # before that no series could be named after its model
            self._refresh(self._control.view(), self._model)
        return generate_latest(self.registry)

    def _refresh(self, view: StateView, model: str) -> None:
        self._restarts.labels(model).inc(view.totals.restarts - self._restarts_counted)
        self._restarts_counted = view.totals.restarts
        if view.gauges is not None:
            used = view.gauges.total_blocks - view.gauges.free_blocks
            self._running.labels(model).set(view.gauges.running)
            self._waiting.labels(model).set(view.gauges.waiting)
            self._kv_usage.labels(model).set(used / max(1, view.gauges.total_blocks))
        if view.totals.drafted:
            self._rate.labels(model).set(view.totals.accepted / view.totals.drafted)

"""Prometheus metrics: vLLM's names and meanings under the `outrider_` prefix. docs/metrics.md gives the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from device_profiles.units import MS_PER_S
from orchestrator.api.measured import Measured, Recent
from orchestrator.api.vllm_names import VllmNames
from orchestrator.clock import Clock
from orchestrator.cluster.port import DrafterState, Gauges, RemoteState, Round
from orchestrator.control.port import Control, DraftView, StateView

WINDOW_S = 30.0
"""The time that `acceptance_rate` and `tokens_per_second` look back."""

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_ROUND_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_TOKENS = tuple(float(2**power) for power in range(18))


@dataclass(slots=True)
class _PerWorker:
    """A count that each worker begins at 0, made one that only grows."""

    counter: Counter
    _pid: int = 0
    _seen: dict[tuple[str, ...], float] = field(default_factory=dict)

    def update(self, pid: int, count: float, *labels: str) -> None:
        """Take what the worker with this pid has counted so far, under these labels."""
        if pid != self._pid:
            self._pid, self._seen = pid, {}
        seen = self._seen.get(labels, 0)
        self.counter.labels(*labels).inc(max(0, count - seen))
        self._seen[labels] = max(seen, count)


@dataclass(slots=True)
class _Registered:
    """Makes metrics of one registry; every one has the label `model_name`."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"outrider_{name}", text, ["model_name", *more], registry=self.registry)

    def gauge(self, name: str, text: str, *more: str) -> Gauge:
        return Gauge(f"outrider_{name}", text, ["model_name", *more], registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"outrider_{name}", text, ["model_name"], registry=self.registry, buckets=buckets)


class _Rounds:
    """What rounds of the decode loop add up to."""

    def __init__(self, make: _Registered, clock: Clock) -> None:
        self._clock = clock
        self._recent = Recent(WINDOW_S)
        self._drafts = make.counter("spec_decode_num_drafts", "Drafts verified, one a sequence and round.")
        self._drafted = make.counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = make.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._positions = make.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a position.", "position"
        )
        self._rule_drafted = make.counter("acceptance_draft_tokens", "Draft tokens verified under a rule.", "rule")
        self._rule_accepted = make.counter("acceptance_accepted_tokens", "Draft tokens a rule accepted.", "rule")
        self._prompt = make.counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generated = make.counter("generation_tokens", "Tokens generated.")
        self._iteration = make.histogram("iteration_tokens_total", "Tokens of a round, prompts included.", _TOKENS)
        self._round = make.histogram("round_seconds", "Time of a round.", _TOKEN_S)
        self._draft_ms = make.histogram("draft_latency_ms", "Drafting in a round that had a draft.", _ROUND_MS)
        self._verify_ms = make.histogram("verifier_latency_ms", "The target's forward in a round.", _ROUND_MS)
        self._rate = make.gauge("acceptance_rate", f"Accepted by drafted tokens, last {WINDOW_S:g} s.")
        self._speed = make.gauge("tokens_per_second", f"Tokens generated a second, last {WINDOW_S:g} s.")

    def observe(self, model: str, done: Round) -> None:
        generated = sum(len(delta.tokens) for delta in done.deltas)
        # A request's first delta is the one that makes all that was ever generated; a resumed one has more behind it.
        prompts = sum(
            delta.stats.prompt_tokens
            for delta in done.deltas
            if delta.stats is not None and delta.tokens and delta.stats.generated == len(delta.tokens)
        )
        self._drafts.labels(model).inc(done.drafts)
        self._drafted.labels(model).inc(done.drafted)
        self._accepted.labels(model).inc(done.accepted)
        for position, count in enumerate(done.accepted_per_position):
            self._positions.labels(model, str(position)).inc(count)
        for rule, (drafted, accepted) in done.by_rule.items():
            self._rule_drafted.labels(model, rule).inc(drafted)
            self._rule_accepted.labels(model, rule).inc(accepted)
        self._prompt.labels(model).inc(prompts)
        self._generated.labels(model).inc(generated)
        self._iteration.labels(model).observe(generated + prompts)
        self._round.labels(model).observe(done.round_ms / 1000.0)
        self._verify_ms.labels(model).observe(done.device_ms)
        if done.drafts:
            self._draft_ms.labels(model).observe(done.draft_ms)
        self._recent.add(self._clock.monotonic_s(), done.drafted, done.accepted, generated)

    def refresh(self, model: str) -> None:
        now_s = self._clock.monotonic_s()
        self._speed.labels(model).set(self._recent.rate(now_s, 2))
        if drafted := self._recent.sum(now_s, 0):
            self._rate.labels(model).set(self._recent.sum(now_s, 1) / drafted)
        else:
            self._rate.clear()  # nothing was drafted: there is no rate, and the last one would be a lie


class _Requests:
    """What requests that ended add up to."""

    def __init__(self, make: _Registered) -> None:
        self._success = make.counter("request_success", "Requests by how they ended.", "finished_reason")
        self._ttft = make.histogram("time_to_first_token_seconds", "Time to the first token.", _LATENCY_S)
        self._itl = make.histogram("inter_token_latency_seconds", "Gap between two deltas.", _TOKEN_S)
        self._tpot = make.histogram("request_time_per_output_token_seconds", "TPOT of a request.", _TOKEN_S)
        self._e2e = make.histogram("e2e_request_latency_seconds", "Latency of a request.", _LATENCY_S)
        self._queue = make.histogram("request_queue_time_seconds", "Time in the queue.", _LATENCY_S)
        self._prefill = make.histogram("request_prefill_time_seconds", "Time in prefill.", _LATENCY_S)
        self._decode = make.histogram("request_decode_time_seconds", "Time in decode.", _LATENCY_S)
        self._prompt = make.histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = make.histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._asked = make.histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)

    def first_token(self, model: str, ttft_s: float) -> None:
        self._ttft.labels(model).observe(ttft_s)

    def gap(self, model: str, gap_s: float) -> None:
        self._itl.labels(model).observe(gap_s)

    def end(self, model: str, done: Measured, started_s: float) -> None:
        self._success.labels(model, done.finish).inc()
        self._prompt.labels(model).observe(done.prompt_tokens)
        self._generated.labels(model).observe(done.tokens)
        self._asked.labels(model).observe(done.max_tokens)
        if not done.tokens:
            return
        self._e2e.labels(model).observe(done.last_s - started_s)
        self._decode.labels(model).observe(done.last_s - done.first_s)
        if done.first is not None:
            self._queue.labels(model).observe(done.first.queue_ms / 1000.0)
            self._prefill.labels(model).observe(done.first.prefill_ms / 1000.0)
        if done.tpot_s is not None:
            self._tpot.labels(model).observe(done.tpot_s)


class _State:
    """What the worker says of itself."""

    def __init__(self, make: _Registered) -> None:
        self._running = make.gauge("num_requests_running", "Requests in the decode loop.")
        self._waiting = make.gauge("num_requests_waiting", "Requests that wait for a place.")
        self._kv_usage = make.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._preemptions = _PerWorker(make.counter("num_preemptions", "Requests sent back to the queue."))
        self._queries = _PerWorker(make.counter("prefix_cache_queries", "Tokens looked up in the prefix cache."))
        self._hits = _PerWorker(make.counter("prefix_cache_hits", "Tokens found in the prefix cache."))
        self._delta = make.gauge("tolerance_delta", "Nats that tolerance allows, once it is known.", "sampling")
        self._restarts = make.counter("worker_restarts", "Restarts of the worker since the daemon started.")
        self._restarts_counted = 0

    def count(self, model: str, pid: int, gauges: Gauges) -> None:
        self._preemptions.update(pid, gauges.preemptions, model)
        self._queries.update(pid, gauges.prefix_queries, model)
        self._hits.update(pid, gauges.prefix_hits, model)

    def refresh(self, model: str, view: StateView) -> None:
        self._restarts.labels(model).inc(view.totals.restarts - self._restarts_counted)
        self._restarts_counted = view.totals.restarts
        if view.gauges is not None:
            used = view.gauges.total_blocks - view.gauges.free_blocks
            self._running.labels(model).set(view.gauges.running)
            self._waiting.labels(model).set(view.gauges.waiting)
            self._kv_usage.labels(model).set(used / max(1, view.gauges.total_blocks))
            self._delta.clear()  # a new worker knows of none
            for sampling, delta in view.gauges.tolerance_deltas.items():
                self._delta.labels(model, sampling).set(delta)


class _Drafters:
    """What the worker says of each drafter."""

    def __init__(self, make: _Registered) -> None:
        self._up = make.gauge("drafter_up", "1 while a drafter works, 0 when it has failed.", "drafter")
        self._drafted = _PerWorker(make.counter("drafter_draft_tokens", "Its tokens verified.", "drafter"))
        self._accepted = _PerWorker(make.counter("drafter_accepted_tokens", "Its tokens accepted.", "drafter"))
        self._rounds = _PerWorker(make.counter("drafter_rounds", "Rounds in which it drafted.", "drafter"))
        self._seconds = _PerWorker(make.counter("drafter_seconds", "Time that its drafting took.", "drafter"))
        self._remotes = _Remotes(make)

    def count(self, model: str, pid: int, drafters: Sequence[DrafterState]) -> None:
        for drafter in drafters:
            self._up.labels(model, drafter.name).set(drafter.state == "ok")
            self._drafted.update(pid, drafter.drafted, model, drafter.name)
            self._accepted.update(pid, drafter.accepted, model, drafter.name)
            self._rounds.update(pid, drafter.rounds, model, drafter.name)
            self._seconds.update(pid, drafter.draft_ms / MS_PER_S, model, drafter.name)
            if drafter.remote is not None:
                self._remotes.count(pid, drafter.remote, model, drafter.name)

    def refresh(self, model: str, view: StateView) -> None:
        for draft in view.drafts:
            self._remotes.refresh(draft, model)


class _Remotes:
    """Drafters in workers of their own."""

    def __init__(self, make: _Registered) -> None:
        self._asks = _PerWorker(make.counter("drafter_asks", "Rounds that asked it for drafts.", "drafter"))
        self._late = _PerWorker(make.counter("drafter_late_answers", "Answers after the round had gone on.", "drafter"))
        self._connections = _PerWorker(make.counter("drafter_connections", "Times it was connected.", "drafter"))
        self._hits = _PerWorker(
            make.counter("drafter_ahead_hits", "Drafts there before they were asked for.", "drafter")
        )
        self._misses = _PerWorker(make.counter("drafter_ahead_misses", "Drafts that were not there yet.", "drafter"))
        self._restarts = make.counter("draft_worker_restarts", "Restarts of a draft worker.", "drafter")
        self._restarts_counted: dict[str, int] = {}

    def count(self, pid: int, remote: RemoteState, *labels: str) -> None:
        self._asks.update(pid, remote.asks, *labels)
        self._late.update(pid, remote.late, *labels)
        self._connections.update(pid, remote.connections, *labels)
        self._hits.update(pid, remote.ahead_hits, *labels)
        self._misses.update(pid, remote.ahead_misses, *labels)

    def refresh(self, draft: DraftView, model: str) -> None:
        counted = self._restarts_counted.get(draft.name, 0)
        self._restarts.labels(model, draft.name).inc(draft.restarts - counted)
        self._restarts_counted[draft.name] = draft.restarts


class Metrics:
    """One registry a daemon. Until the first worker is ready nothing is counted: no series could be named.

    `vllm_names`: what vLLM has too is told a second time, under its names.
    """

    def __init__(self, control: Control, clock: Clock, *, vllm_names: bool = False) -> None:
        make = _Registered()
        self.registry = make.registry
        self._aliases = CollectorRegistry()
        if vllm_names:
            self._aliases.register(VllmNames(self.registry))
        self._control = control
        self._rounds = _Rounds(make, clock)
        self._requests = _Requests(make)
        self._state = _State(make)
        self._drafters = _Drafters(make)

    @property
    def _model(self) -> str:
        ready = self._control.view().ready
        return ready.model if ready is not None else ""

    def observe_round(self, done: Round) -> None:
        """Count a round of the worker."""
        view = self._control.view()
        if view.ready is None:
            return
        self._rounds.observe(view.ready.model, done)
        self._count_worker(view)

    def observe_first_token(self, ttft_s: float) -> None:
        """A sequence got its first token, so long after its request came."""
        self._requests.first_token(self._model, ttft_s)

    def observe_gap(self, gap_s: float) -> None:
        """A sequence got more tokens, so long after the last ones."""
        self._requests.gap(self._model, gap_s)

    def observe_end(self, done: Measured, started_s: float) -> None:
        """A sequence of a request that came at `started_s` (seconds of the clock) has ended."""
        self._requests.end(self._model, done, started_s)

    def render(self) -> bytes:
        """Return the exposition text, with control's own figures as they are now."""
        view = self._control.view()
        if view.ready is not None:
            self._count_worker(view)
            self._rounds.refresh(view.ready.model)
            self._state.refresh(view.ready.model, view)
            self._drafters.refresh(view.ready.model, view)
        return generate_latest(self.registry) + generate_latest(self._aliases)

    def _count_worker(self, view: StateView) -> None:
        if view.ready is not None and view.gauges is not None:
            self._state.count(view.ready.model, view.ready.pid, view.gauges)
            self._drafters.count(view.ready.model, view.ready.pid, view.gauges.drafters)

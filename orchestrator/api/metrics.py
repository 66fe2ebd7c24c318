"""Prometheus metrics: vLLM's names and meanings under the `outrider_` prefix. docs/metrics.md gives the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from device_profiles.units import MS_PER_S
from orchestrator.api.measured import Measured, Recent, Totalled
from orchestrator.api.memory_metrics import MemoryMetrics
from orchestrator.api.plan_series import PlanSeries
from orchestrator.api.series import Engine, PerWorker, Registered
from orchestrator.api.slo_series import Served, SloSeries
from orchestrator.api.trial_series import LATENCY_S, TOKEN_S, TrialSeries
from orchestrator.api.vllm_names import VllmNames
from orchestrator.clock import Clock
from orchestrator.cluster.draft_messages import DrafterState, RemoteState
from orchestrator.cluster.port import Gauges, Round
from orchestrator.control.port import Control, DraftView, ReplicaView, TrialView
from policies.slo import NO_OBJECTIVES, Objectives

WINDOW_S = 30.0
"""The time that `acceptance_rate` and `tokens_per_second` look back."""

_ROUND_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_TOKENS = tuple(float(2**power) for power in range(18))


class _Rounds:
    """What rounds of the decode loop add up to."""

    def __init__(self, make: Registered, clock: Clock) -> None:
        self._clock = clock
        self._recent: dict[tuple[str, str], Recent] = {}
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
        self._round = make.histogram("round_seconds", "Time of a round.", TOKEN_S)
        self._draft_ms = make.histogram("draft_latency_ms", "Drafting in a round that had a draft.", _ROUND_MS)
        self._verify_ms = make.histogram("verifier_latency_ms", "The target's forward in a round.", _ROUND_MS)
        self._rate = make.gauge("acceptance_rate", f"Accepted by drafted tokens, last {WINDOW_S:g} s.")
        self._speed = make.gauge("tokens_per_second", f"Tokens generated a second, last {WINDOW_S:g} s.")

    def observe(self, of: Engine, done: Round) -> None:
        generated = sum(len(delta.tokens) for delta in done.deltas)
        # A request's first delta is the one that makes all that was ever generated; a resumed one has more behind it.
        prompts = sum(
            delta.stats.prompt_tokens
            for delta in done.deltas
            if delta.stats is not None and delta.tokens and delta.stats.generated == len(delta.tokens)
        )
        self._drafts.labels(*of).inc(done.drafts)
        self._drafted.labels(*of).inc(done.drafted)
        self._accepted.labels(*of).inc(done.accepted)
        for position, count in enumerate(done.accepted_per_position):
            self._positions.labels(*of, str(position)).inc(count)
        for rule, (drafted, accepted) in done.by_rule.items():
            self._rule_drafted.labels(*of, rule).inc(drafted)
            self._rule_accepted.labels(*of, rule).inc(accepted)
        self._prompt.labels(*of).inc(prompts)
        self._generated.labels(*of).inc(generated)
        self._iteration.labels(*of).observe(generated + prompts)
        self._round.labels(*of).observe(done.round_ms / 1000.0)
        self._verify_ms.labels(*of).observe(done.device_ms)
        if done.drafts:
            self._draft_ms.labels(*of).observe(done.draft_ms)
        self._recent.setdefault(of, Recent(WINDOW_S)).add(
            self._clock.monotonic_s(), done.drafted, done.accepted, generated
        )

    def refresh(self, engines: Sequence[Engine]) -> None:
        now_s = self._clock.monotonic_s()
        self._rate.clear()  # where nothing was drafted there is no rate, and the last one would be a lie
        self._speed.clear()
        for of in engines:
            recent = self._recent.setdefault(of, Recent(WINDOW_S))
            self._speed.labels(*of).set(recent.rate(now_s, 2))
            if drafted := recent.sum(now_s, 0):
                self._rate.labels(*of).set(recent.sum(now_s, 1) / drafted)


class _Requests:
    """What requests that ended add up to."""

    def __init__(self, make: Registered) -> None:
        self._success = make.counter("request_success", "Requests by how they ended.", "finished_reason")
        self._ttft = make.histogram("time_to_first_token_seconds", "Time to the first token.", LATENCY_S)
        self._itl = make.histogram("inter_token_latency_seconds", "Gap between two deltas.", TOKEN_S)
        self._tpot = make.histogram("request_time_per_output_token_seconds", "TPOT of a request.", TOKEN_S)
        self._e2e = make.histogram("e2e_request_latency_seconds", "Latency of a request.", LATENCY_S)
        self._queue = make.histogram("request_queue_time_seconds", "Time in the queue.", LATENCY_S)
        self._prefill = make.histogram("request_prefill_time_seconds", "Time in prefill.", LATENCY_S)
        self._decode = make.histogram("request_decode_time_seconds", "Time in decode.", LATENCY_S)
        self._prompt = make.histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = make.histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._asked = make.histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)

    def first_token(self, of: Engine, ttft_s: float) -> None:
        self._ttft.labels(*of).observe(ttft_s)

    def gap(self, of: Engine, gap_s: float) -> None:
        self._itl.labels(*of).observe(gap_s)

    def end(self, of: Engine, done: Measured, started_s: float) -> None:
        self._success.labels(*of, done.finish).inc()
        self._prompt.labels(*of).observe(done.prompt_tokens)
        self._generated.labels(*of).observe(done.tokens)
        self._asked.labels(*of).observe(done.max_tokens)
        if not done.tokens:
            return
        self._e2e.labels(*of).observe(done.last_s - started_s)
        self._decode.labels(*of).observe(done.last_s - done.first_s)
        if done.first is not None:
            self._queue.labels(*of).observe(done.first.queue_ms / 1000.0)
            self._prefill.labels(*of).observe(done.first.prefill_ms / 1000.0)
        if done.tpot_s is not None:
            self._tpot.labels(*of).observe(done.tpot_s)


class _State:
    """What workers say of themselves."""

    def __init__(self, make: Registered) -> None:
        self._running = make.gauge("num_requests_running", "Requests in the decode loop.")
        self._waiting = make.gauge("num_requests_waiting", "Requests that wait for a place.")
        self._kv_usage = make.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._preemptions = PerWorker(make.counter("num_preemptions", "Requests sent back to the queue."))
        self._queries = PerWorker(make.counter("prefix_cache_queries", "Tokens looked up in the prefix cache."))
        self._hits = PerWorker(make.counter("prefix_cache_hits", "Tokens found in the prefix cache."))
        self._low = make.gauge(
            "low_acceptance", "Classes of requests whose drafts are accepted too seldom.", "drafter", "cause"
        )
        self._delta = make.gauge("tolerance_delta", "Nats that tolerance allows, once it is known.", "sampling")
        self._restarts = make.counter("worker_restarts", "Restarts of the worker since the daemon started.")
        self._restarts_counted: dict[Engine, int] = {}

    def count(self, of: Engine, pid: int, gauges: Gauges) -> None:
        self._preemptions.update(pid, gauges.preemptions, *of)
        self._queries.update(pid, gauges.prefix_queries, *of)
        self._hits.update(pid, gauges.prefix_hits, *of)

    def refresh(self, replicas: Sequence[tuple[Engine, ReplicaView]]) -> None:
        for gauge in (self._delta, self._low, self._running, self._waiting, self._kv_usage):
            gauge.clear()  # a new worker knows of none, and a replica may be gone
        for of, replica in replicas:
            restarts = replica.totals.restarts
            self._restarts.labels(*of).inc(max(0, restarts - self._restarts_counted.get(of, 0)))
            self._restarts_counted[of] = restarts
            if replica.gauges is not None:
                used = replica.gauges.total_blocks - replica.gauges.free_blocks
                self._running.labels(*of).set(replica.gauges.running)
                self._waiting.labels(*of).set(replica.gauges.waiting)
                self._kv_usage.labels(*of).set(used / max(1, replica.gauges.total_blocks))
                for sampling, delta in replica.gauges.tolerance_deltas.items():
                    self._delta.labels(*of, sampling).set(delta)
                for warning in replica.gauges.low_acceptance:
                    self._low.labels(*of, warning.drafter, warning.cause.value).inc()


class _Drafters:
    """What the worker says of each drafter."""

    def __init__(self, make: Registered) -> None:
        self._up = make.gauge("drafter_up", "1 while a drafter works, 0 when it has failed.", "drafter")
        self._drafted = PerWorker(make.counter("drafter_draft_tokens", "Its tokens verified.", "drafter"))
        self._accepted = PerWorker(make.counter("drafter_accepted_tokens", "Its tokens accepted.", "drafter"))
        self._rounds = PerWorker(make.counter("drafter_rounds", "Rounds in which it drafted.", "drafter"))
        self._seconds = PerWorker(make.counter("drafter_seconds", "Time that its drafting took.", "drafter"))
        self.remotes = _Remotes(make)

    def count(self, of: Engine, pid: int, drafters: Sequence[DrafterState]) -> None:
        for drafter in drafters:
            self._up.labels(*of, drafter.name).set(drafter.state == "ok")
            self._drafted.update(pid, drafter.drafted, *of, drafter.name)
            self._accepted.update(pid, drafter.accepted, *of, drafter.name)
            self._rounds.update(pid, drafter.rounds, *of, drafter.name)
            self._seconds.update(pid, drafter.draft_ms / MS_PER_S, *of, drafter.name)
            if drafter.remote is not None:
                self.remotes.count(pid, drafter.remote, *of, drafter.name)


class _Remotes:
    """Drafters in workers of their own."""

    def __init__(self, make: Registered) -> None:
        self._asks = PerWorker(make.counter("drafter_asks", "Rounds that asked it for drafts.", "drafter"))
        self._late = PerWorker(make.counter("drafter_late_answers", "Answers after the round had gone on.", "drafter"))
        self._connections = PerWorker(make.counter("drafter_connections", "Times it was connected.", "drafter"))
        self._hits = PerWorker(
            make.counter("drafter_ahead_hits", "Drafts there before they were asked for.", "drafter")
        )
        self._misses = PerWorker(make.counter("drafter_ahead_misses", "Drafts that were not there yet.", "drafter"))
        self._restarts = make.counter("draft_worker_restarts", "Restarts of a draft worker.", "drafter")
        self._restarts_counted: dict[tuple[str, int], int] = {}

    def count(self, pid: int, remote: RemoteState, *labels: str) -> None:
        self._asks.update(pid, remote.asks, *labels)
        self._late.update(pid, remote.late, *labels)
        self._connections.update(pid, remote.connections, *labels)
        self._hits.update(pid, remote.ahead_hits, *labels)
        self._misses.update(pid, remote.ahead_misses, *labels)

    def refresh(self, model: str, draft: DraftView) -> None:
        """Draft workers are counted under the number that they have among those of one draft."""
        of = (draft.name, draft.number)
        counted = self._restarts_counted.get(of, 0)
        self._restarts.labels(model, str(draft.number), draft.name).inc(max(0, draft.restarts - counted))
        self._restarts_counted[of] = draft.restarts


class Metrics:
    """One registry a daemon. Until the first worker is ready nothing is counted: no series could be named.

    `vllm_names`: what vLLM has too is told a second time, under its names. `slo`: which requests met `objectives`.
    `trial_view`: how a canary does, where there is one.
    """

    def __init__(
        self,
        control: Control,
        clock: Clock,
        *,
        vllm_names: bool = False,
        objectives: Objectives = NO_OBJECTIVES,
        trial_view: Callable[[], TrialView] | None = None,
    ) -> None:
        make = Registered()
        self.registry = make.registry
        self._aliases = CollectorRegistry()
        if vllm_names:
            self._aliases.register(VllmNames(self.registry))
        self._control = control
        self._rounds = _Rounds(make, clock)
        self._requests = _Requests(make)
        self._state = _State(make)
        self._drafters = _Drafters(make)
        self._memory = MemoryMetrics(make.gauge)
        self._plan = PlanSeries(make)
        self.slo = SloSeries(make, objectives, clock)
        self._trial = TrialSeries(make)
        self._trial_view = trial_view

    def _of(self, engine: int) -> Engine:
        ready = self._control.view().ready
        return (ready.model if ready is not None else "", str(engine))

    def observe_round(self, done: Round) -> None:
        """Count a round of a worker."""
        view = self._control.view()
        if view.ready is None:
            return
        self._rounds.observe((view.ready.model, str(done.engine)), done)
        self._count_workers(view.ready.model, [one for one in view.replicas if one.engine == done.engine])

    def observe_first_token(self, ttft_s: float, engine: int = 0) -> None:
        """A sequence got its first token from this replica, so long after its request came."""
        self._requests.first_token(self._of(engine), ttft_s)

    def observe_gap(self, gap_s: float, engine: int = 0) -> None:
        """A sequence got more tokens from this replica, so long after the last ones."""
        self._requests.gap(self._of(engine), gap_s)

    def observe_end(self, done: Measured, started_s: float) -> None:
        """A sequence of a request that came at `started_s` (seconds of the clock) has ended; it counts for the replica
        that had it last."""
        self._requests.end(self._of(done.engine), done, started_s)

    def observe_request(self, served: Served, engine: int) -> None:
        """A request has ended, all its sequences with it; it counts for the replica that had the last of them."""
        self.slo.observe(self._of(engine), served)

    def observe_arm(self, arm: str, done: Totalled, engine: int = 0) -> None:
        """A request of this arm came to its end."""
        self._trial.served(self._of(engine), arm, done)

    def render(self) -> bytes:
        """Return the exposition text, with control's own figures as they are now."""
        view = self._control.view()
        if view.ready is not None:
            model = view.ready.model
            self._count_workers(model, view.replicas)
            replicas = [((model, str(replica.engine)), replica) for replica in view.replicas]
            self._rounds.refresh([of for of, _ in replicas])
            self._state.refresh(replicas)
            self.slo.refresh(replicas)
            for draft in view.drafts:
                self._drafters.remotes.refresh(model, draft)
            self._memory.refresh(model, view)
            if view.plan is not None:
                self._plan.refresh((model, "0"), view.plan)
            if self._trial_view is not None:
                self._trial.refresh((model, "0"), self._trial_view())
        return generate_latest(self.registry) + generate_latest(self._aliases)

    def _count_workers(self, model: str, replicas: Sequence[ReplicaView]) -> None:
        for replica in replicas:
            if replica.ready is not None and replica.gauges is not None:
                of = (model, str(replica.engine))
                self._state.count(of, replica.ready.pid, replica.gauges)
                self._drafters.count(of, replica.ready.pid, replica.gauges.drafters)

"""Prometheus metrics: vLLM's names and meanings under the `outrider_` prefix. docs/metrics.md gives the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from orchestrator.clock import Clock
from orchestrator.daemon.api.body_bounds import BodyBudget
from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.metrics.alert_series import AlertSeries
from orchestrator.daemon.api.metrics.api_series import (
    BatchSeries,
    IntakeSeries,
    JournalSeries,
    TraceSeries,
)
from orchestrator.daemon.api.metrics.canary_series import LATENCY_S, TOKEN_S, TrialSeries
from orchestrator.daemon.api.metrics.control_series import (
    DeviceSeries,
    DraftStoreSeries,
    HealthSeries,
    MemoryMetrics,
    PlanSeries,
    ResidencySeries,
    ScaleSeries,
)
from orchestrator.daemon.api.metrics.goodput_series import NO_PRICE, CostSeries, HourlyPrice, ServedRequest, SloSeries
from orchestrator.daemon.api.metrics.request_timing import PercentileSeries, RecentSpeed, RequestTotals, SequenceTiming
from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.api.metrics.vllm_names import VllmNames
from orchestrator.daemon.api.metrics.worker_series import TOKEN_COUNTS, DrafterSeries, RoundSeries, WorkerSeries
from orchestrator.daemon.control.port import Control, ReplicaView, StateView, TrialView
from orchestrator.protocol.rounds import RoundReport
from policies.serving.slo import NO_OBJECTIVES, Objectives

_GLANCE_S = 0.1  # between two looks at control's view for metrics. Not tuned.
# ADR 0091: a look takes a twentieth of the time at most, as a fleet's view takes milliseconds.
_GLANCE_SHARE = 20.0


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
        self._prompt = make.histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_COUNTS)
        self._generated = make.histogram("request_generation_tokens", "Tokens generated for a request.", TOKEN_COUNTS)
        self._asked = make.histogram("request_params_max_tokens", "max_tokens of a request.", TOKEN_COUNTS)

    def first_token(self, of: Engine, ttft_s: float) -> None:
        self._ttft.labels(*of).observe(ttft_s)

    def gap(self, of: Engine, gap_s: float) -> None:
        self._itl.labels(*of).observe(gap_s)

    def end(self, of: Engine, done: SequenceTiming, started_s: float) -> None:
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


class Metrics:
    """One registry for each model (metrics.page makes one text of all). Until its first worker is ready nothing is
    counted: no series could be named.

    `vllm_names`: what vLLM has too is told a second time, under its names. `slo`: which requests met `objectives`.
    `trial_view`: how a canary does, where there is one. `connections` and `bodies` are the API's, and
    `count_deadly` returns how many requests are refused for having ended the daemon. `price`: of this machine.
    `name`: of a model that was never loaded. `batches`, `journal` and `traces` are told of once their `source` is set.
    """

    def __init__(
        self,
        control: Control,
        clock: Clock,
        *,
        vllm_names: bool = False,
        objectives: Objectives = NO_OBJECTIVES,
        trial_view: Callable[[], TrialView] | None = None,
        connections: Connections | None = None,
        bodies: BodyBudget | None = None,
        count_deadly: Callable[[], int] = lambda: 0,
        price: HourlyPrice = NO_PRICE,
        name: Callable[[], str] = str,
    ) -> None:
        make = Registered()
        self.registry = make.registry
        self.aliases = CollectorRegistry()
        if vllm_names:
            self.aliases.register(VllmNames(self.registry))
        self._control = control
        self._clock = clock
        self._seen: StateView | None = None
        self._look_s = 0.0
        self._rounds = RoundSeries(make, clock)
        self._requests = _Requests(make)
        self._state = WorkerSeries(make)
        self._drafters = DrafterSeries(make)
        self._memory = MemoryMetrics(make.gauge)
        self._plan = PlanSeries(make)
        self._scaling = ScaleSeries(make)
        self._residency = ResidencySeries(make)
        self._name = name
        self._draft_store = DraftStoreSeries(make)
        self._health = HealthSeries(make)
        self.slo = SloSeries(make, objectives, clock)
        self._trial = TrialSeries(make)
        self._intake = IntakeSeries(make, connections, bodies)
        self._devices = DeviceSeries(make)
        self._trial_view = trial_view
        self.batches = BatchSeries(make)
        self.journal = JournalSeries(make)
        self.traces = TraceSeries(make)
        self._costs = CostSeries(make, price, clock)
        self._alerts = AlertSeries(make, count_deadly)
        self.speed = RecentSpeed(clock)
        self._percentiles = PercentileSeries(make, self.speed)

    def _of(self, engine: int) -> Engine:
        ready = self._glance().ready
        return (ready.model.name if ready is not None else "", str(engine))

    def _glance(self) -> StateView:
        """Return control's state as it was a moment ago. It is asked for with every token, and put together anew from
        all replicas: that may take a twentieth of the time."""
        now_s = self._clock.monotonic_s()
        if self._seen is None or self._seen.ready is None or now_s >= self._look_s:
            self._seen = self._control.view()
            took_s = self._clock.monotonic_s() - now_s
            self._look_s = now_s + max(_GLANCE_S, _GLANCE_SHARE * took_s)
            if self._seen.ready is not None:
                self._count_workers(self._seen.ready.model.name, self._seen.replicas)
        return self._seen

    def observe_round(self, done: RoundReport) -> None:
        """Count a round of a worker."""
        view = self._glance()
        if view.ready is None:
            return
        of = (view.ready.model.name, str(done.engine))
        self._rounds.observe(of, done)
        self._alerts.observe(of, done)
        tokens = sum(len(delta.tokens) for delta in done.deltas)
        self._costs.observe(tokens, view.plan)
        self.speed.observe_tokens(tokens)

    def observe_first_token(self, ttft_s: float, engine: int = 0) -> None:
        """A sequence got its first token from this replica, so long after its request came."""
        self._requests.first_token(self._of(engine), ttft_s)
        self.speed.observe_first_token(ttft_s)

    def observe_gap(self, gap_s: float, engine: int = 0) -> None:
        """A sequence got more tokens from this replica, so long after the last ones."""
        self._requests.gap(self._of(engine), gap_s)

    def observe_end(self, done: SequenceTiming, started_s: float) -> None:
        """A sequence of a request that came at `started_s` (seconds of the clock) has ended; it counts for the replica
        that had it last."""
        self._requests.end(self._of(done.engine), done, started_s)
        self.speed.observe_end(done.tpot_s)

    def observe_request(self, served: ServedRequest, engine: int) -> None:
        """A request has ended, all its sequences with it; it counts for the replica that had the last of them."""
        self.slo.observe(self._of(engine), served)

    def observe_variant(self, variant: str, done: RequestTotals, engine: int = 0) -> None:
        """A request of this variant came to its end."""
        self._trial.count_request(self._of(engine), variant, done)

    def render(self) -> bytes:
        """Return the exposition text, with control's own figures as they are now."""
        self.refresh()
        return generate_latest(self.registry) + generate_latest(self.aliases)

    def refresh(self) -> None:
        """Take control's own figures as they are now."""
        view = self._seen = self._control.view()
        if view.residency is not None and (name := self._name()):
            self._residency.count_loads((name, "0"), view.residency)
        if view.ready is not None:
            model = view.ready.model.name
            self._count_workers(model, view.replicas)
            replicas = [((model, str(replica.engine)), replica) for replica in view.replicas]
            self._rounds.refresh([of for of, _ in replicas])
            self._state.refresh(replicas)
            self._state.count_losses(model, view.losses)
            self._state.count_kv_moves(model, view.kv_moves)
            self.slo.refresh(replicas)
            self._drafters.remotes.refresh(model, view.drafts)
            self._memory.refresh(model, view)
            self._health.refresh(model, view)
            self._alerts.refresh(model, view)
            self._devices.refresh(model, view.devices)
            first = (model, "0")
            self._costs.refresh(first, view.plan)
            for series in (self._intake, self.batches, self.journal, self.traces, self._percentiles):
                series.refresh(first)
            if view.plan is not None:
                self._plan.refresh(first, view.plan)
            if view.scaling is not None:
                self._scaling.refresh(first, view.scaling)
            if view.draft_store is not None:
                self._draft_store.refresh(first, view.draft_store)
            if view.recent_outputs is not None:
                self._draft_store.refresh_recent(first, view.recent_outputs)
            if self._trial_view is not None:
                self._trial.refresh(first, self._trial_view())

    def view_costs(self) -> dict[str, Any] | None:
        """Return what the devices in use cost, for people; None where that is not known."""
        return self._costs.view(self._control.view().plan)

    def _count_workers(self, model: str, replicas: Sequence[ReplicaView]) -> None:
        for replica in replicas:
            if replica.ready is not None and replica.gauges is not None:
                of = (model, str(replica.engine))
                self._state.count(of, replica.ready.pid, replica.gauges)
                self._drafters.count(of, replica.ready.pid, replica.gauges.drafters)

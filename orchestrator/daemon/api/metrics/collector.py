"""Prometheus metrics: vLLM's names and meanings under the `outrider_` prefix. docs/metrics.md gives the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest

from orchestrator.clock import Clock
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.api.body_bounds import BodyBudget
from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.metrics import tables
from orchestrator.daemon.api.metrics.alert_series import AlertSeries
from orchestrator.daemon.api.metrics.goodput_series import NO_PRICE, CostSeries, HourlyPrice, ServedRequest, SloSeries
from orchestrator.daemon.api.metrics.request_timing import WINDOW_S, Recent, RecentSpeed, RequestTotals, SequenceTiming
from orchestrator.daemon.api.metrics.series import Engine, Figures, Labels, Registered, Source, Table
from orchestrator.daemon.api.metrics.vllm_names import VllmNames
from orchestrator.daemon.control.port import Control, ReplicaView, StateView, TrialView
from orchestrator.daemon.journal.standing import JournalView
from orchestrator.daemon.tracing.port import ExportCounts
from orchestrator.protocol.draft_messages import RemoteState
from orchestrator.protocol.rounds import Gauges, RoundReport
from policies.serving.failover.blame import LossKind
from policies.serving.slo import NO_OBJECTIVES, Objectives

_GLANCE_S = 0.1  # between two looks at control's view for metrics. Not tuned.
# ADR 0091: a look takes a twentieth of the time at most, as a fleet's view takes milliseconds.
_GLANCE_SHARE = 20.0


class Metrics:
    """One registry for each model (metrics.page makes one text of all). Until its first worker is ready nothing is
    counted: no series could be named.

    `vllm_names`: what vLLM has too is told a second time, under its names. `slo`: which requests met `objectives`.
    `trial_view`: how a canary does, where there is one. `connections` and `bodies` are the API's, and
    `count_deadly` returns how many requests are refused for having ended the daemon. `price`: of this machine.
    `name`: of a model that was never loaded. `batches`, `journal` and `traces` are told of once they are set.
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

        def table(figures: Figures[Source], *labels: str) -> Table[Source]:
            return Table(make, figures, *labels)

        self._rounds = table(tables.ROUND)
        self._recent: dict[Labels, Recent] = {}
        self._recent_rates = table(tables.RECENT)
        self._first_tokens = table(tables.FIRST_TOKEN)
        self._gaps = table(tables.GAP)
        self._sequences = table(tables.SEQUENCE)
        self._workers = table(tables.WORKER)
        self._worker_counts = table(tables.WORKER_COUNTS)
        self._restarts = table(tables.RESTARTS)
        self._losses = table(tables.LOSSES)
        self._kv_moves = table(tables.KV_MOVES)
        self._changed_groups = table(tables.CHANGED_GROUPS)
        self._drafters = table(tables.DRAFTER, "drafter")
        self._remote_drafters = table(tables.REMOTE_DRAFTER, "drafter")
        self._draft_workers = table(tables.DRAFT_WORKER, "drafter")
        self._draft_restarts = table(tables.DRAFT_RESTARTS, "drafter")
        self._memory = table(tables.MEMORY, "worker", "device")
        self._plan = table(tables.PLAN)
        self._scaling = table(tables.SCALE)
        self._residency = table(tables.RESIDENCY)
        self._name = name
        self._draft_store = table(tables.DRAFT_STORE)
        self._recent_outputs = table(tables.RECENT_OUTPUTS)
        self._health = table(tables.HEALTH)
        self.slo = SloSeries(make, objectives, clock)
        self._variants = table(tables.VARIANT, "arm")
        self._trial = table(tables.TRIALS)
        self._connections = table(tables.CONNECTIONS), connections
        self._bodies = table(tables.BODIES), bodies
        self._devices = table(tables.DEVICE, "device")
        self._trial_view = trial_view
        self.batches: tables.BatchCounts | None = None
        self._batches = table(tables.BATCHES)
        self.journal: Callable[[], JournalView] | None = None
        self._journal = table(tables.JOURNAL)
        self.traces: Callable[[], ExportCounts] | None = None
        self._traces = table(tables.TRACES)
        self._costs = CostSeries(make, price, clock)
        self._alerts = AlertSeries(make, count_deadly)
        self.speed = RecentSpeed(clock)
        self._percentiles = table(tables.PERCENTILES)

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
        view = self._glance()
        if view.ready is None:
            return
        of = (view.ready.model.name, str(done.engine))
        self._rounds.add(of, done)
        self._alerts.observe(of, done)
        tokens = tables.count_generated(done)
        now_s = self._clock.monotonic_s()
        self._recent.setdefault(of, Recent(WINDOW_S)).add(now_s, done.drafted, done.accepted, tokens)
        self._costs.observe(tokens, view.plan)
        self.speed.observe_tokens(tokens)

    def observe_first_token(self, ttft_s: float, engine: int = 0) -> None:
        self._first_tokens.add(self._of(engine), ttft_s)
        self.speed.observe_first_token(ttft_s)

    def observe_gap(self, gap_s: float, engine: int = 0) -> None:
        self._gaps.add(self._of(engine), gap_s)

    def observe_end(self, done: SequenceTiming, started_s: float) -> None:
        """A sequence of a request that came at `started_s` has ended; it counts for the replica that had it last."""
        self._sequences.add(self._of(done.engine), (done, started_s))
        self.speed.observe_end(done.tpot_s)

    def observe_request(self, served: ServedRequest, engine: int) -> None:
        """A request has ended, all its sequences with it; it counts for the replica that had the last of them."""
        self.slo.observe(self._of(engine), served)

    def observe_variant(self, variant: str, done: RequestTotals, engine: int = 0) -> None:
        self._variants.add((*self._of(engine), variant), done)

    def render(self) -> bytes:
        self.refresh()
        return generate_latest(self.registry) + generate_latest(self.aliases)

    def refresh(self) -> None:
        view = self._seen = self._control.view()
        if view.residency is not None and (name := self._name()):
            self._residency.show({(name, "0"): view.residency})
        if view.ready is not None:
            model = view.ready.model.name
            self._count_workers(model, view.replicas)
            self._show_workers(model, view)
            self._show_daemon((model, "0"), view)

    def _show_workers(self, model: str, view: StateView) -> None:
        replicas = [((model, str(replica.engine)), replica) for replica in view.replicas]
        now_s = self._clock.monotonic_s()
        self._recent_rates.show({of: (self._recent.setdefault(of, Recent(WINDOW_S)), now_s) for of, _ in replicas})
        self._workers.show({of: replica.gauges for of, replica in replicas if replica.gauges is not None})
        self._restarts.show({of: replica.totals.restarts for of, replica in replicas})
        self._changed_groups.show({of: view.changed_groups.get(replica.engine, 0) for of, replica in replicas})
        # A counter that begins above 0 has not grown.
        losses: dict[Labels, dict[str, int]] = {(model, "0"): dict.fromkeys(get_args(LossKind), 0)}
        for (engine, kind), count in view.losses.items():
            losses.setdefault((model, str(engine)), {})[kind] = count
        self._losses.show(losses)
        self._kv_moves.show({(model, str(engine)): moves for engine, moves in view.kv_moves.items()})
        self.slo.refresh(replicas)
        drafts = {(model, str(draft.number), draft.name): draft for draft in view.drafts}
        self._draft_workers.show({of: draft.load for of, draft in drafts.items() if draft.load is not None})
        self._draft_restarts.show({of: draft.restarts for of, draft in drafts.items()})
        self._memory.show(dict(_list_memory(model, view)))

    def _show_daemon(self, of: Engine, view: StateView) -> None:
        self._health.show({of: view})
        self._alerts.refresh(of[0], view)
        self._devices.show({(*of, device.name.removeprefix(f"{THIS_NODE}/")): device.load for device in view.devices})
        self._costs.refresh(of, view.plan)
        self._percentiles.show({of: self.speed.compute_percentiles_s()})
        _show(of, *self._connections)
        _show(of, *self._bodies)
        _show(of, self._batches, self.batches)
        _show(of, self._journal, self.journal and self.journal())
        _show(of, self._traces, self.traces and self.traces())
        _show(of, self._plan, view.plan)
        _show(of, self._scaling, view.scaling)
        _show(of, self._draft_store, view.draft_store)
        _show(of, self._recent_outputs, view.recent_outputs)
        _show(of, self._trial, self._trial_view and self._trial_view())

    def view_costs(self) -> dict[str, Any] | None:
        return self._costs.view(self._control.view().plan)

    def _count_workers(self, model: str, replicas: Sequence[ReplicaView]) -> None:
        pids: dict[Labels, int] = {}
        gauges: dict[Labels, Gauges] = {}
        for replica in replicas:
            if replica.ready is not None and replica.gauges is not None:
                pids[model, str(replica.engine)] = replica.ready.pid
                gauges[model, str(replica.engine)] = replica.gauges
        drafters = {(*of, drafter.name): drafter for of, now in gauges.items() for drafter in now.drafters}
        remotes = {labels: drafter.remote for labels, drafter in drafters.items() if drafter.remote is not None}
        self._worker_counts.show(gauges, pids)
        self._drafters.show(drafters, pids, keep=True)
        self._remote_drafters.show(remotes, pids, keep=True)


def _show(of: Engine, table: Table[Source], source: Source | None) -> None:
    if source is not None:
        table.show({of: source})


def _list_memory(model: str, view: StateView) -> Iterable[tuple[Labels, tuple[int, int]]]:
    """Yield what each worker was announced to hold, and the most that it held, in bytes; 0: not known."""
    drafters: dict[tuple[str, str], RemoteState | None] = {}
    for replica in view.replicas:
        gauges = replica.gauges
        if replica.ready is not None:
            device = replica.ready.device
            peak = gauges.peak_rss_bytes if gauges is not None else 0
            yield (model, str(replica.engine), "target", device.name), (device.planned_memory_bytes, peak)
        drafters |= {(replica.name, state.name): state.remote for state in (gauges.drafters if gauges else [])}
    for draft in view.drafts:
        if draft.ready is not None:
            state = draft.ready.drafter
            remotes = [drafters.get((target, draft.name)) for target in draft.targets]
            peak = max((remote.peak_rss_bytes for remote in remotes if remote is not None), default=0)
            yield (model, str(draft.number), draft.name, state.device), (state.planned_memory_bytes, peak)

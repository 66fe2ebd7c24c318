"""The state that control's users see (control.port.StateView), put together from control's own. It changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from orchestrator.daemon.control import port
from orchestrator.daemon.control.operator_desk import OperatorDesk
from orchestrator.daemon.control.replicas.replicas import Replica, unlike_all
from orchestrator.daemon.control.replicas.shortfall import judge_cluster, judge_workers
from orchestrator.daemon.control.state import DRAINING, FAILED, READY, STARTING, add_totals, whole
from orchestrator.daemon.control.step import State
from orchestrator.daemon.control.streams.admission import describe_held
from orchestrator.daemon.control.streams.overrides import bounds_of
from orchestrator.protocol.contract import Cluster
from orchestrator.protocol.ready import Ready
from policies.serving.canary import CanaryVariant

# ADR 0091: a view of a fleet takes milliseconds, and metrics asked with every round.
_VIEWED_S = 1.0


class StateViews:
    """Of one control, which began at `started_s`. `plan_view` says what a plan predicts, where there is one, and what
    of it runs with these replicas. `expect_load_s` says how long the worker of a replica, by its number, takes to load
    (0: it does not). `list_unmet` returns what was configured and is not planned. `scale_view` says how many replicas
    are wanted, where load decides, `draft_store_view` how the draft store does, `recent_outputs_view` what users were
    answered of late. `explain_unserved` says why requests cannot be served yet though a worker says that it is ready;
    "" where they can. `count_unread`: requests that wait for the model's first load, before control has them.
    `preparing`: what goes on before there is anything to start, or why nothing ever serves (`given_up`)."""

    def __init__(self, state: State, cluster: Cluster, desk: OperatorDesk, started_s: float) -> None:
        self.plan_view: Callable[[Sequence[port.ReplicaView]], port.PlanView] | None = None
        self.expect_load_s: Callable[[int], float] = lambda _engine: 0.0
        self.list_unmet: Callable[[], Sequence[port.UnmetWish]] = tuple
        self.scale_view: Callable[[], port.ScaleView] | None = None
        self.draft_store_view: Callable[[], port.DraftStoreView] | None = None
        self.recent_outputs_view: Callable[[], port.RecentOutputsView] | None = None
        self.explain_unserved: Callable[[Ready], str] = lambda _ready: ""
        self.count_unread: Callable[[], int] = lambda: 0
        self.preparing = "the workers are being planned"
        self.given_up = False
        self.least_depth = 0
        self._state = state
        self._cluster = cluster
        self._desk = desk
        self._started_s = started_s
        self._seen: tuple[tuple[int, bool, bool], float, port.StateView] | None = None

    def show(self, now_s: float) -> port.StateView:
        """Return the state. Of very many replicas it is put together once a second, and when one comes or goes."""
        state = self._state
        if state.fleet.candidates is None:
            return self.build_view(now_s)
        state.fleet.refresh()
        key = (state.fleet.turns, state.draining, self.given_up)
        if self._seen is None or self._seen[0] != key or not self._seen[1] <= now_s < self._seen[1] + _VIEWED_S:
            self._seen = (key, now_s, self.build_view(now_s))
        return self._seen[2]

    def build_view(self, now_s: float) -> port.StateView:
        state = self._state
        serving, uptime_s = state.replicas.serving, now_s - self._started_s
        if not serving or self.given_up:
            phase = DRAINING if state.draining else FAILED if self.given_up else STARTING
            return port.StateView(
                *(phase, self.preparing, "", self._cluster.runtime, None, None),
                uptime_s=uptime_s,
                devices=state.loads.view(now_s),
                health=tuple(judge_cluster(self._cluster.away, self._cluster.members)),
                cluster_away=self._cluster.away,
                cluster_members=self._cluster.members,
                residency=state.residency.view_residency(self.count_unread()),
            )
        replicas = [self._view_replica(replica, now_s) for replica in serving]
        held, gauges = state.streams.held, replicas[0].gauges
        if held and gauges is not None:  # they wait, and no worker knows of them
            waiting = msgspec.structs.replace(gauges, waiting=gauges.waiting + held)
            replicas[0] = replace(replicas[0], gauges=waiting)
        runtime, streams = self._cluster.runtime, len(state.streams)
        together = whole(replicas, runtime, streams=streams, uptime_s=uptime_s, draining=state.draining)
        view = self._tell_whether_it_serves(together)
        bounds = canary_bounds = None
        if view.ready is not None:
            bounds = bounds_of(view.ready, self.least_depth)
            canary_bounds = bounds_of(view.ready, self.least_depth, CanaryVariant.CANARY.value)
        idle = [self._view_replica(replica, now_s) for replica in state.standbys.list_idle()]
        drafts = state.drafts.views()
        out = judge_workers([*replicas, *idle], drafts, state.standbys.list_refused())
        out += judge_cluster(self._cluster.away, self._cluster.members)
        shown = replace(
            view,
            totals=add_totals([state.replicas.gone, view.totals]),
            plan=self.plan_view(view.replicas) if self.plan_view is not None else None,
            bounds=bounds,
            canary_bounds=canary_bounds,
            drafts=drafts,
            overrides=self._desk.overrides,
            losses=dict(state.losses),
            kv_moves=dict(state.router.moves.totals),
            health=(*state.health.views(now_s), *out),
            standbys=tuple(idle),
            taken_over=dict(state.standbys.taken),
            changed_groups=dict(state.changed_groups),
            devices=state.loads.view(now_s),
            scaling=self.scale_view() if self.scale_view is not None else None,
            draft_store=self.draft_store_view() if self.draft_store_view is not None else None,
            recent_outputs=self.recent_outputs_view() if self.recent_outputs_view is not None else None,
            quarantined=len(state.blame.list_quarantined(now_s)),
            cluster_away=self._cluster.away,
            cluster_members=self._cluster.members,
            unmet=tuple(self.list_unmet()),
            residency=state.residency.view_residency(self.count_unread()),
        )
        kept = describe_held(shown) if shown.phase == READY else ""
        return replace(shown, detail=kept) if kept else shown

    def _tell_whether_it_serves(self, view: port.StateView) -> port.StateView:
        """Return the view with the phase that requests meet: ready where they are served, and at no other time."""
        coming = self._state.rollout.list_coming() if view.phase == FAILED else []
        if coming:
            started = f"{', '.join(coming)} starts in place of what has failed: {view.detail}"
            return replace(view, phase=STARTING, detail=started)
        why = self.explain_unserved(view.ready) if view.phase == READY and view.ready is not None else ""
        return replace(view, phase=STARTING, detail=why) if why else view

    def _view_replica(self, replica: Replica, now_s: float) -> port.ReplicaView:
        live = self._state.streams.counts[replica.name]
        silent_s = now_s - max(replica.life.heard_s, replica.busy_s)
        ready = replica.state.ready
        view = replica.state.view(replica.engine, live, silent_s, now_s, self.expect_load_s(replica.engine))
        if replica.standby:
            view.standby = True
            view.unlike = unlike_all(ready, self._state.replicas.primary) if ready is not None else ""
        if self._state.health.holds:
            judged = self._state.health.judge(replica.parts, now_s, replica.name)
            view.held = judged.why if judged.held else ""
        view.draft, view.route = replica.draft, replica.taken_by
        view.device = replica.device if replica.spec.device else ""
        return view

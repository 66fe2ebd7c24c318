"""One target of the daemon, from its plan to its end: its control, its tokenizer, its running plan, its canary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.contract import AdapterError
from adapters.tokenizer import Tokenizer
from orchestrator.api.acceptance import AcceptanceBounds
from orchestrator.api.metrics.cost_series import HourlyPrice
from orchestrator.api.served import ServedTarget, TargetTerms
from orchestrator.bootstrap.canary import build_trial
from orchestrator.bootstrap.failover import build_standbys, failover_rules
from orchestrator.bootstrap.fleet import FleetPlanning
from orchestrator.bootstrap.plan_board import PlanBoard
from orchestrator.bootstrap.planning import PlanMaking, StartPlan, build_start_specs, make_plan, profile_missing
from orchestrator.clock import Clock
from orchestrator.config.model import ClusterConfig
from orchestrator.control.admission import ControlLimits
from orchestrator.control.canary import CanaryTrial
from orchestrator.control.controller import TargetControl
from orchestrator.control.plan_keeper import DriftPolicy, PlanKeeper
from orchestrator.control.surroundings import RoutingRules
from orchestrator.errors import DaemonError
from orchestrator.loading.models import load_tokenizer
from orchestrator.loading.options import list_draft_pools, objectives_of
from orchestrator.planning.applied import list_unplaced_drafts
from orchestrator.planning.basis import plain
from orchestrator.planning.neighbours import TakenPlace
from orchestrator.telemetry import get_logger
from orchestrator.workers.messages import Progress, Ready
from orchestrator.workers.shared_cluster import SharedCluster
from policies.serving.routing import RoutingWeights

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DaemonGround:
    """What the targets of one daemon share. `path`: of cluster.yaml; `state`: the daemon's own directory. `say` hears
    of a target's name and what goes on before it serves."""

    path: Path
    state: Path
    cluster: SharedCluster
    board: PlanBoard
    clock: Clock
    say: Callable[[str, Progress], None]


class TargetLife:
    """One target. `config` is its own, as if there were no other (config.model.ClusterConfig.targets)."""

    def __init__(self, config: ClusterConfig, ground: DaemonGround) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.trial: CanaryTrial | None = None
        self.problem = ""
        """Why it will never serve; "" where it may."""
        self._ground = ground
        self._base = ground.path.resolve().parent
        self._keeper: PlanKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None
        # Only the first may go without a name, and its workers are called as ever.
        self._cluster = ground.cluster.share(f"{config.model.name}/" if config.number else "")
        self.control = self._build_control()
        known = (config, ground.path, self._cluster, self._prepares, self.control)
        self._fleet = FleetPlanning(*known, self._list_taken) if config.plans_hosts else None

    @property
    def name(self) -> str:
        """What requests call it; "" while that is not known."""
        if self.config.model.name:
            return self.config.model.name
        ready = self.control.view().ready
        return ready.model if ready is not None else ""

    def tell_name(self) -> str:
        """Return the name, for whoever asks again later."""
        return self.name

    def offer(self) -> ServedTarget:
        """Return it as the API takes it."""
        return ServedTarget(self.control, lambda: self.tokenizer, self.tell_name, self._list_terms(), self.trial)

    def describe_plan(self) -> dict[str, Any] | None:
        """Return the running plan as plain data; None where nothing is left to one."""
        return plain(self._keeper.proposal) if self._keeper is not None else None

    def describe_hosts(self) -> list[dict[str, Any]]:
        """Return the hosts that it is planned for, as plain data."""
        return self._fleet.fleet.describe() if self._fleet is not None else []

    async def prepare(self) -> None:
        """Say what is to be started, where no plan does, and open the canary's trial. Raises ConfigError, and what
        resolving the models raises."""
        if not self.config.planned:
            specs, drafts = await asyncio.to_thread(build_start_specs, self.config, self._base)
            self.control.set_specs(specs, [drafts] * len(specs), build_standbys(self.config, self._base))
        self.trial = build_trial(self.config, self._ground.path, self.control, self._ground.clock)

    async def profile(self) -> None:
        """Measure what has no profile and may be planned with on this machine. Raises OutriderError."""
        if self.config.planned and self._fleet is None:
            await profile_missing(self.config, self._base, self._prepares)

    async def plan(self) -> None:
        """Plan, where anything is left to a plan. Raises OutriderError, and what resolving the models raises."""
        if not self.config.planned:
            return
        found = await self._make_plan()
        replica = found.proposal.plan.replicas[0]
        _log.info(
            "planned",
            target=found.proposal.plan.target,
            device=replica.shards[0].device,
            runtime=replica.shards[0].runtime,
            depth=replica.depth,
            drafts=replica.draft.drafter if replica.draft else "none",
            predicted_tokens_per_s=round(replica.prediction.goodput_tokens_per_s, 1),
            others_rejected=len(found.proposal.plan.rejected),
        )
        if missing := list_unplaced_drafts(self.config, found.proposal):
            _log.warning("the canary drafts nothing: the plan leaves out what it would draft with", left_out=missing)
        self.control.set_specs(found.targets, found.drafts, found.standbys)
        self._keep_plan(found)

    def _keep_plan(self, found: StartPlan) -> None:
        placement = self.config.placement
        pauses = (placement.replan_pause_s, placement.load_lasts_s)
        patience = DriftPolicy(placement.drift_tolerance, placement.drift_after_s, *pauses)
        making = PlanMaking(self.config, self._base, self._list_taken)
        keeper = self._keeper = PlanKeeper(found, self.control, making, patience, self._ground.clock)
        self._ground.board.note(self.config.number, lambda: keeper.proposal.plan)
        self.control.plan_view = keeper.view
        self.control.on_round.append(keeper.observe)
        self.control.on_health.append(keeper.observe_health)
        self.control.on_loads.append(keeper.observe_loads)

    async def start(self) -> None:
        """Start the workers; from here on the plan follows hosts that come and go."""
        if self._fleet is not None and self._keeper is not None:
            self._keeping = asyncio.create_task(self._fleet.keep_plan(self._keeper), name="keep the plan for hosts")
        await self.control.start()

    async def _make_plan(self) -> StartPlan:
        if self._fleet is not None:
            return await self._fleet.make_plan()
        loads = self.control.list_loads()
        taken = await asyncio.to_thread(self._list_taken)
        return await asyncio.to_thread(make_plan, self.config, self._base, self._ground.state, loads, taken)

    def _list_taken(self) -> tuple[TakenPlace, ...]:
        return self._ground.board.list_taken(self.config.number)

    async def wait_ready(self) -> Ready:
        """Wait until it serves; returns what its worker says. Raises DaemonError where it never will."""
        view = await self.control.wait_settled()
        if view.ready is None:
            raise DaemonError(view.detail)
        try:
            self.tokenizer = load_tokenizer(view.ready.tokenizer_dir)
        except AdapterError as error:
            raise DaemonError(str(error)) from error
        return view.ready

    def give_up(self, reason: str) -> None:
        """It will never serve, for this reason."""
        self.problem = reason
        self.tokenizer = None
        self.control.give_up(reason)

    async def end_planning(self) -> None:
        """Plan no more."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._keeper is not None:
            await self._keeper.close()
        if self._fleet is not None:
            await self._fleet.close()

    def save_trial(self) -> None:
        """Keep what is known of the canary for the next daemon."""
        if self.trial is not None:
            self.trial.save()

    def _build_control(self) -> TargetControl:
        """Return control that waits for its workers to be named."""
        config = self.config
        limits = config.limits
        control = TargetControl(
            self._cluster,
            (),
            ControlLimits(
                limits.max_running,
                limits.max_waiting,
                config.cluster.max_restarts,
                limits.request_timeout_s,
                config.speculation.min_speculative_tokens,
                ttft=objectives_of(config.slo).ttft,
                refuse_late=config.slo.late == "refuse",
                quarantine_s=limits.quarantine_s,
                failover=failover_rules(config.failover),
                routing=self._routing_rules(),
            ),
            self._ground.clock,
            draft_pools=list_draft_pools(config),
        )
        control.on_progress.append(self._say)
        return control

    def _routing_rules(self) -> RoutingRules:
        routing = self.config.routing
        weights = RoutingWeights(**routing.weights.model_dump())
        return RoutingRules(weights, routing.hysteresis, self.config.placement.load_smoothing)

    def _list_terms(self) -> TargetTerms:
        config = self.config
        speculation = config.speculation
        elsewhere = config.cluster.on_ray and bool(config.cluster.address) and not config.planned
        price_per_hour = 0.0 if elsewhere else config.devices.price_per_hour  # on any node that is not what it costs
        return TargetTerms(
            AcceptanceBounds(speculation.acceptance, speculation.allow_tolerance),
            objectives_of(config.slo),
            config.limits.max_running,
            HourlyPrice(price_per_hour, config.placement.currency),
        )

    def _prepares(self, stage: str, fraction: float) -> None:
        """Something goes on before there are workers."""
        progress = Progress(stage, fraction)
        self.control.prepares(progress)
        self._say(progress)

    def _say(self, progress: Progress) -> None:
        self._ground.say(self.config.model.name, progress)

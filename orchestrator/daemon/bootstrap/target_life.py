"""One target of the daemon, from its plan to its end: its control, its tokenizer, its running plan, its canary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from adapters.contract import AdapterError
from adapters.tokenizer import Tokenizer
from orchestrator.clock import Clock
from orchestrator.config.drafts import IndexDraft, choose_answer_store
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.sources import FoundSources
from orchestrator.daemon.api.acceptance import AcceptanceBounds
from orchestrator.daemon.api.metrics.cost_series import HourlyPrice
from orchestrator.daemon.api.served import ServedTarget, TargetTerms
from orchestrator.daemon.bootstrap.canary import build_trial
from orchestrator.daemon.bootstrap.draft_store import build_draft_store
from orchestrator.daemon.bootstrap.failover import build_standbys, failover_rules
from orchestrator.daemon.bootstrap.fleet import FleetPlanning
from orchestrator.daemon.bootstrap.idle_profiles import IdleMeasuring
from orchestrator.daemon.bootstrap.model_sources import RenewedSources, bind_sources, renew_sources
from orchestrator.daemon.bootstrap.plan_board import PlanBoard
from orchestrator.daemon.bootstrap.planning import PlanMaking, StartPlan, make_plan
from orchestrator.daemon.bootstrap.scaling import build_scaler, waits_for_hosts
from orchestrator.daemon.bootstrap.start_profiles import StartWatch, profile_missing
from orchestrator.daemon.bootstrap.start_specs import build_start_specs
from orchestrator.daemon.bootstrap.target_change import (
    How,
    PlanChange,
    TargetChange,
    WorkerSet,
    choose_how,
    describe_change,
    describe_plan_change,
    explain_models_wait,
    may_mix,
)
from orchestrator.daemon.bootstrap.tokenizers import TargetTokenizers
from orchestrator.daemon.cluster.shared_cluster import SharedCluster
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.loops.plan_keeper import DriftPolicy, PlanKeeper, Planned
from orchestrator.daemon.control.replicas.scaler import end_scaling
from orchestrator.daemon.control.rollout.canary import CanaryTrial
from orchestrator.daemon.control.rollout.retune import match_retunable
from orchestrator.daemon.control.routing.surroundings import RoutingRules
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.daemon.draft_store.control import RecallingControl
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import DaemonError, OutriderError, WorkerError
from orchestrator.planning.applied import list_unplaced_drafts
from orchestrator.planning.basis import plain
from orchestrator.planning.neighbours import TakenPlace
from orchestrator.planning.worker_options import list_draft_pools, objectives_of
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Progress
from orchestrator.protocol.load_options import ModelOptions
from orchestrator.protocol.ready import Ready
from orchestrator.telemetry import get_logger
from policies.serving.routing import RoutingWeights

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DaemonGround:
    """What the targets of one daemon share. `path`: of cluster.yaml; `state`: the daemon's own directory. `say` hears
    of a target's name and what goes on before it serves. `sandbox` runs their chat templates."""

    path: Path
    state: Path
    cluster: SharedCluster
    board: PlanBoard
    clock: Clock
    sandbox: Sandbox
    say: Callable[[str, Progress], None]


class TargetLife:
    """One target. `config` is its own, as if there were no other (config.model.ClusterConfig.targets). `plan`: by which
    its first worker was started already."""

    def __init__(self, config: ClusterConfig, ground: DaemonGround, plan: StartPlan | None = None) -> None:
        self.config = config
        self._early_plan = plan
        self.trial: CanaryTrial | None = None
        self.problem = ""
        """Why it will never serve; "" where it may."""
        self._ground = ground
        self._base = ground.path.resolve().parent
        self._tokenizers = TargetTokenizers(self._base, store_directory(config), ground.sandbox, self._say)
        self._keeper: PlanKeeper | None = None
        self._workers: WorkerSet | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._checking: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[bool] | None = None
        # Only the first may go without a name, and its workers are called as ever.
        self._cluster = ground.cluster.share(f"{config.model.name}/" if config.number else "")
        self.control = self._build_control()
        self.served = RecallingControl(self.control, ground.clock)
        """Control as requests meet it: with a draft store where there is one."""
        self.served.use(build_draft_store(config, self._base, ground.state, ground.clock))
        self._closing: set[asyncio.Task[None]] = set()
        known = (config, ground.path, self._cluster, self._prepares, self.control)
        self._fleet = FleetPlanning(*known, self._list_taken) if config.plans_hosts else None

    @property
    def name(self) -> str:
        """What requests call it; "" while that is not known."""
        if self.config.model.name:
            return self.config.model.name
        ready = self.control.view().ready
        return ready.model.name if ready is not None else ""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model that serves; None until one has."""
        return self._tokenizers.find(self.control.view().ready)

    def tell_name(self) -> str:
        """Return the name, for whoever asks again later."""
        return self.name

    def offer(self) -> ServedTarget:
        """Return it as the API takes it."""
        return ServedTarget(self.served, lambda: self.tokenizer, self.tell_name, self.list_terms(), self.trial)

    def describe_plan(self) -> dict[str, Any] | None:
        """Return the running plan as plain data; None where nothing is left to one."""
        return plain(self._keeper.proposal) if self._keeper is not None else None

    def describe_hosts(self) -> list[dict[str, Any]]:
        """Return the hosts that it is planned for, as plain data."""
        return self._fleet.fleet.describe() if self._fleet is not None else []

    async def prepare(self) -> None:
        """Say what is to be started, where no plan does, and open the canary's trial. Raises ConfigError, and what
        resolving the models raises."""
        self._take_sources(await asyncio.to_thread(bind_sources, self.config))
        if not self.config.planned and not waits_for_hosts(self.config):
            workers = self._workers = await asyncio.to_thread(self._build_workers, self.config)
            self.control.set_specs(workers.targets, workers.drafts, workers.standbys)
        self.trial = build_trial(self.config, self._ground.path, self.control, self._ground.clock)

    async def profile(self, budget_s: float) -> None:
        """Measure what has no profile and may be planned with on this machine, for so long at most. Raises
        OutriderError."""
        if self.config.planned and self._fleet is None:
            watch = StartWatch(self._prepares, self.control.awaited, self._ground.clock)
            await profile_missing(self.config, self._base, watch, budget_s)

    async def plan(self) -> None:
        """Plan, where anything is left to a plan. Raises OutriderError, and what resolving the models raises."""
        if not self.config.planned:
            return
        found = self._early_plan or await self._make_plan(self.config, at_once=True)
        replica = found.proposal.plan.replicas[0]
        _log.info(
            "planned",
            target=found.proposal.plan.target,
            device=", ".join(shard.device for shard in replica.shards),
            runtime=", ".join(dict.fromkeys(shard.runtime for shard in replica.shards)),
            depth=replica.depth,
            drafts=replica.draft.drafter if replica.draft else "none",
            predicted_tokens_per_s=round(replica.prediction.goodput_tokens_per_s, 1),
            basis=", ".join(dict.fromkeys(shard.source for shard in replica.shards)),
            others_rejected=len(found.proposal.plan.rejected),
        )
        if missing := list_unplaced_drafts(self.config, found.proposal):
            _log.warning("the canary drafts nothing: the plan leaves out what it would draft with", left_out=missing)
        self.control.set_specs(found.targets, found.drafts, found.standbys)
        self._follow_keeper(self._build_keeper(found, self.config))

    def _build_keeper(self, found: Planned, config: ClusterConfig) -> PlanKeeper:
        placement = config.placement
        pauses = (placement.replan_pause_s, placement.load_lasts_s)
        patience = DriftPolicy(placement.drift_tolerance, placement.drift_after_s, *pauses)
        return PlanKeeper(found, self.control, self._build_making(config), patience, self._ground.clock)

    def _build_making(self, config: ClusterConfig) -> PlanMaking:
        return PlanMaking(config, self._base, self._list_taken)

    def _follow_keeper(self, keeper: PlanKeeper) -> None:
        self._keeper = keeper
        self._ground.board.note(self.config.number, lambda: keeper.proposal.plan)
        self.control.plan_view = keeper.view
        self.control.on_round.append(keeper.observe)
        self.control.on_health.append(keeper.observe_health)
        self.control.on_loads.append(keeper.observe_loads)
        self.control.on_lacking.append(keeper.observe_lacking)
        self.control.on_refused.append(keeper.observe_refused)
        keeper.observe_health(self.control.list_unwell())  # it may have changed while nobody followed

    async def start(self) -> None:
        """Start the workers; from here on the plan follows hosts that come and go, and replicas follow load."""
        known = (self.config, self._base, self.control, self._cluster, self._keeper, self._ground.clock)
        scaler = await build_scaler(*known, self._ground.board.list_others(self.config.number))
        if self._fleet is not None and self._keeper is not None:
            self._keeping = asyncio.create_task(self._fleet.keep_plan(self._keeper), name="keep the plan for hosts")
        await self.control.start()
        self._follow_profiles(self.config)
        if scaler is not None:
            self._scaling = asyncio.create_task(scaler.run(), name="follow load")

    def _follow_profiles(self, config: ClusterConfig) -> None:
        """Measure what is left, while nobody asks; what was begun for another configuration ends."""
        if self._measuring is not None:
            self._measuring.cancel()
        if self._keeper is None or self._fleet is not None:
            return
        measuring = IdleMeasuring(config, self._base, self.control, self._keeper)
        self._measuring = asyncio.create_task(measuring.run(), name="measure while nobody asks")

    async def _make_plan(self, config: ClusterConfig, *, at_once: bool = False) -> StartPlan:
        if self._fleet is not None:
            return await self._fleet.make_plan()
        loads = self.control.list_loads()
        taken = await asyncio.to_thread(self._list_taken)
        making = partial(make_plan, config, self._base, self._ground.state, loads, taken, at_once=at_once)
        return await asyncio.to_thread(making)

    def _list_taken(self) -> tuple[TakenPlace, ...]:
        return self._ground.board.list_taken(self.config.number)

    @property
    def is_planned(self) -> bool:
        """Whether a plan runs."""
        return self._keeper is not None

    def _take_sources(self, found: FoundSources) -> None:
        """Let models be these from now on."""
        self.config = self.config.with_sources(found)
        if self._fleet is not None:
            self._fleet.take_sources(found)

    async def is_model_replaced(self, config: ClusterConfig) -> bool:
        """Return whether a model that another configuration has, too, is another one by now, or is to be loaded again.
        Raises AdapterError."""
        failed = self.control.list_replaced()
        return bool(failed or (await self._renew_sources(config)).replaced)

    async def _renew_sources(self, config: ClusterConfig) -> RenewedSources:
        known = (self.config.sources, self.control.list_identities())
        return await asyncio.to_thread(renew_sources, config, self._base, *known)

    async def prepare_change(self, config: ClusterConfig) -> TargetChange:
        """Return what another configuration takes of the workers, and what the models that are at their places now do.
        Raises OutriderError, and what resolving the models raises."""
        renewed = await self._renew_sources(config)
        waits = explain_models_wait(self.config, planned=self.is_planned)
        if waits:
            change = await self._prepare_change(config.with_sources(self.config.sources))
            told = [f"{one}; this waits for a restart of the daemon: {waits}" for one in renewed.replaced]
            return replace(change, told=(*told, *change.told))
        change = await self._prepare_change(config.with_sources(renewed.found))
        return replace(change, told=(*renewed.replaced, *change.told), replaced=renewed.replaced)

    async def _prepare_change(self, config: ClusterConfig) -> TargetChange:
        running, before, keeper = self.control.list_specs(), self._list_workers(), self._keeper
        if before is None:
            raise DaemonError(f"{self.name}: its workers are not known yet; reload again when it serves")
        for engine in self.control.list_replaced():  # no worker is there that could go on
            running.pop(engine, None)
        if keeper is None:
            after = await asyncio.to_thread(self._build_workers, config)
            how = choose_how(running, before, after)
            return TargetChange(config, after, how, None, tuple(describe_change(how, running, after)))
        first = await self._make_plan(config)
        plan = await keeper.adjust(first, self._build_making(config))
        after, told = self._as_workers(plan, config), describe_plan_change(keeper.proposal.plan, plan.proposal.plan)
        how = choose_how(running, before, after)
        change = PlanChange(first.proposal, plan)
        return TargetChange(config, after, how, change, (*describe_change(how, running, after), *told))

    def _list_workers(self) -> WorkerSet | None:
        """Return the workers as they are to be; None where that is not known yet."""
        return self._workers if self._keeper is None else self._as_workers(self._keeper.running, self.config)

    async def take_change(self, change: TargetChange) -> None:
        """Let another configuration take effect for the workers; returns when it has. Raises WorkerError where it
        cannot; all is as before then."""
        if change.workers is None:
            return
        if change.how == "roll":
            await self._prepare_tokenizer(change.workers)
        await self._take_workers(change, change.workers)
        ready = self.control.view().ready
        if ready is not None and self._tokenizers.find(ready) is None:  # its host had another model at the place
            try:
                await self._load_served(ready)
            except DaemonError as error:
                _log.error("requests cannot be served", target=self.name, why=str(error))

    async def _take_workers(self, change: TargetChange, workers: WorkerSet) -> None:
        keeper = self._keeper
        if keeper is None or change.plan is None:
            await self._move(workers, change.how)
            self._workers = workers
            self._take_sources(change.config.sources)
            return
        self._forget_keeper(keeper)  # it would plan against the move
        try:
            await keeper.close()
            engines = await self._move(workers, change.how)
        except (WorkerError, asyncio.CancelledError):
            self._follow_keeper(keeper)
            raise
        after = self._build_keeper(change.plan.found, change.config)
        after.succeed(keeper, change.plan.first)
        after.set_places(engines)
        self._follow_keeper(after)
        self._take_sources(change.config.sources)
        self._follow_profiles(change.config)

    async def _prepare_tokenizer(self, workers: WorkerSet) -> None:
        """Load the tokenizer of a model before its first worker serves: requests are translated by it from then on.
        Those of models that no worker has any more are forgotten. Raises AdapterError."""
        options = msgspec.convert(workers.targets[0].options["model"], ModelOptions)
        identity = options.identity or self.control.list_identities().get(options.source)
        tokenizer = await self._tokenizers.load(options.source, identity)
        self._tokenizers.keep(self.control.list_ready(), tokenizer)
        self._try_template(tokenizer)

    async def _move(self, workers: WorkerSet, how: How) -> list[int]:
        """Let these be the workers; returns the numbers of the replicas, in their order. Raises WorkerError."""
        before, old = self.control.list_specs(), self._list_workers()
        if how == "nothing" or old is None:
            return list(before)
        if how == "retune":
            wanted = match_retunable(before, workers.targets) or {}
            try:
                await self.control.retune(wanted, workers.drafts, workers.standbys, workers.pools)
            except WorkerError:
                await self.control.retune(before, old.drafts, old.standbys, old.pools)
                raise
            return [engine for spec in workers.targets for engine, one in wanted.items() if one is spec]
        beside = (workers.drafts, workers.standbys, workers.pools)
        if len(before) > 1 and may_mix(list(before.values()), workers.targets):
            await self._roll_in_turn(workers, old, list(before.values()))
        return await self.control.change(workers.targets, *beside)

    async def _roll_in_turn(self, workers: WorkerSet, old: WorkerSet, before: list[WorkerSpec]) -> None:
        """Replace all replicas but the last, one after the other. Raises WorkerError; all run as before then."""
        for done in range(1, len(before)):
            try:
                await self.control.change([*workers.targets[:done], *before[done:]], old.drafts)
            except WorkerError:
                if done > 1:
                    await self.control.change(before, old.drafts)
                raise

    def take_rules(self, config: ClusterConfig) -> None:
        """Let what the daemon itself reads take effect."""
        if choose_answer_store(config.drafts) != choose_answer_store(self.config.drafts):
            before = self.served.use(build_draft_store(config, self._base, self._ground.state, self._ground.clock))
            if before is not None:
                closing = asyncio.create_task(before.close(), name="close the draft store")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        self.config = config.with_sources(self.config.sources)
        self.control.set_limits(self._control_limits())
        self._ground.board.set_config(config.number, config)

    def _forget_keeper(self, keeper: PlanKeeper) -> None:
        self.control.on_round.remove(keeper.observe)
        self.control.on_health.remove(keeper.observe_health)
        self.control.on_loads.remove(keeper.observe_loads)
        self.control.on_lacking.remove(keeper.observe_lacking)
        self.control.on_refused.remove(keeper.observe_refused)

    def _build_workers(self, config: ClusterConfig) -> WorkerSet:
        specs, drafts = build_start_specs(config, self._base)
        standbys = build_standbys(config, self._base)
        return WorkerSet(tuple(specs), (tuple(drafts),) * len(specs), tuple(standbys), list_draft_pools(config))

    def _as_workers(self, found: Planned, config: ClusterConfig) -> WorkerSet:
        specs = (tuple(found.targets), tuple(tuple(one) for one in found.drafts), tuple(found.standbys))
        return WorkerSet(*specs, list_draft_pools(config))

    async def wait_ready(self) -> Ready:
        """Wait until it serves; returns what its worker says. Raises DaemonError where it never will."""
        view = await self.control.wait_settled()
        while view.ready is None and self._keeper is not None and await self._keeper.wait_planned():
            view = self.control.view()
        if view.ready is None:
            raise DaemonError(view.detail)
        await self._load_served(view.ready)
        return view.ready

    def _observe_worker(self, progress: Progress) -> None:
        """A worker gets on: it may have prepared the tokenizer by now, which is read while it loads."""
        if self._reading is None or _is_to_be_repeated(self._reading):
            reading = asyncio.to_thread(self._tokenizers.load_known, self._bound_source)
            self._reading = asyncio.create_task(reading, name="read the tokenizer")

    @property
    def _bound_source(self) -> str:
        source = self.config.model.source
        return self.config.sources.bound.get(source, source)

    async def _load_served(self, ready: Ready) -> None:
        """Load the tokenizer of the model that a worker has loaded. Raises DaemonError."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
        worker, node = self.control.view().worker, self._cluster.own_node
        self._try_template(await self._tokenizers.load_served(ready, worker, node))

    def _try_template(self, tokenizer: Tokenizer) -> None:
        """Try a chat template in the background, before anybody asks for it."""
        checking = asyncio.create_task(self._check_template(tokenizer), name="try the chat template")
        self._checking.add(checking)
        checking.add_done_callback(self._checking.discard)

    async def _check_template(self, tokenizer: Tokenizer) -> None:
        """Tell an operator what every chat would be told."""
        try:
            fault = await asyncio.to_thread(lambda: tokenizer.template_fault)
        except (OutriderError, AdapterError) as error:
            _log.warning("the chat template could not be tried", target=self.name, why=str(error))
            return
        if fault:
            _log.warning("the chat template is at fault: chats are refused", target=self.name, why=fault)

    def give_up(self, reason: str) -> None:
        """It will never serve, for this reason."""
        self.problem = reason
        self._tokenizers.forget()
        self.control.give_up(reason)

    async def end_planning(self) -> None:
        """Plan no more."""
        if self._scaling is not None:
            await end_scaling(self._scaling)
        for task in (self._keeping, self._measuring):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._keeper is not None:
            await self._keeper.close()
        if self._fleet is not None:
            await self._fleet.close()

    async def close(self) -> None:
        """End the workers, and the draft store behind them."""
        for task in (*self._checking, self._reading):
            if task is not None:
                task.cancel()
        await self.control.close()
        if (store := self.served.use(None)) is not None:
            await store.close()
        await asyncio.gather(*self._closing)

    def save_trial(self) -> None:
        """Keep what is known of the canary for the next daemon."""
        if self.trial is not None:
            self.trial.save()

    def _build_control(self) -> TargetControl:
        """Return control that waits for its workers to be named."""
        pools = list_draft_pools(self.config)
        control = TargetControl(self._cluster, (), self._control_limits(), self._ground.clock, draft_pools=pools)
        control.on_progress += [self._say, self._observe_worker]
        control.explain_unserved = self._tokenizers.explain_missing
        return control

    def _control_limits(self) -> ControlLimits:
        config, limits = self.config, self.config.limits
        return ControlLimits(
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
        )

    def _routing_rules(self) -> RoutingRules:
        routing = self.config.routing
        weights = RoutingWeights(**routing.weights.model_dump())
        return RoutingRules(weights, routing.hysteresis, self.config.placement.load_smoothing)

    def list_terms(self) -> TargetTerms:
        """Return what holds for its requests."""
        config = self.config
        speculation = config.speculation
        stores = tuple(draft.store for _, draft in config.all_drafts if isinstance(draft, IndexDraft))
        elsewhere = config.cluster.on_ray and bool(config.cluster.address) and not config.planned
        price_per_hour = 0.0 if elsewhere else config.devices.price_per_hour  # on any node that is not what it costs
        return TargetTerms(
            AcceptanceBounds(speculation.acceptance, speculation.allow_tolerance, stores),
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


def _is_to_be_repeated(reading: asyncio.Task[bool]) -> bool:
    """Whether the task has ended, and did not find what it looked for."""
    return reading.done() and not reading.cancelled() and reading.exception() is None and not reading.result()

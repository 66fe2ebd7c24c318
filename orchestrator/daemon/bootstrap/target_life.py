"""One target of the daemon, from its plan to its end: its control, its tokenizer, its running plan, its canary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from adapters.tokenizer import Tokenizer
from device_profiles.device_load import DeviceLoad
from orchestrator.clock import Clock
from orchestrator.config.drafts import choose_answer_store
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.sources import FoundSources
from orchestrator.daemon.api.served import ServedTarget
from orchestrator.daemon.bootstrap.canary import build_trial
from orchestrator.daemon.bootstrap.draft_store import build_draft_store
from orchestrator.daemon.bootstrap.failover import build_standbys
from orchestrator.daemon.bootstrap.fleet import FleetPlanning
from orchestrator.daemon.bootstrap.idle_profiles import IdleMeasuring
from orchestrator.daemon.bootstrap.model_sources import RenewedSources, bind_sources, renew_sources
from orchestrator.daemon.bootstrap.plan_board import PlanBoard
from orchestrator.daemon.bootstrap.planning import PlanMaking, log_assumptions, make_plan, plan_at_once
from orchestrator.daemon.bootstrap.scaling import build_scaler, waits_for_hosts
from orchestrator.daemon.bootstrap.start_profiles import StartWatch, profile_missing
from orchestrator.daemon.bootstrap.start_specs import build_replica_specs
from orchestrator.daemon.bootstrap.target_change import (
    PlanChange,
    TargetChange,
    WorkerSet,
    choose_how,
    describe_change,
    describe_plan_change,
    explain_models_wait,
    list_plan_workers,
    move_workers,
)
from orchestrator.daemon.bootstrap.target_settings import build_control_limits, build_terms
from orchestrator.daemon.bootstrap.tokenizers import TargetTokenizers
from orchestrator.daemon.cluster.shared_cluster import SharedCluster
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.loops.model_roster import ModelGate
from orchestrator.daemon.control.loops.plan_keeper import PlanKeeper
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.daemon.control.port import UnmetWish
from orchestrator.daemon.control.replicas.scaler import end_scaling
from orchestrator.daemon.control.rollout.canary import CanaryTrial
from orchestrator.daemon.draft_store.control import RecallingControl
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import DaemonError, WorkerError
from orchestrator.fitting.worker_options import list_draft_pools
from orchestrator.planning.applied import list_unplaced_drafts
from orchestrator.planning.basis import list_left_out_as_unlike, plain
from orchestrator.planning.neighbours import TakenPlace
from orchestrator.protocol.events import Progress
from orchestrator.protocol.load_options import ModelOptions
from orchestrator.protocol.ready import Ready
from orchestrator.telemetry import get_logger

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
        self._tokenizers = TargetTokenizers(
            self._base, store_directory(config), ground.sandbox, self._say, config.model.output_format
        )
        self._keeper: PlanKeeper | None = None
        self._workers: WorkerSet | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        # Only the first may go without a name, and its workers are called as ever.
        self._cluster = ground.cluster.share(f"{config.model.name}/" if config.number else "")
        self.control = self._build_control()
        self.served = RecallingControl(self.control, ground.clock)
        """Control as requests meet it: with a draft store where there is one."""
        self.served.use(build_draft_store(config, self._base, ground.state, ground.clock))
        self.gate = ModelGate(self.control, self._can_read) if config.model.keep != "always" else None
        """How requests come to it where it is not always in memory."""
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
        return self._tokenizers.find_loaded(self.control.view().ready)

    def _can_read(self) -> bool:
        return self.tokenizer is not None

    def tell_name(self) -> str:
        return self.name

    def offer(self) -> ServedTarget:
        seen = (lambda: self.tokenizer, self.tell_name, build_terms(self.config), self.trial, self.gate)
        return ServedTarget(self.served, *seen)

    def describe_plan(self) -> dict[str, Any] | None:
        return plain(self._keeper.proposal) if self._keeper is not None else None

    def list_unmet(self) -> list[UnmetWish]:
        absent = self._fleet.fleet.absent if self._fleet is not None else {}
        unmet = [UnmetWish("host", f"host {name} is absent: {why}") for name, why in absent.items()]
        unlike = list_left_out_as_unlike(self._keeper.proposal) if self._keeper is not None else ""
        return [*unmet, *([UnmetWish("unlike", unlike)] if unlike else [])]

    def describe_hosts(self) -> list[dict[str, Any]]:
        return self._fleet.fleet.describe_hosts() if self._fleet is not None else []

    async def prepare(self) -> None:
        """Say what is started where no plan does, and open the trial. Raises ConfigError, and what resolving does."""
        self._take_sources(await asyncio.to_thread(bind_sources, self.config))
        if not self.config.planned and not waits_for_hosts(self.config):
            workers = self._workers = await asyncio.to_thread(self._build_workers, self.config)
            self.control.set_specs(workers.targets, workers.drafts, workers.standbys)
        self.trial = build_trial(self.config, self._ground.path, self.control, self._ground.clock)

    async def profile(self, budget_s: float) -> None:
        """Measure what has no profile and may be planned with here, for so long at most. Raises OutriderError."""
        if self.config.planned and self._fleet is None:
            watch = StartWatch(self._prepares, self.control.awaited, self._ground.clock)
            await profile_missing(self.config, self._base, watch, budget_s)

    async def plan(self) -> None:
        """Plan, where anything is left to a plan. Raises OutriderError, and what resolving the models raises."""
        if not self.config.planned:
            return
        planned = self._early_plan or await self._plan_at_once() or await self._make_plan(self.config)
        replica = planned.proposal.plan.replicas[0]
        _log.info(
            "planned",
            target=planned.proposal.plan.target,
            device=", ".join(shard.device for shard in replica.shards),
            runtime=", ".join(dict.fromkeys(shard.runtime for shard in replica.shards)),
            depth=replica.depth,
            drafts=replica.draft.drafter if replica.draft else "none",
            predicted_tokens_per_s=round(replica.prediction.goodput_tokens_per_s, 1),
            basis=", ".join(dict.fromkeys(shard.source for shard in replica.shards)),
            others_rejected=len(planned.proposal.plan.rejected),
        )
        if missing := list_unplaced_drafts(self.config, planned.proposal):
            _log.warning("the canary drafts nothing: the plan leaves out what it would draft with", left_out=missing)
        self.control.set_specs(planned.targets, planned.drafts, planned.standbys)
        self._follow_keeper(self._build_keeper(planned, self.config))

    def _build_keeper(self, planned: StartPlan, config: ClusterConfig) -> PlanKeeper:
        return PlanKeeper(planned, self.control, self._build_making(config), config.placement, self._ground.clock)

    def _build_making(self, config: ClusterConfig) -> PlanMaking:
        return PlanMaking(config, self._base, self._list_taken)

    def _follow_keeper(self, keeper: PlanKeeper) -> None:
        self._keeper = keeper
        self._ground.board.note(self.config.number, lambda: keeper.proposal.plan)
        views = self.control.views
        views.plan_view, views.expect_load_s, views.list_unmet = keeper.view, keeper.expect_load_s, self.list_unmet
        for kind, observer in keeper.hears.items():
            self.control.observers.follow(kind, observer)
        keeper.observe_health(self.control.list_unwell())  # it may have changed while nobody followed

    def _forget_keeper(self, keeper: PlanKeeper) -> None:
        for kind, observer in keeper.hears.items():
            self.control.observers.leave(kind, observer)

    async def is_left_behind(self) -> bool:
        """Return whether the last daemon's worker of it is there, with its model loaded."""
        try:
            await self._cluster.open()
        except WorkerError:  # told by whoever starts workers
            return False
        specs = self.control.list_specs().values()
        return bool(specs) and all(self._cluster.is_left_behind(spec) for spec in specs)

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

    async def _make_plan(self, config: ClusterConfig) -> StartPlan:
        if self._fleet is not None:
            return await self._fleet.make_plan()
        planned = await asyncio.to_thread(make_plan, config, *await self._list_grounds())
        log_assumptions(planned.proposal)
        return planned

    async def _plan_at_once(self) -> StartPlan | None:
        """Return the plan without a look at runtimes that convert the model's file; None where there is none."""
        if self._fleet is not None:
            return None
        planned = await asyncio.to_thread(plan_at_once, self.config, *await self._list_grounds())
        if planned is not None:
            log_assumptions(planned.proposal)
        return planned

    async def _list_grounds(self) -> tuple[Path, Path, Mapping[str, DeviceLoad], tuple[TakenPlace, ...]]:
        """Return what a plan rests on beside its configuration."""
        taken = await asyncio.to_thread(self._list_taken)
        return self._base, self._ground.state, self.control.list_loads(), taken

    def _list_taken(self) -> tuple[TakenPlace, ...]:
        return self._ground.board.list_taken(self.config.number)

    @property
    def is_planned(self) -> bool:
        return self._keeper is not None

    def _take_sources(self, sources: FoundSources) -> None:
        self.config = self.config.with_sources(sources)
        if self._fleet is not None:
            self._fleet.take_sources(sources)

    async def is_model_replaced(self, config: ClusterConfig) -> bool:
        """Return whether a model is another one by now at its place, or is to be loaded again. Raises AdapterError."""
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
            notes = [f"{line}; this waits for a restart of the daemon: {waits}" for line in renewed.replaced]
            return replace(change, notes=(*notes, *change.notes))
        change = await self._prepare_change(config.with_sources(renewed.sources))
        return replace(change, notes=(*renewed.replaced, *change.notes), replaced=renewed.replaced)

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
        after = list_plan_workers(plan, config)
        plan_notes = describe_plan_change(keeper.proposal.plan, plan.proposal.plan)
        how = choose_how(running, before, after)
        change = PlanChange(first.proposal, plan)
        return TargetChange(config, after, how, change, (*describe_change(how, running, after), *plan_notes))

    def _list_workers(self) -> WorkerSet | None:
        return self._workers if self._keeper is None else list_plan_workers(self._keeper.running, self.config)

    async def take_change(self, change: TargetChange) -> None:
        """Let another configuration take effect for the workers. Raises WorkerError; all is as before then."""
        if change.workers is None:
            return
        if change.how == "roll":
            await self._prepare_tokenizer(change.workers)
        await self._take_workers(change, change.workers)
        ready = self.control.view().ready
        if ready is not None and self._tokenizers.find_loaded(ready) is None:  # its host had another model at the place
            try:
                await self._load_served(ready)
            except DaemonError as error:
                _log.error("requests cannot be served", target=self.name, why=str(error))

    async def _take_workers(self, change: TargetChange, workers: WorkerSet) -> None:
        keeper = self._keeper
        if keeper is None or change.plan is None:
            await move_workers(self.control, change.how, self._list_workers(), workers)
            self._workers = workers
            self._take_sources(change.config.sources)
            return
        self._forget_keeper(keeper)  # it would plan against the move
        try:
            await keeper.close()
            engines = await move_workers(self.control, change.how, self._list_workers(), workers)
        except (WorkerError, asyncio.CancelledError):
            self._follow_keeper(keeper)
            raise
        after = self._build_keeper(change.plan.plan, change.config)
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
        self._tokenizers.try_template(tokenizer, self.name)

    def take_rules(self, config: ClusterConfig) -> None:
        """Let what the daemon itself reads take effect."""
        if choose_answer_store(config.drafts) != choose_answer_store(self.config.drafts):
            before = self.served.use(build_draft_store(config, self._base, self._ground.state, self._ground.clock))
            if before is not None:
                closing = asyncio.create_task(before.close(), name="close the draft store")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        self.config = config.with_sources(self.config.sources)
        self.control.set_limits(build_control_limits(config))
        self._ground.board.set_config(config.number, config)

    def _build_workers(self, config: ClusterConfig) -> WorkerSet:
        specs, drafts = build_replica_specs(config, self._base)
        standbys = build_standbys(config, self._base)
        return WorkerSet(tuple(specs), tuple(map(tuple, drafts)), tuple(standbys), list_draft_pools(config))

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
        source = self.config.model.source
        self._tokenizers.begin_reading(self.config.sources.bound.get(source, source))

    async def _load_served(self, ready: Ready) -> None:
        """Load the tokenizer of the model that a worker has loaded. Raises DaemonError."""
        worker, node = self.control.view().worker, self._cluster.own_node
        self._tokenizers.try_template(await self._tokenizers.load_served(ready, worker, node), self.name)
        if self.gate is not None:
            self.gate.release_waiting()

    def give_up(self, reason: str) -> None:
        self.problem = reason
        self._tokenizers.forget()
        self.control.give_up(reason)
        if self.gate is not None:
            self.gate.refuse(reason)

    async def end_planning(self) -> None:
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
        self._tokenizers.end_reading()
        if self.gate is not None:
            self.gate.refuse("the server is shutting down")
        await self.control.close()
        if (store := self.served.use(None)) is not None:
            await store.close()
        await asyncio.gather(*self._closing)

    def save_trial(self) -> None:
        if self.trial is not None:
            self.trial.save()

    def _build_control(self) -> TargetControl:
        limits, pools = build_control_limits(self.config), list_draft_pools(self.config)
        control = TargetControl(self._cluster, (), limits, self._ground.clock, draft_pools=pools)
        control.observers.follow(Progress, self._say)
        control.observers.follow(Progress, self._observe_worker)
        control.views.explain_unserved = self._tokenizers.explain_missing
        return control

    def _prepares(self, stage: str, fraction: float) -> None:
        progress = Progress(stage, fraction)
        self.control.prepares(progress)
        self._say(progress)

    def _say(self, progress: Progress) -> None:
        self._ground.say(self.config.model.name, progress)

"""The life of the daemon: open, serve, drain, close. Runs in the foreground and holds no model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapters.contract import AdapterError
from adapters.tokenizer import Tokenizer
from orchestrator.api.acceptance import AcceptanceBounds
from orchestrator.api.admin.routes import create_admin_app
from orchestrator.api.app import ApiSettings, create_app
from orchestrator.api.batches.service import BatchService
from orchestrator.api.batches.store import BatchStore, StoreLimits
from orchestrator.api.connections import ConnectionLimits, Connections, raise_open_files
from orchestrator.api.keys import Keys
from orchestrator.api.listening import listen_tcp, listen_unix, serving
from orchestrator.api.metrics.cost_series import HourlyPrice
from orchestrator.api.resume import KeptAnswers
from orchestrator.bootstrap.banner import describe_ray_start, show_banner
from orchestrator.bootstrap.canary import build_trial
from orchestrator.bootstrap.clusters import build_cluster
from orchestrator.bootstrap.failover import build_standbys, failover_rules
from orchestrator.bootstrap.fleet import FleetPlanning
from orchestrator.bootstrap.journal import build_book
from orchestrator.bootstrap.lease import hold_lease
from orchestrator.bootstrap.planning import PlanMaking, StartPlan, build_start_specs, make_plan, profile_missing
from orchestrator.bootstrap.stopping import Stopping
from orchestrator.clock import SystemClock
from orchestrator.config.keys_file import keys_path
from orchestrator.config.load import admin_socket_path, state_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.control.admission import ControlLimits
from orchestrator.control.canary import CanaryTrial
from orchestrator.control.controller import TargetControl
from orchestrator.control.device_watch import watch_devices
from orchestrator.control.events import StandbySpec
from orchestrator.control.plan_keeper import DriftPolicy, PlanKeeper
from orchestrator.control.state import STARTING
from orchestrator.control.surroundings import RoutingRules
from orchestrator.errors import ConfigError, DaemonError
from orchestrator.loading.models import load_tokenizer
from orchestrator.loading.options import list_draft_pools, objectives_of
from orchestrator.planning.applied import list_unplaced_drafts
from orchestrator.planning.basis import plain
from orchestrator.systemd import Notifier
from orchestrator.telemetry import get_logger
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.messages import Progress
from policies.serving.routing import RoutingWeights

_TEND_S = 1.0
_START_EXTENSION_S = 60.0

_log = get_logger(__name__)


class Daemon:
    """One endpoint over one configuration, which stands in the file `path`. `run` returns when it was told to stop and
    everything has ended."""

    def __init__(self, config: ClusterConfig, path: Path) -> None:
        base = path.resolve().parent
        self._config = config
        self._path = path
        self._trial: CanaryTrial | None = None
        self._notifier = Notifier()
        self._clock = SystemClock()
        self._tokenizer: Tokenizer | None = None
        self._stopping = Stopping(self._clock)
        self._stop = self._stopping.asked
        self._stage = ""
        keys_file = config.api.keys_file
        self._keys = Keys(keys_path(keys_file, base)) if keys_file else None
        self._base = base
        self._state = state_directory(config, path)
        self._book = build_book(config, self._state, self._clock)
        self._kept: KeptAnswers | None = None
        self._batches: BatchService | None = None
        self._keeper: PlanKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._connections = Connections(self._connection_limits())
        self._cluster = build_cluster(config, self._state)
        if config.planned:
            self._control = self._build_control((), (), ())
        else:
            self._control = self._build_control(*build_start_specs(config, base), build_standbys(config, base))
        known = (config, path, self._cluster, self._prepares, self._control)
        self._fleet = FleetPlanning(*known) if config.plans_hosts else None

    def _build_control(
        self, targets: Sequence[WorkerSpec], drafts: Sequence[WorkerSpec], standbys: Sequence[StandbySpec]
    ) -> TargetControl:
        """Return control over these workers; without any it waits for the plan to name them."""
        limits = self._config.limits
        control = TargetControl(
            self._cluster,
            targets,
            ControlLimits(
                limits.max_running,
                limits.max_waiting,
                self._config.cluster.max_restarts,
                limits.request_timeout_s,
                self._config.speculation.min_speculative_tokens,
                ttft=objectives_of(self._config.slo).ttft,
                refuse_late=self._config.slo.late == "refuse",
                quarantine_s=limits.quarantine_s,
                failover=failover_rules(self._config.failover),
                routing=self._routing_rules(),
            ),
            self._clock,
            drafts=drafts,
            standbys=standbys,
            draft_pools=list_draft_pools(self._config),
        )
        control.on_progress.append(self._say)
        return control

    def _routing_rules(self) -> RoutingRules:
        routing = self._config.routing
        weights = RoutingWeights(**routing.weights.model_dump())
        return RoutingRules(weights, routing.hysteresis, self._config.placement.load_smoothing)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises DaemonError where another daemon has the state directory, when it
        cannot bind, or the model fails at start."""
        with hold_lease(self._state):
            await self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.observe_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reread_keys)
        self._trial = build_trial(self._config, self._path, self._control, self._clock)
        with listen_tcp(self._config.api.host, self._config.api.port) as tcp:
            host, port = tcp.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            admin_path = admin_socket_path(self._config, port)
            with listen_unix(admin_path) as unix:
                settings = self._api_settings()
                api = create_app(
                    self._control,
                    lambda: self._tokenizer,
                    self._model_name,
                    settings,
                    self._clock,
                    self._trial,
                    self._book,
                    self._open_batches(),
                )
                self._kept = api.state.kept
                self._batches = api.state.batches
                known = (
                    f"{url}/v1",
                    version("outrider"),
                    settings.acceptance,
                    self._running_plan,
                    api.state.slo,
                    self._trial,
                    api.state.costs,
                    self._describe_hosts,
                    api.state.speed,
                )
                admin = create_admin_app(self._control, *known)
                self._control.on_round.extend(api.state.on_round)
                async with serving(api, tcp, self._connections), serving(admin, unix):
                    await self._serve(url, admin_path)

    async def _plan(self) -> bool:
        """Measure what has no profile, and plan; False when told to stop before. Raises OutriderError."""
        task = asyncio.ensure_future(self._make_plan())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return False
        found = task.result()
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
        if missing := list_unplaced_drafts(self._config, found.proposal):
            _log.warning("the canary drafts nothing: the plan leaves out what it would draft with", left_out=missing)
        self._control.set_specs(found.targets, found.drafts, found.standbys)
        placement = self._config.placement
        pauses = (placement.replan_pause_s, placement.load_lasts_s)
        patience = DriftPolicy(placement.drift_tolerance, placement.drift_after_s, *pauses)
        making = PlanMaking(self._config, self._base)
        self._keeper = PlanKeeper(found, self._control, making, patience, self._clock)
        self._control.plan_view = self._keeper.view
        self._control.on_round.append(self._keeper.observe)
        self._control.on_health.append(self._keeper.observe_health)
        self._control.on_loads.append(self._keeper.observe_loads)
        if self._fleet is not None:
            self._keeping = asyncio.create_task(self._fleet.keep_plan(self._keeper), name="keep the plan for hosts")
        return True

    async def _make_plan(self) -> StartPlan:
        if self._fleet is not None:
            return await self._fleet.make_plan()
        await profile_missing(self._config, self._base, self._prepares)
        loads = self._control.list_loads()
        return await asyncio.to_thread(make_plan, self._config, self._base, self._state, loads)

    def _running_plan(self) -> dict[str, Any] | None:
        return plain(self._keeper.proposal) if self._keeper is not None else None

    def _describe_hosts(self) -> list[dict[str, Any]]:
        return self._fleet.fleet.describe() if self._fleet is not None else []

    def _connection_limits(self) -> ConnectionLimits:
        api = self._config.api
        most = raise_open_files(api.max_connections)
        if most < api.max_connections:
            _log.warning("fewer connections than configured: open files are limited", most=most)
        times = (api.header_timeout_s, api.body_timeout_s, api.idle_timeout_s, api.write_timeout_s)
        return ConnectionLimits(most, *times)

    def _api_settings(self) -> ApiSettings:
        limits = self._config.limits
        return ApiSettings(
            max_body_bytes=int(limits.max_body),
            max_parameter_bytes=int(limits.max_parameters),
            max_grammar_bytes=int(limits.max_grammar),
            max_bodies_bytes=int(limits.max_bodies),
            translation_timeout_s=limits.translation_timeout_s,
            max_requests_per_key=limits.max_requests_per_key,
            max_tokens_per_minute_per_key=limits.max_tokens_per_minute_per_key,
            log_words=self._config.logging.prompts,
            keys=self._keys,
            stalled_after_s=self._config.api.stalled_after_s,
            vllm_metric_names=self._config.api.vllm_metric_names,
            acceptance=AcceptanceBounds(self._config.speculation.acceptance, self._config.speculation.allow_tolerance),
            objectives=objectives_of(self._config.slo),
            connections=self._connections,
            places=limits.max_running,
            price=self._hourly_price(),
        )

    def _hourly_price(self) -> HourlyPrice:
        """Return what this machine costs. Where workers may be on any node of a Ray cluster, that is not what they
        cost."""
        config = self._config
        elsewhere = config.cluster.on_ray and bool(config.cluster.address) and not config.planned
        return HourlyPrice(0.0 if elsewhere else config.devices.price_per_hour, config.placement.currency)

    def _open_batches(self) -> BatchStore | None:
        """Return what keeps files and batches, where that is wanted. Raises DaemonError."""
        asked = self._config.batches
        if not asked.enabled:
            return None
        sizes = (int(asked.max_file), int(asked.max_storage))
        limits = StoreLimits(asked.concurrency, *sizes, asked.max_files, asked.max_batches, asked.keep_s)
        store = BatchStore(self._state / "batches", limits, self._clock)
        try:
            store.open()
        except OSError as error:
            text = "set state.directory to one that this user owns, or batches.enabled: false"
            raise DaemonError(f"{self._state / 'batches'}: {error.strerror}; {text}") from error
        return store

    def _reread_keys(self) -> None:
        """SIGHUP: take the keys as they are now; a file that cannot be used leaves them as they were."""
        if self._keys is None:
            _log.info("nothing to read again: api.keys_file is not set")
            return
        try:
            self._keys.reread()
            _log.info("keys read", keys=len(self._keys))
        except ConfigError as error:
            _log.error("the keys stay as they were", reason=str(error))

    def _model_name(self) -> str:
        ready = self._control.view().ready
        return ready.model if ready is not None else self._config.model.name

    async def _serve(self, url: str, admin_path: Path) -> None:
        interrupted = self._book.recover()
        if interrupted:
            _log.info("answers of the last daemon can be resumed", answers=len(interrupted))
        tending = asyncio.create_task(self._tend_book(), name="tend the journal")
        telling = asyncio.create_task(self._tell_systemd(), name="tell systemd")
        watching = asyncio.create_task(watch_devices(self._control), name="watch devices")
        try:
            if await self._start_workers():
                ready = self._control.view().ready
                assert ready is not None  # noqa: S101  # the phase was "ready" a line ago
                _log.info(
                    "serving",
                    model=ready.model,
                    api=f"{url}/v1",
                    admin=str(admin_path),
                    adapter=ready.adapter,
                    device=ready.device_name,
                    activations=ready.activations,
                    exactness=ready.exactness,
                    row_invariant=ready.row_invariant,
                    numerical_class=ready.numerical_class,
                    class_fingerprint=ready.class_fingerprint,
                    drafters=ready.drafters,
                    max_depth=ready.max_depth,
                )
                show_banner(self._config, ready, f"{url}/v1")
                self._notifier.ready()
                if self._kept is not None:
                    self._kept.go_on(interrupted)
                if self._batches is not None:
                    self._batches.start()
                await self._wait_for_end()
            self._notifier.stopping()
            self._connections.hurry()
            if self._batches is not None:
                await self._batches.close()
            if self._kept is not None:
                self._kept.let_go()
            await self._stopping.run_or_hurry(self._control.drain(self._config.limits.drain_timeout_s))
        finally:
            tending.cancel()
            telling.cancel()
            if self._batches is not None:
                await self._batches.close()
            watching.cancel()
            await self._end_planning()
            await self._control.close()
            if self._kept is not None:
                await self._kept.close()
            self._book.close()
            if self._trial is not None:
                self._trial.save()
        _log.info("stopped")

    async def _end_planning(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._keeper is not None:
            await self._keeper.close()
        if self._fleet is not None:
            await self._fleet.close()

    async def _tend_book(self) -> None:
        while True:
            await asyncio.sleep(self._config.journal.sync_s or _TEND_S)
            await self._book.tend()

    async def _wait_for_end(self) -> None:
        """Wait until told to stop. Raises DaemonError when no worker can ever serve again."""
        failed = asyncio.ensure_future(self._control.wait_failed())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if failed.done():
            raise DaemonError(failed.result())
        failed.cancel()

    async def _tell_systemd(self) -> None:
        """Say that the daemon lives, by what watches its workers, and that a load goes on."""
        while True:
            self._control.look()
            if self._control.view().phase == STARTING:
                self._notifier.extend_start(_START_EXTENSION_S)
            self._notifier.alive()
            await asyncio.sleep(self._notifier.alive_every_s)

    async def _start_workers(self) -> bool:
        """Plan where that is asked for, and start the workers; False when told to stop before one serves."""
        if ray := describe_ray_start(self._config):
            self._say(Progress(ray, -1.0))
        if self._config.planned and not await self._plan():
            return False
        await self._control.start()
        return await self._first_ready()

    async def _first_ready(self) -> bool:
        """Wait for the model; False when told to stop before. Raises DaemonError when it failed for good."""
        settled = asyncio.ensure_future(self._control.wait_settled())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({settled, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not settled.done():
            settled.cancel()
            return False
        view = settled.result()
        if view.ready is None:
            raise DaemonError(view.detail)
        try:
            self._tokenizer = load_tokenizer(view.ready.tokenizer_dir)
        except AdapterError as error:
            raise DaemonError(str(error)) from error
        return True

    def _prepares(self, stage: str, fraction: float) -> None:
        """Something goes on before there are workers."""
        progress = Progress(stage, fraction)
        self._control.prepares(progress)
        self._say(progress)

    def _say(self, progress: Progress) -> None:
        """Log each stage once, and tell systemd."""
        if progress.stage != self._stage:
            self._stage = progress.stage
            _log.info("preparing", stage=progress.stage)
            self._notifier.status(progress.stage)

"""The life of the daemon: open, serve, drain, close. Runs in the foreground and holds no model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from structlog.contextvars import bound_contextvars

from adapters.contract import AdapterError
from orchestrator.clock import SystemClock
from orchestrator.config.access_checks import find_keyless
from orchestrator.config.keys_file import keys_path
from orchestrator.config.load import admin_socket_path
from orchestrator.config.model import ClusterConfig
from orchestrator.config.store_use import measure_store_use
from orchestrator.config.tls import tls_paths
from orchestrator.daemon.alerts.watch import AlertWatch
from orchestrator.daemon.api.admin.daemon import KeptLog, ReloadPort, SupportPages
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.app import create_app
from orchestrator.daemon.api.audit import AuditLog
from orchestrator.daemon.api.batches.service import BatchService
from orchestrator.daemon.api.body_work import DeadlyBodies
from orchestrator.daemon.api.connections import Connections, Server
from orchestrator.daemon.api.dashboard.routes import install_dashboard
from orchestrator.daemon.api.keys import Keys, name_key
from orchestrator.daemon.api.listening import listen_tcp, listen_unix, serving
from orchestrator.daemon.api.metrics.page import MetricsPage
from orchestrator.daemon.api.resume import KeptAnswers
from orchestrator.daemon.api.served import ServedModel
from orchestrator.daemon.api.settings import ApiSettings
from orchestrator.daemon.api.tls import Certificate
from orchestrator.daemon.bootstrap.admin_targets import describe_targets
from orchestrator.daemon.bootstrap.api_settings import (
    bound_connections,
    build_alert_watch,
    open_batches,
)
from orchestrator.daemon.bootstrap.banner import describe_ray_start, show_banner
from orchestrator.daemon.bootstrap.early_start import EarlyStart
from orchestrator.daemon.bootstrap.plan_board import PlanBoard
from orchestrator.daemon.bootstrap.reload import FileStanding, Reloader
from orchestrator.daemon.bootstrap.reload_queue import ReloadQueue, reread_files
from orchestrator.daemon.bootstrap.residency import explain_misfit, measure_models
from orchestrator.daemon.bootstrap.stopping import Stopping, run_until
from orchestrator.daemon.bootstrap.target_life import DaemonGround, TargetLife
from orchestrator.daemon.bootstrap.target_settings import build_terms
from orchestrator.daemon.bootstrap.tracing import close_tracing, open_tracing
from orchestrator.daemon.cluster.shared_cluster import SharedCluster
from orchestrator.daemon.control.loops.device_watch import watch_devices
from orchestrator.daemon.control.loops.model_roster import ModelRoster
from orchestrator.daemon.control.stage_log import StageLog
from orchestrator.daemon.control.state import STARTING
from orchestrator.daemon.journal.book import KeptAnswer
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.daemon.systemd.activation import GivenSockets, take_sockets
from orchestrator.daemon.systemd.notify import Notifier
from orchestrator.errors import DaemonError, OutriderError
from orchestrator.protocol.events import Progress
from orchestrator.telemetry import get_logger, set_level

_TEND_S = 1.0  # between two looks of the journal after what is due. Not tuned.
# A load says each step within it, so that systemd does not give up (ADR 0064). Not tuned.
_START_EXTENSION_S = 60.0
_STOP_EXTENSION_S = 30.0
"""What a stop may take behind the drain: batches, workers, the journal. Not tuned."""

_log = get_logger(__name__)


class Daemon:
    """One endpoint over one configuration, which stands in a file: a target, or several. `run` returns when it was told
    to stop and everything has ended. `log` has its newest lines."""

    def __init__(
        self, config: ClusterConfig, standing: FileStanding, early: EarlyStart, log: KeptLog | None = None
    ) -> None:
        path = standing.path
        base = self._base = path.resolve().parent
        self._config = config
        self._log = log
        self._notifier = Notifier()
        self._clock = SystemClock()
        self._stopping = Stopping(self._clock)
        self._stages = StageLog()
        keys_file = config.api.keys_file
        self._keys = Keys(keys_path(keys_file, base)) if keys_file else None
        tls = config.api.tls
        self._certificate = Certificate(*tls_paths(tls, base)) if tls.wanted else None
        audit_file = config.logging.audit_file
        self._audit = AuditLog(base / Path(audit_file).expanduser() if audit_file else None)
        self._tracing = open_tracing(config.tracing, base, self._clock)
        self._given = GivenSockets()
        self._server: Server | None = None
        self._state, self._book = early.state, early.book
        self._kept: KeptAnswers | None = None
        self._batches: BatchService | None = None
        self._alerts: AlertWatch | None = None
        self._connections = Connections(bound_connections(config.api))
        self._sandbox = Sandbox()
        self._deadly = DeadlyBodies(self._state / "bodies", self._clock, config.limits.quarantine_s)
        cluster = SharedCluster(early.cluster)
        board = PlanBoard(config.targets, base)
        ground = DaemonGround(path, self._state, cluster, board, self._clock, self._sandbox, self._say)
        first, *others = config.targets
        self._targets = [TargetLife(first, ground, early.plan), *(TargetLife(config, ground) for config in others)]
        self._reloader = Reloader(config, standing, self._targets, self._adopt)
        self._reloads = ReloadQueue(
            self._reloader, self._notifier, partial(reread_files, self._keys, self._certificate)
        )
        self._models: tuple[ServedModel, ...] = ()
        self._roster: ModelRoster | None = None
        self._coming: list[asyncio.Task[None]] = []
        self._take_settings: Callable[[ApiSettings], None] = lambda settings: None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises DaemonError when it cannot bind, or every model fails at start."""
        try:
            await self._run()
        finally:
            self._sandbox.close()
            self._deadly.close()
            await close_tracing(self._tracing)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.observe_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reloads.observe_hangup)
        self._sandbox.start()
        self._deadly.open()
        await self._do_for_each(TargetLife.prepare)
        self._given = take_sockets()
        with listen_tcp(self._config.api.host, self._config.api.port, self._given.api) as tcp:
            host, port = tcp.getsockname()[:2]
            self._check_given(host, port)
            scheme = "http" if self._certificate is None else "https"
            url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
            given = self._given.admin
            admin_path = admin_socket_path(self._config, port) if given is None else Path(given.getsockname())
            with listen_unix(admin_path, given) as unix:
                offers = [target.offer() for target in self._targets]
                batches = open_batches(self._config, self._state, self._clock)
                api = create_app(
                    offers,
                    self._build_settings(),
                    self._clock,
                    book=self._book,
                    batches=batches,
                    sandbox=self._sandbox,
                    deadly=self._deadly,
                )
                self._kept = api.state.kept
                self._batches = api.state.batches
                models = list(api.state.models)
                self._models, self._take_settings = tuple(models), api.state.take_settings
                self._alerts = build_alert_watch(api.state.page, self._config.alerts, self._clock)
                targets = describe_targets(self._targets, models, self._tracing)
                admin = api.state.admin = self._build_admin(url, targets, api.state.page)
                dashboard = install_dashboard(
                    api, targets, models, api.state.lives, self._clock, keys=self._keys is not None
                )
                tls = None if self._certificate is None else self._certificate.context
                public = serving(api, tcp, self._connections, tls)
                async with public as self._server, serving(admin, unix), dashboard.follow():
                    await self._serve(url, admin_path)

    def _check_given(self, host: str, port: int) -> None:
        """See that a socket of systemd's is as configured. Raises DaemonError where everybody could use it."""
        api = self._config.api
        if self._given.api is None:
            return
        if problem := find_keyless(api, host):
            raise DaemonError(f"systemd listens on {host}:{port}: {problem}")
        if port != api.port:
            text = "systemd listens elsewhere than api in cluster.yaml says: run `outrider service install` again"
            _log.warning(text, systemd=f"{host}:{port}", api=f"{api.host}:{api.port}")

    def _build_admin(self, url: str, targets: Sequence[AdminTarget], metrics: MetricsPage) -> FastAPI:
        name_owner = partial(name_key, self._keys)
        reloading = ReloadPort(self._reloads.reload, self._reloader.describe_file, self._reloader.list_values)
        pages = SupportPages(lambda: self._config.model_dump(mode="json"), metrics.render)
        ports = (name_owner, reloading, self._log, pages, self._alerts, self._book.view, self._deadly)
        return create_admin_app(
            *(targets, f"{url}/v1", version("outrider"), self._audit, *ports),
            measure_store=lambda: measure_store_use(self._config, self._base),
        )

    async def _serve(self, url: str, admin_path: Path) -> None:
        interrupted = self._book.recover()
        if interrupted:
            _log.info("answers of the last daemon can be resumed", answers=len(interrupted))
        tending = asyncio.create_task(self._tend_book(), name="tend the journal")
        telling = asyncio.create_task(self._tell_systemd(), name="tell systemd")
        watching = list(self._list_watches())
        try:
            if await run_until(self._stopping.asked, self._start_targets(url, admin_path, interrupted)):
                self._notifier.ready(self._describe_serving())
                self._reloads.open()
                await run_until(self._stopping.asked, self._wait_failed())
            await self._reloads.close()
            drain_s = self._config.limits.drain_timeout_s
            self._notifier.stopping(drain_s + _STOP_EXTENSION_S)
            if self._given.api is not None and self._server is not None:
                self._server.stop_listening()  # systemd holds the socket: new connections wait for the next daemon
            self._connections.hurry()
            if self._batches is not None:
                await self._batches.close()
            if self._kept is not None:
                self._kept.let_go()
            await run_until(self._stopping.hurried, self._drain())
        finally:
            tending.cancel()
            telling.cancel()
            if self._batches is not None:
                await self._batches.close()
            if self._roster is not None:
                self._roster.close()
            for task in (*watching, *self._coming):
                task.cancel()
            await asyncio.gather(*(target.end_planning() for target in self._targets))
            await asyncio.gather(*(target.close() for target in self._targets))
            if self._kept is not None:
                await self._kept.close()
            self._book.close()
            for target in self._targets:
                target.save_trial()
        _log.info("stopped")

    async def _drain(self) -> None:
        timeout_s = self._config.limits.drain_timeout_s
        await asyncio.gather(*(target.control.drain(timeout_s) for target in self._targets))

    async def _start_targets(self, url: str, admin_path: Path, interrupted: Sequence[KeptAnswer]) -> bool:
        """Plan, start workers, and wait until each target serves or never will. Raises DaemonError where none does, or
        what made the only one fail."""
        if ray := describe_ray_start(self._config):
            self._say("", Progress(ray, -1.0))
        await self._profile()
        await self._do_for_each(TargetLife.plan)
        coming = [target for target in self._targets if not target.problem]
        await self._call_roster()
        for target in coming:
            with self._naming(target):
                await target.start()
        if self._roster is not None:
            self._roster.advance_models()
        for target in coming:
            if target.gate is not None:
                bringing = self._bring_up(target, url, admin_path, interrupted)
                self._coming.append(asyncio.create_task(bringing, name="bring up a model"))
        staying = [target for target in coming if target.gate is None]
        await asyncio.gather(*(self._bring_up(target, url, admin_path, interrupted) for target in staying))
        self._check_any_left()
        return True

    async def _call_roster(self) -> None:
        """Let models come and go, where any need not stay. Raises DaemonError where one can never be loaded."""
        targets = [target for target in self._targets if not target.problem]
        if not any(target.gate is not None for target in targets):
            return
        configs = [target.config for target in targets]
        models_memory = await asyncio.to_thread(measure_models, configs, self._base)
        if (misfit := explain_misfit(configs, models_memory)) is not None:
            raise DaemonError(misfit[1])
        for line in models_memory.unknown:
            _log.warning("nothing gives way for what is not known", unknown=line)
        at_start = set(models_memory.at_start)
        for number, (target, terms) in enumerate(zip(targets, models_memory.terms, strict=True)):
            if target.gate is not None:
                target.control.manage(terms)
                if await target.is_left_behind():
                    at_start.add(number)
        self._roster = ModelRoster(
            [target.name for target in targets],
            [target.gate for target in targets],
            [target.control for target in targets],
            models_memory.terms,
            models_memory.memory,
            at_start,
            self._clock,
        )

    async def _bring_up(
        self, target: TargetLife, url: str, admin_path: Path, interrupted: Sequence[KeptAnswer]
    ) -> None:
        """Wait until a target serves. What failed says so, and is answered 503. What requests load goes on with what
        the last daemon's clients wait for, which loads it."""
        if target.gate is not None:
            self._let_in(target, interrupted)
        try:
            ready = await target.wait_ready()
        except DaemonError as error:
            self._give_up(target, error)
            return
        _log.info(
            "serving",
            model=ready.model.name,
            api=f"{url}/v1",
            admin=str(admin_path),
            adapter=ready.device.adapter,
            device=ready.device.full_name,
            activations=ready.precision.activations,
            exactness=ready.precision.exactness,
            row_invariant=ready.precision.row_invariant,
            numerical_class=ready.precision.numerical_class,
            class_fingerprint=ready.precision.class_fingerprint,
            drafters=ready.drafting.drafters,
            no_drafts=ready.drafting.no_drafts,
            max_depth=ready.drafting.max_depth,
        )
        show_banner(self._config, ready, f"{url}/v1")
        if target.gate is None:
            self._let_in(target, interrupted)

    def _let_in(self, target: TargetLife, interrupted: Sequence[KeptAnswer]) -> None:
        """Go on with a target's answers of the last daemon, and with batches."""
        if self._kept is not None:
            self._kept.go_on(interrupted, target.served)
        if self._batches is not None:
            self._batches.start()

    async def _profile(self) -> None:
        """Measure what the targets have no profiles of. They share one budget: what one leaves, the next ones have."""
        ends_s = self._clock.monotonic_s() + self._config.placement.profile_budget_s
        waiting = len(self._targets)

        async def profile(target: TargetLife) -> None:
            nonlocal waiting
            share_s, waiting = max(0.0, ends_s - self._clock.monotonic_s()) / waiting, waiting - 1
            await target.profile(share_s)

        await self._do_for_each(profile)

    async def _do_for_each(self, do: Callable[[TargetLife], Awaitable[None]]) -> None:
        """Do something for one target after the other, in the order of the file. Of several one may fail; raises
        DaemonError where none is left, and what made the only one fail."""
        for target in self._targets:
            if target.problem:
                continue
            with self._naming(target):
                try:
                    await do(target)
                except (OutriderError, AdapterError) as error:
                    if len(self._targets) == 1:
                        raise
                    self._give_up(target, error)
        self._check_any_left()

    def _give_up(self, target: TargetLife, error: Exception) -> None:
        """A target will never serve; the others do."""
        if len(self._targets) > 1:
            _log.error("a model has failed", model=target.config.model.name, reason=str(error))
        target.give_up(str(error))

    def _check_any_left(self) -> None:
        """Raise DaemonError where no target can ever serve."""
        if all(target.problem for target in self._targets):
            raise DaemonError(self._join_words([target.problem for target in self._targets]))

    def _join_words(self, words: Sequence[str]) -> str:
        """Return in a line what is said of each target, with its name where there are several."""
        if len(words) == 1:
            return words[0]
        return "; ".join(f"{target.name}: {word}" for target, word in zip(self._targets, words, strict=True))

    def _naming(self, target: TargetLife) -> AbstractContextManager[object]:
        """Let log lines say whose they are, where there are several targets. Tasks that begin meanwhile do so, too."""
        several = len(self._targets) > 1
        return bound_contextvars(model=target.config.model.name) if several else contextlib.nullcontext()

    def _list_watches(self) -> Iterator[asyncio.Task[None]]:
        """Yield who samples devices for each target: what other targets' workers take, other programs take. Alerts are
        watched for all together."""
        for target in self._targets:
            others = [other.control for other in self._targets if other is not target]
            with self._naming(target):
                yield asyncio.create_task(watch_devices(target.control, others), name="watch devices")
        if self._alerts is not None:
            yield asyncio.create_task(self._alerts.run(), name="watch alerts")

    def _describe_serving(self) -> str:
        if len(self._targets) == 1:
            return "serving"
        failed = [target.name for target in self._targets if target.problem]
        serving = ", ".join(target.name for target in self._targets if not target.problem)
        return f"serving {serving}" + (f"; failed: {', '.join(failed)}" if failed else "")

    def _build_settings(self) -> ApiSettings:
        config, shared = self._config, (self._keys, self._audit, self._connections, self._tracing)
        return ApiSettings(config.limits, config.api, config.logging.prompts, *shared)

    def _adopt(self, config: ClusterConfig) -> None:
        """Let what is everybody's take effect."""
        self._config = config
        set_level(config.logging.level)
        if self._log is not None:
            self._log.ring.hides_words = config.logging.prompts
        self._take_settings(self._build_settings())
        self._connections.limits = bound_connections(config.api)
        for model, target in zip(self._models, self._targets, strict=True):
            model.take_terms(build_terms(target.config))
        if self._batches is not None:
            store = self._batches.store
            store.limits = config.batches.model_copy(update={"concurrency": store.limits.concurrency})

    async def _tend_book(self) -> None:
        while True:
            await asyncio.sleep(min(_TEND_S, self._config.journal.sync_s or _TEND_S))
            await self._book.tend()

    async def _wait_failed(self) -> None:
        """Wait for as long as any target may serve. Raises DaemonError then."""
        reasons = await asyncio.gather(*(target.control.wait_failed() for target in self._targets))
        raise DaemonError(self._join_words(reasons))

    async def _tell_systemd(self) -> None:
        """Say that the daemon lives, by what watches its workers, and that a load goes on."""
        while True:
            for target in self._targets:
                target.control.look()
            if any(target.control.view().phase == STARTING for target in self._targets):
                self._notifier.extend(_START_EXTENSION_S)
            self._notifier.alive()
            await asyncio.sleep(self._notifier.alive_every_s)

    def _say(self, name: str, progress: Progress) -> None:
        """Log how far a preparation is, and tell systemd. `name`: the model's; "" where it is everybody's."""
        news = self._stages.describe_news(name, progress, self._clock.monotonic_s())
        if not news:
            return
        several = bool(name) and len(self._targets) > 1
        _log.info("preparing", **({"model": name} if several else {}), stage=news)
        self._notifier.status(f"{name}: {news}" if several else news)

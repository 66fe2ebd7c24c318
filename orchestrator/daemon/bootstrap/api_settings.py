"""What the API is told of its configuration: bounds, access, connections, alerts, the store of files and batches."""

from __future__ import annotations

from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.config.alerts import AlertsSection
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.alerts.watch import AlertWatch
from orchestrator.daemon.alerts.webhook import Webhook
from orchestrator.daemon.api.audit import AuditLog
from orchestrator.daemon.api.batches.store import BatchStore, StoreLimits
from orchestrator.daemon.api.connections import ConnectionLimits, Connections, raise_open_files
from orchestrator.daemon.api.doors.responses.store import StoreBounds
from orchestrator.daemon.api.gates import Access
from orchestrator.daemon.api.keys import Keys
from orchestrator.daemon.api.metrics.page import MetricsPage
from orchestrator.daemon.api.settings import ApiSettings
from orchestrator.daemon.tracing.port import TracedDaemon
from orchestrator.durable import is_full
from orchestrator.errors import DaemonError
from orchestrator.telemetry import get_logger

_log = get_logger(__name__)


def build_connection_limits(config: ClusterConfig) -> ConnectionLimits:
    """Return the bounds of connections, as far as the system's bound of open files lets them be."""
    api = config.api
    most = raise_open_files(api.max_connections)
    if most < api.max_connections:
        _log.warning("fewer connections than configured: open files are limited", most=most)
    times = (api.header_timeout_s, api.body_timeout_s, api.idle_timeout_s, api.write_timeout_s)
    return ConnectionLimits(most, *times)


def build_api_settings(
    config: ClusterConfig, keys: Keys | None, audit: AuditLog, connections: Connections, tracing: TracedDaemon | None
) -> ApiSettings:
    """Return the settings of the API: `keys` are None where everybody may ask, `tracing` where nothing is traced."""
    limits, api = config.limits, config.api
    return ApiSettings(
        max_body_bytes=int(limits.max_body),
        max_parameter_bytes=int(limits.max_parameters),
        max_grammar_bytes=int(limits.max_grammar),
        max_bodies_bytes=int(limits.max_bodies),
        translation_timeout_s=limits.translation_timeout_s,
        max_requests_per_key=limits.max_requests_per_key,
        max_tokens_per_minute_per_key=limits.max_tokens_per_minute_per_key,
        log_words=config.logging.prompts,
        keys=keys,
        access=Access(tuple(api.allowed_hosts), tuple(api.allowed_origins), api.metrics_without_key, audit),
        stalled_after_s=api.stalled_after_s,
        headers_after_s=api.headers_after_s,
        keep_alive_s=api.keep_alive_s,
        allow_chat_templates=api.allow_chat_templates,
        vllm_metric_names=api.vllm_metric_names,
        connections=connections,
        stored_responses=StoreBounds(api.stored_responses, int(api.stored_responses_memory), api.stored_responses_s),
        tracing=tracing,
    )


def build_store_limits(config: ClusterConfig, concurrency: int) -> StoreLimits:
    """Return the bounds of what is kept for batches. `concurrency`: lines that are asked at once."""
    batches = config.batches
    sizes = (int(batches.max_file), int(batches.max_storage))
    return StoreLimits(concurrency, *sizes, batches.max_files, batches.max_batches, batches.keep_s)


def open_batches(config: ClusterConfig, state: Path, clock: Clock) -> BatchStore | None:
    """Return what keeps files and batches below the daemon's own directory; None where that is not wanted. Raises
    DaemonError where it cannot be written."""
    batches, directory = config.batches, state / "batches"
    if not batches.enabled:
        return None
    store = BatchStore(directory, build_store_limits(config, batches.concurrency), clock)
    try:
        store.open()
    except OSError as error:
        text = "set state.directory to one that this user owns, or batches.enabled: false"
        text = "make room on that disk" if is_full(error) else text
        raise DaemonError(f"{directory}: {error.strerror}; {text}") from error
    return store


def build_alert_watch(page: MetricsPage, section: AlertsSection, clock: Clock) -> AlertWatch:
    url = section.webhook.get_secret_value()
    return AlertWatch(
        page.read,
        time_factor=section.time_factor,
        every_s=section.every_s,
        webhook=Webhook(url) if url else None,
        clock=clock,
    )

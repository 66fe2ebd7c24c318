"""What the API is told of its configuration: bounds, access, connections, alerts, the store of files and batches."""

from __future__ import annotations

from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.config.alerts import AlertsSection
from orchestrator.config.model import Api, ClusterConfig
from orchestrator.daemon.alerts.watch import AlertWatch
from orchestrator.daemon.alerts.webhook import Webhook
from orchestrator.daemon.api.batches.store import BatchStore
from orchestrator.daemon.api.connections import raise_open_files
from orchestrator.daemon.api.metrics.page import MetricsPage
from orchestrator.durable import is_full
from orchestrator.errors import DaemonError
from orchestrator.telemetry import get_logger

_log = get_logger(__name__)


def bound_connections(api: Api) -> Api:
    """Return the bounds of connections, as far as the system's bound of open files lets them be."""
    most = raise_open_files(api.max_connections)
    if most < api.max_connections:
        _log.warning("fewer connections than configured: open files are limited", most=most)
    return api.model_copy(update={"max_connections": most})


def open_batches(config: ClusterConfig, state: Path, clock: Clock) -> BatchStore | None:
    """Return what keeps batches in the daemon's directory; None where not wanted. Raises DaemonError."""
    directory = state / "batches"
    if not config.batches.enabled:
        return None
    store = BatchStore(directory, config.batches, clock)
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

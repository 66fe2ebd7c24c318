"""Makes the daemon's own watch of its configuration."""

from __future__ import annotations

from orchestrator.clock import Clock
from orchestrator.config.alerts import AlertsSection
from orchestrator.daemon.alerts.watch import AlertWatch
from orchestrator.daemon.alerts.webhook import Webhook
from orchestrator.daemon.api.metrics.page import MetricsPage


def build_alert_watch(page: MetricsPage, section: AlertsSection, clock: Clock) -> AlertWatch:
    """Return a watch over these metrics."""
    url = section.webhook.get_secret_value()
    return AlertWatch(
        page.read,
        time_factor=section.time_factor,
        every_s=section.every_s,
        webhook=Webhook(url) if url else None,
        clock=clock,
    )

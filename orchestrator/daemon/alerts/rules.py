"""The table of alerts as Prometheus rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from orchestrator.daemon.alerts.expressions import tell_time
from orchestrator.daemon.alerts.table import ALERTS, RECORDS

SHIPPED = Path(__file__).with_name("rules.yaml")
"""The rules as they come with the package."""


def write_rules(time_factor: float = 1.0) -> str:
    """Return a rule file of Prometheus; windows and waits are multiplied by the factor."""
    records = [{"record": name, "expr": figure.tell(by, time_factor)} for name, by, figure in RECORDS]
    alerts: list[dict[str, Any]] = [
        {
            "alert": alert.name,
            "expr": alert.tell(time_factor),
            "for": tell_time(alert.for_s * time_factor),
            "labels": {"severity": alert.severity},
            "annotations": alert.annotate(),
        }
        for alert in ALERTS
    ]
    groups = [{"name": "outrider records", "rules": records}, {"name": "outrider alerts", "rules": alerts}]
    head = "# Written by `outrider alerts rules`; docs/runbook.md tells of each.\n"
    return head + str(yaml.safe_dump({"groups": groups}, sort_keys=False, width=120))

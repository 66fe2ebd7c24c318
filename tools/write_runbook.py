"""Writes docs/runbook.md of the table of alerts.

python -m tools.write_runbook
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.daemon.alerts.expressions import tell_time
from orchestrator.daemon.alerts.table import ALERTS

PAGE = Path(__file__).parents[1] / "docs" / "runbook.md"


def write_runbook() -> str:
    lines = [
        "# Runbook",
        "",
        "Made of the table of alerts in `orchestrator/daemon/alerts/table.py`, by `tools/write_runbook.py`.",
        "[Observability](observability.md#alerts) tells how they get to you. `outrider alerts` shows those that fire.",
        "",
    ]
    for alert in ALERTS:
        lines += [
            f"## {alert.name}",
            "",
            f"Severity {alert.severity}, after {tell_time(alert.for_s)}.",
            "",
            f"- It means: {alert.meaning}",
            f"- It does not mean: {alert.not_meaning}",
            f"- First look: {alert.look}",
            f"- Remedy: {alert.remedy}",
            "",
            "```promql",
            alert.tell(),
            "```",
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_runbook(), encoding="utf-8")

"""`outrider alerts`: what fires now, and the same alerts as rules of Prometheus."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.plain_table import print_lines, print_table

app = typer.Typer(help="Show alerts that fire, or print them as rules of Prometheus.")

TimeFactor = Annotated[
    float, typer.Option("--time-factor", min=0.001, max=100, help="Windows and waits, so many times.")
]


@app.callback(invoke_without_command=True)
@admin_command
def alerts(daemon: Daemon, context: typer.Context) -> None:
    """Show the alerts that fire, and what to do. Needs no Prometheus."""
    if context.invoked_subcommand is None:
        _show(daemon.ask("/admin/alerts"))


@app.command("rules")
def rules(time_factor: TimeFactor = 1.0) -> None:
    """Print recording and alerting rules for Prometheus' `rule_files`."""
    from orchestrator.daemon.alerts.rules import write_rules

    print(write_rules(time_factor), end="")


def _show(answer: dict[str, Any]) -> None:
    shown = [*answer["alerts"], *reversed(answer["ended"])]
    if not shown:
        print_lines("no alert fires")
        return
    rows = []
    for alert in shown:
        of = ", ".join(f"{name} {value}" for name, value in alert["labels"].items())
        value = "-" if alert["value"] is None else f"{alert['value']:.3g}"
        rows.append((alert["alert"], alert["state"], alert["severity"], of, value, alert["since"]))
    print_table(("alert", "state", "severity", "of", "value", "since"), rows)
    firing = {alert["alert"]: alert for alert in answer["alerts"]}
    for name, alert in firing.items():
        lines = [name, f"  {alert['meaning']}", f"  look: {alert['look']}", f"  remedy: {alert['remedy']}"]
        print_lines("\n".join(lines))
    if not firing:
        print_lines("no alert fires now")

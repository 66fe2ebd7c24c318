"""`outrider status`: what runs where, as the daemon says over its admin socket."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import Place, StatusError, query_daemon
from orchestrator.cli.status_show import show_status

# ADR 0068: what a status takes.
_SHORTEST_S = 0.2


@admin_command
def status(
    daemon: Daemon,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=_SHORTEST_S, help="With --watch: seconds from one to the next.")] = 2.0,
) -> None:
    """Show the effective state: model, device, precision, depth, streams, acceptance. With --watch and --json: one line
    of JSON each time."""
    path = daemon.find_place()
    if not watch:
        show_status(path, as_json=daemon.as_json)
    elif daemon.as_json:
        while True:
            print(json.dumps(query_daemon(path)), flush=True)
            time.sleep(interval)
    else:
        _watch_tables(path, interval)


def _watch_tables(path: Place, interval_s: float) -> None:
    """Show the newest state in place; where the daemon is away it says so, and goes on when one is back. Raises
    StatusError where there was none at first."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from orchestrator.cli.status import MOST_ROWS, build_tables

    route = f"/admin/status?most_devices={MOST_ROWS}"

    def render(answer: dict[str, Any], away: str) -> Group:
        now = time.strftime("%H:%M:%S")
        note = Text(away or f"{now}, each {interval_s:g} s; Ctrl-C ends", style="red" if away else "dim")
        return Group(note, *build_tables(answer))

    answer = query_daemon(path, route)
    with Live(render(answer, ""), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            time.sleep(interval_s)
            away = ""
            try:
                answer = query_daemon(path, route)
            except StatusError as error:
                away = f"{time.strftime('%H:%M:%S')}, as it was before: {error}"
            live.update(render(answer, away), refresh=True)

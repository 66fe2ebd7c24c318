"""`outrider top`: the fleet on a screen that keeps itself up to date."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, daemon_command
from orchestrator.cli.daemon_socket import Place, StatusError, query_daemon

INSTALL = "outrider extras install top"
_SHORTEST_S = 0.2  # as of `status --watch`


@daemon_command
def top(
    daemon: Daemon,
    interval: Annotated[float, typer.Option(min=_SHORTEST_S, help="Seconds from one look to the next.")] = 1.0,
) -> None:
    """Watch replicas, drafts, requests and devices. Arrows move, Tab goes to the next table, s sorts by the next
    column, r the other way round, / filters, q quits."""
    try:
        from orchestrator.cli.top_app import TopApp
    except ModuleNotFoundError as error:
        raise StatusError(
            f"`outrider top` needs {error.name}: {INSTALL}; without it `outrider status --watch`"
        ) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise StatusError("`outrider top` needs a terminal; for programs there is `outrider status --watch --json`")
    place = daemon.find_place()
    look_at_fleet(place)  # says in a line where none answers
    TopApp(partial(look_at_fleet, place), interval).run()


def look_at_fleet(place: Place) -> dict[str, Any]:
    """Return a daemon's status, with its live `requests`. Raises StatusError."""
    return {**query_daemon(place), "requests": query_daemon(place, "/admin/requests")["requests"]}

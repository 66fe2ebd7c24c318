"""`outrider requests` and `cancel`: the requests that are live, and ending one."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import name_model
from orchestrator.cli.options import ModelName, Yes, confirm
from orchestrator.plain_table import print_lines, print_table


@admin_command
def requests(daemon: Daemon, model: ModelName = None) -> None:
    """Show the live requests: their state, replica, tokens, draft depth and the name of their key; never what they
    say."""
    answer = daemon.ask(name_model(model, "/admin/requests"))
    if not answer["requests"]:
        print_lines("no request is running")
        return
    several = any("model" in request for request in answer["requests"])
    columns = ("state", "age", "replica", "prompt", "tokens", "depth", "queue", "key")
    rows = []
    for request in answer["requests"]:
        whose = [request["model"]] if several else []
        times = (
            f"{request['age_s']:.1f} s",
            request["replica"] or "-",
            str(request["prompt_tokens"]),
            str(request["tokens"]),
        )
        drafts = (f"{request['depth']:.1f}", f"{request['queue_ms']:.0f} ms", request["key"] or "-")
        rows.append((request["request_id"], *whose, request["state"], *times, *drafts))
    print_table(("id", *(["model"] * several), *columns), rows, unbroken=1)
    print_lines("`outrider explain ID` says why, `outrider cancel ID` ends one")


@admin_command
def cancel(
    daemon: Daemon,
    request: Annotated[str, typer.Argument(metavar="ID", help="As `outrider requests` shows it.")],
    yes: Yes = False,
) -> None:
    """End a live request: its client gets an error that says so, and its place is free at once."""
    daemon.find_place()  # what is wrong with a configuration is said before anything is asked
    confirm(f"end the request {request}", yes=yes)
    answer = daemon.ask("/admin/requests/cancel", {"request": request})
    print(f"cancelled: {', '.join(answer['cancelled'])}")

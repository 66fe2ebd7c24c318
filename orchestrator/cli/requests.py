"""`outrider requests` and `cancel`: the requests that are live, and ending one."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import name_model
from orchestrator.cli.options import (
    ModelName,
    Yes,
    confirm,
)


@admin_command
def requests(daemon: Daemon, model: ModelName = None) -> None:
    """Show the live requests: their state, replica, tokens, draft depth and the name of their key; never what they
    say."""
    answer = daemon.ask(name_model(model, "/admin/requests"))
    from rich.table import Column, Table

    from orchestrator.plain_table import add_row, wide_console

    console = wide_console()
    if not answer["requests"]:
        console.print("no request is running")
        return
    several = any("model" in one for one in answer["requests"])
    columns = ("state", "age", "replica", "prompt", "tokens", "depth", "queue", "key")
    table = Table(Column("id", no_wrap=True), *(["model"] * several), *columns)
    for one in answer["requests"]:
        whose = [one["model"]] if several else []
        times = (f"{one['age_s']:.1f} s", one["replica"] or "-", str(one["prompt_tokens"]), str(one["tokens"]))
        drafts = (f"{one['depth']:.1f}", f"{one['queue_ms']:.0f} ms", one["key"] or "-")
        add_row(table, one["request_id"], *whose, one["state"], *times, *drafts)
    console.print(table)
    console.print("`outrider explain ID` says why, `outrider cancel ID` ends one", markup=False, highlight=False)


@admin_command
def cancel(
    daemon: Daemon,
    request: Annotated[str, typer.Argument(metavar="ID", help="As `outrider requests` shows it.")],
    yes: Yes = False,
) -> None:
    """End a live request: its client gets an error that says so, and its place is free at once."""
    daemon.find()  # what is wrong with a configuration is said before anything is asked
    confirm(f"end the request {request}", yes=yes)
    answer = daemon.ask("/admin/requests/cancel", {"request": request})
    print(f"cancelled: {', '.join(answer['cancelled'])}")

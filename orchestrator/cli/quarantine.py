"""`outrider quarantine`: requests that are refused, for having ended workers or as an operator wants it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer

from orchestrator.cli.daemon_socket import find_daemon, name_model, query_daemon
from orchestrator.cli.options import (
    AdminSocket,
    DaemonConfig,
    DaemonJson,
    DaemonPort,
    DaemonUrl,
    ModelName,
    Yes,
    confirm,
)

app = typer.Typer(help="List the requests that are refused, refuse one, and let them run again.")


@app.command("list")
def list_refused(
    model: ModelName = None,
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    url: DaemonUrl = None,
    as_json: DaemonJson = False,
) -> None:
    """Show each refused request: its digest, how many workers it ended, and until when it is refused."""
    answer = query_daemon(find_daemon(url, socket, config, port), name_model(model, "/admin/quarantine"))
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    from rich.table import Column, Table

    from orchestrator.plain_table import add_row, wide_console

    console = wide_console()
    if not answer["quarantined"]:
        console.print("no request is refused")
        return
    several = any("model" in one for one in answer["quarantined"])
    columns = (*(["model"] * several), "request", "prompt tokens", "workers ended", "until", "last end")
    table = Table(Column("digest", no_wrap=True), *columns)
    for one in answer["quarantined"]:
        until = datetime.fromtimestamp(one["until_s"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        counts = (str(one["prompt_tokens"]), str(one["deaths"]))
        whose = [one["model"]] if several else []
        add_row(table, one["digest"], *whose, one["request_id"], *counts, until, one["cause"])
    console.print(table)
    console.print("`outrider quarantine release DIGEST` lets one run again", markup=False, highlight=False)


@app.command()
def add(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The id of a request of late, or a digest.")],
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, max=10080.0, help="For how long.")] = 60.0,
    yes: Yes = False,
    model: ModelName = None,
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    url: DaemonUrl = None,
    as_json: DaemonJson = False,
) -> None:
    """Refuse requests like this one: the same prompt, sampled in the same way. Those that run are ended."""
    place = find_daemon(url, socket, config, port)
    confirm(f"refuse requests like {request} for {minutes:g} minutes, and end those that run", yes=yes)
    asked = {"request": request, "minutes": minutes, "model": model}
    answer = query_daemon(place, "/admin/quarantine/add", asked)
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    digest = answer["quarantined"][0]["digest"]
    print(f"refused: {digest}; `outrider quarantine release {digest}` lets it run again")


@app.command()
def release(
    digests: Annotated[list[str] | None, typer.Argument(help="Digests as `list` shows them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Release every request.")] = False,
    model: ModelName = None,
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    url: DaemonUrl = None,
    as_json: DaemonJson = False,
) -> None:
    """Let refused requests run again."""
    if bool(digests) == every:
        raise typer.BadParameter("name the digests to release, or --all")
    body = {"digests": digests or [], "model": model}
    answer = query_daemon(find_daemon(url, socket, config, port), "/admin/quarantine/release", body)
    if as_json:
        print(json.dumps(answer, indent=1))
    else:
        print(f"released: {', '.join(answer['released']) or 'none was refused'}")

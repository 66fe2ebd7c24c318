"""`outrider quarantine`: requests that are refused, for having ended workers or as an operator wants it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import name_model
from orchestrator.cli.options import ModelName, Yes, confirm
from orchestrator.plain_table import print_lines, print_table

app = typer.Typer(help="List the requests that are refused, refuse one, and let them run again.")


@app.command("list")
@admin_command
def list_refused(daemon: Daemon, model: ModelName = None) -> None:
    """Show each refused request: its digest, how many workers it ended, and until when it is refused."""
    answer = daemon.ask(name_model(model, "/admin/quarantine"))
    if not answer["quarantined"]:
        print_lines("no request is refused")
        return
    several = any("model" in refused for refused in answer["quarantined"])
    columns = (*(["model"] * several), "request", "prompt tokens", "workers ended", "until", "last end")
    rows = []
    for refused in answer["quarantined"]:
        until = datetime.fromtimestamp(refused["until_s"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        counts = (str(refused["prompt_tokens"]), str(refused["deaths"]))
        whose = [refused["model"]] if several else []
        rows.append((refused["digest"], *whose, refused["request_id"], *counts, until, refused["cause"]))
    print_table(("digest", *columns), rows, unbroken=1)
    print_lines("`outrider quarantine release DIGEST` lets one run again")


@app.command()
@admin_command
def add(
    daemon: Daemon,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The id of a request of late, or a digest.")],
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, max=10080.0, help="For how long.")] = 60.0,
    yes: Yes = False,
    model: ModelName = None,
) -> None:
    """Refuse requests like this one: the same prompt, sampled in the same way. Those that run are ended."""
    daemon.find_place()  # what is wrong with a configuration is said before anything is asked
    confirm(f"refuse requests like {request} for {minutes:g} minutes, and end those that run", yes=yes)
    body = {"request": request, "minutes": minutes, "model": model}
    answer = daemon.ask("/admin/quarantine/add", body)
    digest = answer["quarantined"][0]["digest"]
    print(f"refused: {digest}; `outrider quarantine release {digest}` lets it run again")


@app.command()
@admin_command
def release(
    daemon: Daemon,
    digests: Annotated[list[str] | None, typer.Argument(help="Digests as `list` shows them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Release every request.")] = False,
    model: ModelName = None,
) -> None:
    """Let refused requests run again."""
    if bool(digests) == every:
        raise typer.BadParameter("name the digests to release, or --all")
    body = {"digests": digests or [], "model": model}
    answer = daemon.ask("/admin/quarantine/release", body)
    print(f"released: {', '.join(answer['released']) or 'none was refused'}")

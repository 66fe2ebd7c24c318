"""`outrider requests` and `cancel`: the requests that are live, and ending one."""

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

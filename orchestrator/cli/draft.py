"""`outrider draft`: which drafters propose tokens, and letting other ones do it while requests run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import name_model
from orchestrator.cli.options import ModelName
from orchestrator.plain_table import print_lines, print_table

app = typer.Typer(help="Show which drafters propose tokens, and choose among them while requests run.")
_Engine = Annotated[
    int | None, typer.Option("--replica", "--engine", min=0, help="Of this replica, by its number; else of all.")
]
_OFF = "off"


@app.command("list")
@admin_command
def list_drafters(daemon: Daemon, model: ModelName = None) -> None:
    """Show the drafters of each replica: whether they propose, and how much of what they proposed was right."""
    _show(daemon.ask(name_model(model, "/admin/drafters")))


@app.command()
@admin_command
def swap(
    daemon: Daemon,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Drafters as `list` shows them, or `off`.")],
    engine: _Engine = None,
    model: ModelName = None,
) -> None:
    """Let only these drafters propose, from the next round on, for requests that run too. Outputs stay the same."""
    if _OFF in names and len(names) > 1:
        raise typer.BadParameter("`off` stands alone: it lets no drafter propose")
    chosen = [] if names == [_OFF] else names
    _choose(daemon, chosen, engine, model)


@app.command()
@admin_command
def reset(daemon: Daemon, engine: _Engine = None, model: ModelName = None) -> None:
    """Let all drafters propose that cluster.yaml has."""
    _choose(daemon, None, engine, model)


def _choose(daemon: Daemon, names: list[str] | None, engine: int | None, model: str | None) -> None:
    _show(daemon.ask("/admin/drafters", {"names": names, "engine": engine, "model": model}))


def _show(answer: dict[str, Any]) -> None:
    several = any("model" in replica for replica in answer["replicas"])
    rows = []
    for replica in answer["replicas"]:
        chosen = "as configured" if replica["chosen"] is None else ", ".join(replica["chosen"]) or _OFF
        whose = [replica["model"]] if several else []
        for drafter in replica["drafters"] or [None]:
            cells = ("-",) * 4 if drafter is None else _describe_drafter(drafter)
            rows.append((str(replica["engine"]), replica["replica"], *whose, chosen, *cells))
    models = ["model"] * several
    print_table(("engine", "replica", *models, "chosen", "drafter", "method", "state", "accepted"), rows)
    print_lines("`outrider draft swap NAME|off` and `draft reset` change it, from the next round on")


def _describe_drafter(drafter: dict[str, Any]) -> tuple[str, str, str, str]:
    drafted = drafter["drafted"]
    rate = f"{drafter['accepted'] / drafted:.0%} of {drafted}" if drafted else "-"
    state = "rests" if drafter["rests"] else drafter["state"]
    state += f": {why}" if (why := drafter["rests"] or drafter["reason"]) else ""
    return drafter["name"], drafter["method"], state, rate

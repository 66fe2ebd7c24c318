"""`outrider failover`: let another replica, or a standby, go on with a worker's requests; and back."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.options import ModelName, Yes, confirm


@admin_command
def failover(
    daemon: Daemon,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="`target`, or `target-0` of several replicas.")],
    to: Annotated[str | None, typer.Option("--to", help="The replica or the standby that goes on.")] = None,
    back: Annotated[bool, typer.Option("--back", help="Let the worker have its requests again.")] = False,
    yes: Yes = False,
    model: ModelName = None,
) -> None:
    """Move a worker's requests to another replica or to a standby, which says the same tokens, and keep new ones from
    it. A standby is loaded first where it is not; until then the worker goes on. --back undoes it."""
    if (to is None) is not back:
        raise typer.BadParameter("name the replica or the standby with --to, or say --back")
    daemon.find_place()  # what is wrong with a configuration is said before anything is asked
    what = f"move the requests of {worker} to {to}" if to else f"give {worker} its requests back"
    confirm(what, yes=yes)
    daemon.ask("/admin/failover", {"worker": worker, "to": to, "model": model})
    if to:
        print(
            f"{worker} gives its requests to {to}; `outrider status` shows where they are, and "
            f"`outrider failover {worker} --back` undoes it"
        )
    else:
        print(f"{worker} has its place again")

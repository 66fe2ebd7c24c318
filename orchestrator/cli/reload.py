"""`outrider reload`: let a running daemon take its cluster.yaml as it is now, without dropping a stream."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import DaemonRefused
from orchestrator.plain_table import print_lines, print_table


@admin_command
def reload(
    daemon: Daemon,
    check: Annotated[bool, typer.Option("--check", help="Show what would change, and change nothing.")] = False,
) -> None:
    """Let the daemon take its cluster.yaml as it is now; running streams go on.

    The file is checked whole. One that cannot be used changes nothing, and the exit code is 1.
    """
    try:
        found = daemon.ask("/admin/reload", {"check": check}, answer_s=None)
    except DaemonRefused as error:
        told = "" if "nothing has changed" in str(error) else "\nnothing has changed; mend the file and reload again"
        raise DaemonRefused(f"{error}{told}") from error
    if found["changes"]:
        rows = [(one["key"], one["before"], one["after"], describe_effect(one)) for one in found["changes"]]
        print_table(("key", "before", "after", "takes effect"), rows)
    print_lines(*list_lines(found, check=check), wraps=False)


def describe_effect(change: dict[str, Any]) -> str:
    """Return how a change takes effect, and why so where that is not its key's usual way."""
    return f"{change['effect']}: {change['why']}" if change["why"] else str(change["effect"])


def list_lines(found: dict[str, Any], *, check: bool) -> list[str]:
    """Return what stands below the table: what happens to workers and plan, and what comes next."""
    if not found["changes"] and not found["workers"]:
        return [f"{found['file']}: nothing has changed"]
    several = len(found["workers"]) > 1
    lines = [f"{one['model']}: {line}" if several else line for one in found["workers"] for line in one["told"]]
    waiting = found["waiting"]
    done = len(found["changes"]) - waiting
    if check:
        lines.append(f"{found['file']}: ok; nothing has changed yet. Next: outrider reload")
    elif done:
        lines.append(
            f"{found['file']}: {done} {'changes' if done > 1 else 'change'} took effect; no stream was dropped"
        )
    elif found.get("replaced"):
        lines.append(f"{found['file']}: the models that are there now are served; no stream was dropped")
    if waiting:
        one = waiting == 1
        lines.append(
            f"{waiting} {'change waits' if one else 'changes wait'} for a restart of the daemon: "
            "systemctl restart outrider, or stop it and start it again"
        )
    return lines

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
        answer = daemon.ask("/admin/reload", {"check": check}, answer_s=None)
    except DaemonRefused as error:
        more = "" if "nothing has changed" in str(error) else "\nnothing has changed; mend the file and reload again"
        raise DaemonRefused(f"{error}{more}") from error
    if answer["changes"]:
        rows = []
        for change in answer["changes"]:
            effect = f"{change['effect']}: {change['why']}" if change["why"] else str(change["effect"])
            rows.append((change["key"], change["before"], change["after"], effect))
        print_table(("key", "before", "after", "takes effect"), rows)
    print_lines(*list_lines(answer, check=check), wraps=False)


def list_lines(answer: dict[str, Any], *, check: bool) -> list[str]:
    """Return what stands below the table: what happens to workers and plan, and what comes next."""
    file, workers = answer["file"], answer["workers"]
    if not answer["changes"] and not workers:
        return [f"{file}: nothing has changed"]
    waiting = answer["waiting"]
    whose = [f"{worker['model']}: " * (len(workers) > 1) for worker in workers]
    lines = [f"{of}{line}" for of, worker in zip(whose, workers, strict=True) for line in worker["told"]]
    done = len(answer["changes"]) - waiting
    if check:
        lines.append(f"{file}: ok; nothing has changed yet. Next: outrider reload")
    elif done:
        lines.append(f"{file}: {done} change{'s' * (done > 1)} took effect; no stream was dropped")
    elif answer.get("replaced"):
        lines.append(f"{file}: the models that are there now are served; no stream was dropped")
    if waiting:
        what = "change waits" if waiting == 1 else "changes wait"
        way_out = "systemctl restart outrider, or stop it and start it again"
        lines.append(f"{waiting} {what} for a restart of the daemon: {way_out}")
    return lines

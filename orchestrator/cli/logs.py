"""`outrider logs`: the running daemon's own log, as far back as it keeps it."""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import typer

from orchestrator.cli.admin_command import Daemon, daemon_command
from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.cli.options import complete_worker

# ADR 0068: asked each half second, as a stream would hold a connection.
_FOLLOW_S = 0.5
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # units
_COLOURS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "red"}
_FIRST = ("timestamp", "level", "event", "logger")
Level = Literal["debug", "info", "warning", "error"]


@daemon_command
def logs(
    daemon: Daemon,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    since: Annotated[
        str, typer.Option(metavar="WHEN", help="No older: 90s, 10m, 2h, 1d, or a time as in 2026-11-23T18:00.")
    ] = "",
    level: Annotated[Level, typer.Option(help="No less severe.")] = "debug",
    request: Annotated[str, typer.Option(metavar="ID", help="Of a request: X-Request-Id, or the answer's id.")] = "",
    worker: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="About a worker, as `outrider status` names it.", autocompletion=complete_worker
        ),
    ] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="The newest ones, at most.")] = 200,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, as the daemon wrote it.")] = False,
) -> None:
    """Show the daemon's log, of which it keeps the newest 8 MiB in memory. It has no prompts, answers and keys."""
    path = daemon.find_place()
    chosen: dict[str, Any] = {"level": level, "request": request, "worker": worker}
    age = {"last_s": read_age_s(since, time.time())} if since else {}
    show = (lambda entry: print(json.dumps(entry))) if as_json else build_printer()
    page = query_daemon(path, f"/admin/logs?{urlencode({**chosen, 'most': lines, **age})}")
    for note in describe_page(page):
        print(f"outrider: {note}", file=sys.stderr)
    while True:
        for entry in page["entries"]:
            show(entry)
        if not follow:
            return
        sys.stdout.flush()
        time.sleep(_FOLLOW_S)
        pid, after = page["pid"], page["next_after"]
        page = query_daemon(path, f"/admin/logs?{urlencode({**chosen, 'most': 10_000, 'after': after})}")
        if page["pid"] != pid:
            print("outrider: the daemon was started again", file=sys.stderr)
            page = query_daemon(path, f"/admin/logs?{urlencode({**chosen, 'most': 10_000})}")


def read_age_s(since: str, now_s: float) -> float:
    """Return how long ago a time was, in seconds: a span as in 10m, or ISO 8601. Raises BadParameter."""
    if span := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", since):
        return float(span[1]) * _UNIT_S[span[2]]
    try:
        return max(0.0, now_s - datetime.fromisoformat(since).timestamp())
    except ValueError:
        raise typer.BadParameter(f"--since {since!r}: write 90s, 10m, 2h, 1d, or 2026-11-23T18:00") from None


def describe_page(page: dict[str, Any]) -> list[str]:
    notes = []
    if page["left_out"]:
        notes.append(f"{page['left_out']} older lines are not shown; --lines shows more")
    if page["forgotten"]:
        notes.append(f"the daemon has let go of its {page['forgotten']} oldest lines")
    if page["unit"]:
        notes.append(f"the journal has all lines, those of earlier daemons too: journalctl -u {page['unit']} -o cat")
    return notes


def build_printer() -> Any:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)

    def tell(entry: dict[str, Any]) -> None:
        made = datetime.fromisoformat(entry["timestamp"]).replace(tzinfo=UTC).astimezone()
        level = str(entry["level"])
        line = Text(f"{made:%H:%M:%S}.{made.microsecond // 1000:03d} ")
        line.append(f"{level:<8}", style=_COLOURS.get(level, ""))
        line.append(str(entry["event"]), style="bold" if level in ("error", "critical") else "")
        for key, value in entry.items():
            if key not in _FIRST and value is not None:
                line.append(f" {key}=", style="dim")
                line.append(value if isinstance(value, str) else json.dumps(value))
        console.print(line)

    return tell

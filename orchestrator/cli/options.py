"""What several commands share: options, the question before something is changed, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from orchestrator.cli.daemon_socket import fetch_page
from orchestrator.config.socket_place import guess_socket
from orchestrator.errors import OutriderError

_WITHIN_S: Final = 0.5  # what whoever presses a key bears. Not tuned.
KINDS: Final = ("device", "host", "worker")


def complete_worker(ctx: typer.Context, incomplete: str) -> list[str]:
    return _begin_with(incomplete, list_names(_ask(ctx), "worker"))


def complete_part(ctx: typer.Context, incomplete: str) -> list[str]:
    status = _ask(ctx)
    return _begin_with(incomplete, [name for kind in KINDS for name in list_names(status, kind)])


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    return _begin_with(incomplete, [target["model"] for target in _list_targets(_ask(ctx)) if target["model"]])


def list_names(status: dict[str, Any] | None, kind: str) -> list[str]:
    names: list[str] = []
    for target in _list_targets(status):
        if kind == "worker":
            names += [part["name"] for key in ("replicas", "standbys", "drafts") for part in target[key]]
        elif kind == "device":
            names += [device["name"] for device in target["devices"]]
        elif kind == "host":
            names += [host["name"] or host["host"] for host in target["hosts"]]
            names += [device["name"].partition("/")[0] for device in target["devices"]]
    return sorted(set(names))


def _list_targets(status: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if status is None else [status, *status["models"]]


def _begin_with(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _ask(ctx: typer.Context) -> dict[str, Any] | None:
    """Return the status of the daemon that the command line is about; None where none answers at once."""
    given = ctx.params
    try:
        path = given.get("socket") or guess_socket(given.get("config"), given.get("port"))
        status: dict[str, Any] | None = (
            None if path is None else json.loads(fetch_page(path, "/admin/status", answer_s=_WITHIN_S))
        )
    except (OutriderError, ValueError):
        return None
    return status


ConfigFile = Annotated[Path | None, typer.Option("--config", help="cluster.yaml; else the default places.")]
CheckedFile = Annotated[Path | None, typer.Argument(help="Else ./cluster.yaml, /etc/outrider/cluster.yaml.")]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Of several models, the one of this name.", autocompletion=complete_model),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def confirm(what: str, *, yes: bool) -> None:
    """Ask whether `what` is to be done; without a terminal --yes has to say so. Raises typer's errors."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"this would {what}; say --yes to have it done")
    typer.confirm(f"This will {what}. Go on?", abort=True, err=True)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def end_with_json(data: Any, *, wanted: bool) -> None:
    """With --json print plain data for programs, and the command is over."""
    if wanted:
        print_json(data)
        raise typer.Exit


def show_progress(work: Callable[[Callable[[str, float], None]], dict[str, Any]]) -> dict[str, Any]:
    """Run work that tells its progress, show that, and return its result."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:

        def progress(stage: str, fraction: float) -> None:
            status.update(f"{stage} ..." if fraction < 0 else f"{stage}: {fraction:.0%}")

        return work(progress)

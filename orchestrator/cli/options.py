"""What several commands share: options, the question before something is changed, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.live_names import complete_model

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
    """Print plain data for programs."""
    print(json.dumps(data, indent=1))


def show_progress(work: Callable[[Callable[[str, float], None]], dict[str, Any]]) -> dict[str, Any]:
    """Run work that tells its progress, show that, and return its result."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:

        def progress(stage: str, fraction: float) -> None:
            status.update(f"{stage} ..." if fraction < 0 else f"{stage}: {fraction:.0%}")

        return work(progress)

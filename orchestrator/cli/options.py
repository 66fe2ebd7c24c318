"""Options that several commands have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.live_names import complete_model

ConfigFile = Annotated[Path | None, typer.Option("--config", help="cluster.yaml; else the default places.")]
CheckedFile = Annotated[Path | None, typer.Argument(help="Else ./cluster.yaml, /etc/outrider/cluster.yaml.")]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Of several models, the one of this name.", autocompletion=complete_model),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def confirm(what: str, *, yes: bool) -> None:
    """Ask whether `what` is to be done; without a terminal --yes has to say so. Raises typer's errors."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"this would {what}; say --yes to have it done")
    typer.confirm(f"This will {what}. Go on?", abort=True, err=True)

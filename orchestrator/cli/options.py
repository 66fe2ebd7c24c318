"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Option("--config", help="cluster.yaml; else the default places.")]
CheckedFile = Annotated[Path | None, typer.Argument(help="Else ./cluster.yaml, /etc/outrider/cluster.yaml.")]
DaemonConfig = Annotated[Path | None, typer.Option("--config", help="The daemon's cluster.yaml, to find its socket.")]
DaemonPort = Annotated[int | None, typer.Option("--port", help="The daemon's API port, where it is not api.port.")]
AdminSocket = Annotated[Path | None, typer.Option("--socket", help="The admin socket itself.")]
DaemonJson = Annotated[bool, typer.Option("--json", help="Print what the daemon said.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Of several models, the one of this name.")]

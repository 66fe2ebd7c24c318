"""`outrider serve`: run the daemon in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[
        Path | None, typer.Option(help="cluster.yaml; else ./cluster.yaml, /etc/outrider/cluster.yaml.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Listen here instead of api.host.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Instead of api.port; 0 takes a free one.")] = None,
) -> None:
    """Serve the configured model through an OpenAI-compatible API; SIGTERM finishes running streams and exits 0."""
    import asyncio

    from orchestrator.config.access_checks import find_keyless
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.daemon import Daemon
    from orchestrator.errors import ConfigError
    from orchestrator.telemetry import setup_logging

    path = config or default_config_path()
    loaded = load_config(path)
    changes = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if changes:
        loaded = loaded.model_copy(update={"api": loaded.api.model_copy(update=changes)})
    if host is not None and (problem := find_keyless(loaded.api, host)):
        raise ConfigError(f"--host: {problem}")
    setup_logging(loaded.logging.level, loaded.logging.format)

    async def run() -> None:
        await Daemon(loaded, path).run()

    asyncio.run(run())

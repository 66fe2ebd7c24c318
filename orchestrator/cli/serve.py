"""`outrider serve`: run the daemon in the foreground."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from orchestrator.config.model import ClusterConfig


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Serve this model without a cluster.yaml: whatever model.source takes, as in hf:ORG/NAME or FILE.gguf."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="cluster.yaml; else ./cluster.yaml, /etc/outrider/cluster.yaml.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Listen here instead of api.host.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Instead of api.port; 0 takes a free one.")] = None,
) -> None:
    """Serve the configured model through an OpenAI-compatible API; SIGTERM finishes running streams and exits 0.

    Ctrl-C does that too, and once more ends at once.
    """
    gc.disable()  # what is imported stays: to look through it again and again takes a tenth of the start
    import asyncio

    from orchestrator.config.access_checks import find_keyless
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.daemon.bootstrap.early_start import start_early
    from orchestrator.errors import ConfigError
    from orchestrator.machine.core_dumps import limit_core_dumps
    from orchestrator.telemetry import LogRing, setup_logging

    if model is not None and config is not None:
        raise typer.BadParameter("MODEL stands for a cluster.yaml: give one of them")
    changes: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    text = ""
    if model is not None:
        from orchestrator.config.without_file import configure_model

        served = configure_model(model, Path.cwd(), changes)
        loaded, path, text = served.config, served.path, served.text
    else:
        path = config or default_config_path()
        loaded = load_config(path)
        if changes:
            loaded = loaded.model_copy(update={"api": loaded.api.model_copy(update=changes)})
    if host is not None and (problem := find_keyless(loaded.api, host)):
        raise ConfigError(f"--host: {problem}")
    limit_core_dumps()
    ring = LogRing(hides_words=loaded.logging.prompts)
    setup_logging(loaded.logging.level, loaded.logging.format, ring=ring)
    if text:
        _tell_text(text, loaded)

    async def run() -> None:
        async with start_early(loaded, path) as early:
            from orchestrator.daemon.api.admin.daemon import KeptLog
            from orchestrator.daemon.bootstrap.reload import FileStanding
            from orchestrator.daemon.run import Daemon
            from orchestrator.daemon.systemd.journal import find_journal_unit

            gc.freeze()
            gc.enable()
            log = KeptLog(ring, find_journal_unit())
            await Daemon(loaded, FileStanding(path, changes, is_file=not text), early, log).run()

    with suppress(asyncio.CancelledError):  # it was told to stop before it had begun
        asyncio.run(run())


def _tell_text(text: str, config: ClusterConfig) -> None:
    """Say which cluster.yaml the command stands for: to people as they would write it, to programs in the log."""
    from orchestrator.config.socket_place import find_config_path
    from orchestrator.daemon.bootstrap.banner import is_for_people
    from orchestrator.telemetry import get_logger

    unread = find_config_path()
    if is_for_people(config, sys.stderr):
        beside = f" ({unread} is not read)" if unread is not None else ""
        sys.stderr.write(f"outrider: serves as with this cluster.yaml{beside}:\n\n{text}\n")
        sys.stderr.flush()
    else:
        left = {"not_read": str(unread)} if unread is not None else {}
        get_logger(__name__).info("serves a model without a file", cluster_yaml=text, **left)

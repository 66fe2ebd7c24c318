"""`outrider config show --effective`: each value, where it came from, and what a running daemon has instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.options import print_json
from orchestrator.plain_table import print_lines, print_table

if TYPE_CHECKING:  # loaded where a configuration is read
    from orchestrator.config.effective import Setting
    from orchestrator.config.model import ClusterConfig


def show_effective(config: ClusterConfig, path: Path, socket: Path | None, *, as_json: bool) -> None:
    """Print the values of a file. Of a daemon of it that runs, those that are others there. Raises ConfigError."""
    from orchestrator.config.effective import list_settings
    from orchestrator.config.load import parse_config
    from orchestrator.config.source_text import read_text

    settings = list_settings(config, path, parse_config(read_text(path), path)[1])
    running = _ask_daemon(config, socket)
    if as_json:
        rows = [
            {
                "key": setting.name,
                "value": setting.value,
                "origin": setting.origin,
                "running": _find_other(setting, running),
            }
            for setting in settings
        ]
        print_json({"file": str(path), "daemon": running is not None, "values": rows})
        return
    _print(settings, path, running)


def _print(settings: list[Setting], path: Path, running: dict[str, str] | None) -> None:
    rows = []
    for setting in settings:
        other = _find_other(setting, running)
        more = [] if running is None else [other if other is not None else ""]
        rows.append((setting.name, setting.value, setting.origin, *more))
    print_table(("key", "value", "from", *(["runs now"] if running is not None else [])), rows)
    count = sum(_find_other(setting, running) is not None for setting in settings)
    if running is None:
        line = "no daemon of this file runs here, or none answers"
    elif count:
        line = f"{count} values differ from those that run: `outrider reload --check` says how they take effect"
    else:
        line = f"the daemon runs {path} as it is"
    print_lines(line, wraps=False)


def _find_other(setting: Setting, running: dict[str, str] | None) -> str | None:
    """Return what runs instead of a value; None where it is the same, or no daemon was asked."""
    if running is None:
        return None
    now = running.get(setting.name, "(not there)")
    derived = not now and setting.origin != "default"  # left empty there, too: it comes out as here
    return None if now == setting.value or derived else now


def _ask_daemon(config: ClusterConfig, socket: Path | None) -> dict[str, str] | None:
    """Return the values that a daemon runs; None where none answers."""
    from orchestrator.cli.daemon_socket import StatusError, query_daemon
    from orchestrator.config.load import admin_socket_path

    try:
        answer = query_daemon(socket or admin_socket_path(config, config.api.port), "/admin/configuration")
    except StatusError:
        return None
    values: dict[str, str] = answer["values"]
    flags = {key: f"{values[key]} (--{key.partition('.')[2]})" for key in answer["flags"]}
    return {**values, **flags}

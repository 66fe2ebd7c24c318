"""`outrider config check`, `config show` and `config schema`."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import CheckedFile, end_with_json, print_json
from orchestrator.plain_table import add_row, print_lines, print_table

if TYPE_CHECKING:  # loaded where a configuration is read
    from orchestrator.config.effective import Setting
    from orchestrator.config.model import ClusterConfig

app = typer.Typer(no_args_is_help=True, help="Check and show a cluster.yaml; print its schema.")

ValuesJson = Annotated[bool, typer.Option("--json", help="Print the effective values as JSON.")]


@app.command()
def check(
    file: CheckedFile = None,
    as_json: ValuesJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every effective value, too.")] = False,
) -> None:
    """Check keys, types, units, ranges and files, and whether this machine has the devices and can write the store.

    Libraries that a runtime or a format of weights needs here are looked for, too.

    Chat templates are tried on a plain chat, and the Ray of cluster.address is looked for. What fails there is told on
    standard error, and is no error. So is a KV cache of which a target can have no more than a half or a quarter, and
    drafts that are left off, as the model's state cannot be rolled back.

    No model is loaded. The last line says what was checked, and what was not.
    """
    from rich.console import Console
    from rich.text import Text

    from orchestrator.config.load import default_config_path, list_draft_notes, load_config, parse_config
    from orchestrator.config.source_text import read_text
    from orchestrator.daemon.bootstrap.disk_fit import list_disk_notes
    from orchestrator.daemon.bootstrap.memory_fit import list_memory_notes
    from orchestrator.daemon.bootstrap.readiness import check_readiness
    from orchestrator.daemon.bootstrap.template_faults import list_template_faults

    path = file or default_config_path()
    config = load_config(path)
    lines = parse_config(read_text(path), path)[1]
    readiness = check_readiness(config, path, lines)
    notes = [*list_memory_notes(config, path, lines), *list_disk_notes(config, path, lines)]
    notes += list_draft_notes(config, path, lines)
    for line in (*readiness.warnings, *notes, *list_template_faults(config, path, lines)):
        sys.stderr.write(f"outrider: {line}\n")
    if as_json:
        print(config.model_dump_json(indent=1))
        return
    if verbose:
        _print(config)
    line = f"{path}: ok (checked: keys, values, sources; {'; '.join(readiness.checked)})"
    Console().print(Text(line, style="green"), soft_wrap=True)


@app.command()
def show(
    file: CheckedFile = None,
    as_json: ValuesJson = False,
    effective: Annotated[
        bool,
        typer.Option("--effective", help="Also print where each value came from, and what a daemon runs instead."),
    ] = False,
    socket: Annotated[
        Path | None, typer.Option("--socket", help="With --effective: the admin socket of the daemon to compare with.")
    ] = None,
) -> None:
    """Print every effective value, the defaults among them."""
    from orchestrator.config.load import default_config_path, load_config

    path = file or default_config_path()
    config = load_config(path)
    if effective:
        _show_effective(config, path, socket, as_json=as_json)
    elif as_json:
        print(config.model_dump_json(indent=1))
    else:
        _print(config)


@app.command()
def schema() -> None:
    """Print the JSON Schema of cluster.yaml, for editors."""
    from orchestrator.config.schema import json_schema

    print_json(json_schema())


def _print(config: ClusterConfig) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value")
    for section, content in config:
        further = [row for target in config.targets[1:] for row in _list_further(target)]
        for row in further if section == "models" else _flat(section, content):
            add_row(table, *row)
    Console().print(table)


def _list_further(target: ClusterConfig) -> list[tuple[str, str]]:
    from orchestrator.config.further_target import OWN_KEYS
    from orchestrator.config.source_text import format_place

    root = format_place(("models", target.number - 1))
    rows = _flat(root, target.model)
    for section, keys in OWN_KEYS.items():
        content = getattr(target, section)
        parts = {key: getattr(content, key) for key in keys} or {section: content}
        rows += [row for key, part in parts.items() for row in _flat(f"{root}.{key}", part)]
    return rows


def _flat(name: str, content: Any) -> list[tuple[str, str]]:
    from pydantic import BaseModel, ByteSize

    from orchestrator.config.schema import size_text

    if isinstance(content, BaseModel):
        return [row for key, value in content for row in _flat(f"{name}.{key}", value)]
    if isinstance(content, tuple):
        rows = [row for index, value in enumerate(content) for row in _flat(f"{name}[{index}]", value)]
        return rows or [(name, "[]")]
    if isinstance(content, ByteSize):
        return [(name, size_text(content))]
    return [(name, str(content.value if isinstance(content, Enum) else content))]


def _show_effective(config: ClusterConfig, path: Path, socket: Path | None, *, as_json: bool) -> None:
    """Print the values of a file. Of a daemon of it that runs, those that are others there. Raises ConfigError."""
    from orchestrator.config.effective import list_settings
    from orchestrator.config.load import parse_config
    from orchestrator.config.source_text import read_text

    settings = list_settings(config, path, parse_config(read_text(path), path)[1])
    running = _ask_daemon(config, socket)
    rows = [(each.name, each.value, each.origin, _find_other(each, running)) for each in settings]
    values = [dict(zip(("key", "value", "origin", "running"), row, strict=True)) for row in rows]
    end_with_json({"file": str(path), "daemon": running is not None, "values": values}, wanted=as_json)
    columns = ("key", "value", "from", "runs now")[: 3 if running is None else 4]
    print_table(columns, [[cell or "" for cell in row[: len(columns)]] for row in rows])
    count = sum(other is not None for *_, other in rows)
    if running is None:
        line = "no daemon of this file runs here, or none answers"
    elif count:
        line = f"{count} values differ from those that run: `outrider reload --check` says how they take effect"
    else:
        line = f"the daemon runs {path} as it is"
    print_lines(line, wraps=False)


def _find_other(setting: Setting, running: dict[str, str] | None) -> str | None:
    if running is None:
        return None
    now = running.get(setting.name, "(not there)")
    derived = not now and setting.origin != "default"  # left empty there, too: it comes out as here
    return None if now == setting.value or derived else now


def _ask_daemon(config: ClusterConfig, socket: Path | None) -> dict[str, str] | None:
    from orchestrator.cli.daemon_socket import StatusError, query_daemon
    from orchestrator.config.load import admin_socket_path

    try:
        answer = query_daemon(socket or admin_socket_path(config, config.api.port), "/admin/configuration")
    except StatusError:
        return None
    values: dict[str, str] = answer["values"]
    flags = {key: f"{values[key]} (--{key.partition('.')[2]})" for key in answer["flags"]}
    return {**values, **flags}

"""`outrider config check` and `outrider config schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.config.load import default_config_path, load_config

app = typer.Typer(no_args_is_help=True, help="Check a cluster.yaml; print its schema.")


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="Else ./cluster.yaml, /etc/outrider/cluster.yaml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the effective values as JSON.")] = False,
) -> None:
    """Check keys, types, units, ranges and files; print the effective values."""
    path = file or default_config_path()
    values = load_config(path).model_dump(mode="json")
    if as_json:
        print(json.dumps(values, indent=1))
        return
    _print(path, values)


@app.command()
def schema() -> None:
    """Print the JSON Schema of cluster.yaml, for editors."""
    from orchestrator.config.schema import json_schema

    print(json.dumps(json_schema(), indent=1))


def _print(path: Path, values: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value")
    for section, content in values.items():
        for name, row in _flat(section, content):
            table.add_row(name, row)
    console = Console()
    console.print(table)
    console.print(f"{path}: ok", style="green", highlight=False)


def _flat(name: str, content: Any) -> list[tuple[str, str]]:
    if isinstance(content, dict):
        return [row for key, value in content.items() for row in _flat(f"{name}.{key}", value)]
    if isinstance(content, list):
        return [row for index, value in enumerate(content) for row in _flat(f"{name}[{index}]", value)]
    return [(name, str(content))]

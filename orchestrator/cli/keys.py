"""`outrider keys`: make, list and revoke API keys. A running daemon takes a change within about a second."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import ConfigFile, Yes, confirm, end_with_json
from orchestrator.plain_table import print_lines, print_table

if TYPE_CHECKING:
    from orchestrator.config.keys_file import KeyRecord

app = typer.Typer(help="Make, list and revoke API keys. A running daemon takes a change within a second or two.")

_File = Annotated[Path | None, typer.Option("--file", help="The file of keys; else api.keys_file of cluster.yaml.")]
_Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, '.', '_', '-'.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", help="inference, batches, metrics, admin; several times for several. Else all but admin."
        ),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Requests at a time; 0: limits.max_requests_per_key.")
    ] = 0,
    max_tokens_per_minute: Annotated[
        int, typer.Option(min=0, max=1_000_000_000, help="0: limits.max_tokens_per_minute_per_key.")
    ] = 0,
    file: _File = None,
    config: ConfigFile = None,
    as_json: _Json = False,
) -> None:
    """Make a key and print it. It is shown this once: the file has its digest alone."""
    from orchestrator.config.keys_change import create_key
    from orchestrator.config.keys_file import SCOPES, USUAL_SCOPES

    unknown = set(scope or []) - set(SCOPES)
    if unknown:
        raise typer.BadParameter(f"there is no scope {sorted(unknown)[0]!r}; there are {', '.join(SCOPES)}")
    scopes = tuple(known for known in SCOPES if known in scope) if scope else USUAL_SCOPES
    key, record = create_key(_find_file(file, config), name, scopes, max_requests, max_tokens_per_minute)
    end_with_json({"key": key, **_to_plain(record)}, wanted=as_json)
    print(key)
    print(f"the key {record.name!r} ({record.key_id}), for {', '.join(scopes)}; it is not shown again", file=sys.stderr)


@app.command("list")
def list_keys(file: _File = None, config: ConfigFile = None, as_json: _Json = False) -> None:
    """Show each key: its name, what it is for, its limits, and whether it is revoked."""
    from orchestrator.config.keys_file import read_keys

    path = _find_file(file, config)
    lines = read_keys(path)
    keys = [{**_to_plain(line.record), "line": line.number, "plain": line.plain} for line in lines]
    end_with_json({"file": str(path), "keys": keys}, wanted=as_json)
    rows = []
    for line in lines:
        key = line.record
        limits = (str(key.max_requests or "-"), str(key.max_tokens_per_minute or "-"))
        notes = f"revoked {key.revoked}" if key.revoked else "stands there as it is" if line.plain else ""
        name = key.name or f"(line {line.number})"
        rows.append((name, key.key_id, ", ".join(key.scopes), *limits, key.created or "-", notes))
    print_table(("name", "id", "for", "requests", "tokens/min", "made", ""), rows, unbroken=2)
    if any(line.plain for line in lines):
        print_lines("`outrider keys hash` leaves only digests of such keys in the file")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="A name or an id, as `list` shows them.")],
    file: _File = None,
    config: ConfigFile = None,
    yes: Yes = False,
    as_json: _Json = False,
) -> None:
    """Refuse a key from now on. Requests that run go on; lines of its batches are refused."""
    from orchestrator.config.keys_change import revoke_key

    confirm(f"revoke the key {key!r}; whoever has it is refused", yes=yes)
    record = revoke_key(_find_file(file, config), key)
    end_with_json(_to_plain(record), wanted=as_json)
    print(f"revoked: {record.name} ({record.key_id})")


@app.command("hash")
def hash_keys(file: _File = None, config: ConfigFile = None, as_json: _Json = False) -> None:
    """Replace keys that stand in the file as they are by their digests. They go on working."""
    from orchestrator.config.keys_change import hash_plain_keys

    done = hash_plain_keys(_find_file(file, config))
    end_with_json({"keys": [_to_plain(record) for record in done]}, wanted=as_json)
    print(f"replaced by digests: {', '.join(record.name for record in done) or 'no key stood there as it is'}")


def _find_file(file: Path | None, config: Path | None) -> Path:
    """Return the file of keys. Raises ConfigError."""
    from orchestrator.config.keys_file import keys_path
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.errors import ConfigError

    if file is not None:
        return file.absolute()
    path = config or default_config_path()
    configured = load_config(path, sources=False).api.keys_file
    if not configured:
        raise ConfigError(f"{path}: api.keys_file is not set, so no key is asked for; set it, or name a --file")
    return keys_path(configured, path.resolve().parent)


def _to_plain(record: KeyRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "id": record.key_id,
        "scopes": list(record.scopes),
        "max_requests": record.max_requests,
        "max_tokens_per_minute": record.max_tokens_per_minute,
        "created": record.created or None,
        "revoked": record.revoked or None,
    }

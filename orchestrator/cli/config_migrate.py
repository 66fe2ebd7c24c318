"""`outrider config migrate`: what changed in the language of cluster.yaml, and the file rewritten for it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import CheckedFile

if TYPE_CHECKING:
    from orchestrator.config.migrate import ConcernedLine, Migration

WOULD_REWRITE = 3
"""The exit code of --check where there is something to rewrite."""


def migrate(
    file: CheckedFile = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 3 where there is something to.")] = False,
    since: Annotated[
        str, typer.Option(metavar="YYYY-MM-DD", help="Leave out changes from before this day.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print it for programs.")] = False,
) -> None:
    """Say what changed in the language since a cluster.yaml or a sketch was written, and rewrite the file for it.

    Comments and order stay, and the old file is kept beside it. What leaves a choice is told and not rewritten. Exit
    codes: 0 done, or nothing to do; 3 with --check where there is something to rewrite; 1 where it cannot be read.
    """
    from orchestrator.config.load import default_config_path
    from orchestrator.config.migrate import plan_migration, write_migration

    _check_day(since)
    found = plan_migration(file or default_config_path(), since)
    backup = write_migration(found) if found.needed and not check else None
    if as_json:
        print(json.dumps(_describe(found, backup), indent=1))
    else:
        _print(found, backup)
    if check and found.needed:
        raise typer.Exit(WOULD_REWRITE)


def _check_day(day: str) -> None:
    from datetime import date

    try:
        if day:
            date.fromisoformat(day)
    except ValueError:
        raise typer.BadParameter(f"--since {day}: write it as in 2026-11-22") from None


def _describe(found: Migration, backup: Path | None) -> dict[str, Any]:
    from orchestrator.config.source_text import format_place

    return {
        "file": str(found.path),
        "needed": found.needed,
        "rewritten": backup is not None,
        "backup": str(backup) if backup is not None else None,
        "changes": [
            {
                "name": one.change.name,
                "since": one.change.since,
                "kind": one.change.kind,
                "line": one.line,
                "key": format_place(one.place),
                "text": one.change.text,
                "old_behaviour": one.change.todo,
                "rewrite": one.rewritten,
            }
            for one in found.concerned
        ],
        "diff": _diff(found),
    }


def _diff(found: Migration) -> list[str]:
    lines = (found.before.splitlines(), found.after.splitlines())
    return list(difflib.unified_diff(*lines, str(found.path), f"{found.path} (rewritten)", lineterm=""))


def _print(found: Migration, backup: Path | None) -> None:
    rewritten = [one for one in found.concerned if one.rewritten]
    told = [one for one in found.concerned if not one.rewritten]
    for one in rewritten:
        print(f"{found.path}:{one.line}: {one.change.since}: {one.change.text}")
    for line in _diff(found):
        print(f"  {line}")
    if told:
        print("\nNot rewritten, since the file means something either way; for the behaviour from before:")
        for one in told:
            print(_tell(one, found.path))
    if backup is not None:
        print(f"\n{found.path}: rewritten; the old file is {backup}")
    elif found.needed:
        print(f"\n{found.path}: to be rewritten: run it without --check")
    else:
        print(f"\n{found.path}: nothing to rewrite" if told else f"{found.path}: nothing changed that concerns it")


def _tell(one: ConcernedLine, path: Path) -> str:
    where = f"{path}:{one.line}" if one.place else str(path)
    return f"  {where}: {one.change.since}: {one.change.text}\n      way back: {one.change.todo}"

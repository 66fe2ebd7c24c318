"""Says which lines of a cluster.yaml or a sketch are concerned by changes of the language, and rewrites what it can.

The new text is compared with the old one, value by value, before anything is written.
"""

from __future__ import annotations

import copy
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.language_changes import CHANGES, KeyEdit, LanguageChange, apply_edit
from orchestrator.config.load import parse_config
from orchestrator.config.sketch import parse_sketch
from orchestrator.config.source_text import Lines, Place, compose_text, parse_text
from orchestrator.config.text_edits import NotEditable, put_in, read_value, take_out
from orchestrator.durable import sync_directory
from orchestrator.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConcernedLine:
    """A line of the file, and the change that concerns it. `rewritten`: the new text takes care of it."""

    change: LanguageChange
    place: Place
    line: int
    rewritten: bool


@dataclass(frozen=True, slots=True)
class Migration:
    """What the language's changes mean for a file: its lines, its text, and the text that takes its place."""

    path: Path
    concerned: tuple[ConcernedLine, ...]
    before: str
    after: str

    @property
    def needed(self) -> bool:
        """Whether there is anything to rewrite."""
        return self.before != self.after


def plan_migration(path: Path, since: str = "") -> Migration:
    """Return what the changes after the date `since` (all: "") mean for a file. Raises ConfigError where it cannot be
    read, cannot be rewritten by these means, or would be refused after that for another reason."""
    before = _read(path)
    data, lines = parse_text(before, path)
    assert isinstance(data, dict)  # noqa: S101  # parse_text takes nothing else
    concerned: list[ConcernedLine] = []
    after, wanted = before, copy.deepcopy(data)
    for change in CHANGES:
        if change.since < since:
            continue
        edits = change.edit(data)
        for place in change.find(data):
            rewritten = any(edit.place == place for edit in edits)
            concerned.append(ConcernedLine(change, place, _line_of(place, lines), rewritten))
        for edit in edits:
            after = _rewrite(after, edit, change, path)
            apply_edit(wanted, edit)
    if after != before:
        found, _ = parse_text(after, path)
        if found != wanted:
            raise ConfigError(f"{path}:1: cannot be rewritten safely; do by hand: {_tell_edits(concerned)}")
    _check(after, path)
    return Migration(path, tuple(concerned), before, after)


def write_migration(migration: Migration) -> Path:
    """Put the new text in the file's place, and return the backup. The file is as it was until the new one is whole on
    the disk. Raises ConfigError where that cannot be written."""
    path = migration.path.resolve()  # a link stays one
    mode = stat.S_IMODE(path.stat().st_mode)
    made: list[Path] = []
    try:
        if _read(path) != migration.before:
            raise ConfigError(f"{path}: was changed meanwhile; run the command again")
        backup = _write_backup(path, migration.before, mode, made)
        new = _write_new(path, migration.after, mode, made)
        os.replace(new, path)
        made.clear()
        sync_directory(path.parent)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be rewritten: {error.strerror}; it is as it was") from error
    finally:
        for left in made:
            with suppress(OSError):
                left.unlink()
    return backup


def _read(path: Path) -> str:
    """Return the text with its ends of lines as they are. Raises ConfigError."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _rewrite(text: str, edit: KeyEdit, change: LanguageChange, path: Path) -> str:
    note = f"outrider config migrate: {change.text}"
    try:
        if edit.to is not None:
            text = put_in(text, edit.to, read_value(text, edit.place, compose_text), compose_text)
        return take_out(text, edit.place, note, compose_text)
    except NotEditable as error:
        raise ConfigError(f"{path}:1: {error}; {change.text}") from error


def _check(text: str, path: Path) -> None:
    """Raise ConfigError where the text is no configuration and no sketch."""
    data, _ = parse_text(text, path, least="hosts")
    if isinstance(data, dict) and "model" not in data and "hosts" in data:
        parse_sketch(text, path)
    else:
        parse_config(text, path)


def _line_of(place: Place, lines: Lines) -> int:
    return next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 1)


def _tell_edits(concerned: Sequence[ConcernedLine]) -> str:
    return "; ".join(one.change.text for one in concerned if one.rewritten)


def _write_backup(path: Path, text: str, mode: int, made: list[Path]) -> Path:
    """Write the text beside the file under a name that is free."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak{f'.{number}' if number else ''}")
        try:
            descriptor = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            number += 1
            continue
        made.append(backup)
        _write_whole(descriptor, text)
        return backup


def _write_new(path: Path, text: str, mode: int, made: list[Path]) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    made.append(Path(name))
    owner = path.stat()
    os.fchmod(descriptor, mode)
    with suppress(PermissionError):
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    _write_whole(descriptor, text)
    return Path(name)


def _write_whole(descriptor: int, text: str) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())

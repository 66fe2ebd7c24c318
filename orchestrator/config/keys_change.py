"""Changes the file of API keys: each change is whole or not there, and two at a time follow each other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from filelock import FileLock, Timeout

from device_profiles.whole_file import replace_file
from orchestrator.config.keys_file import KeyLine, KeyRecord, Scope, check_name, hash_key, parse_keys
from orchestrator.errors import ConfigError

PREFIX: Final = "outrider-"
"""Every key begins so: scanners for leaked secrets find it, and nothing else does."""
_KEY_BYTES: Final = 32
_MODE: Final = 0o640  # a mode of files
_LOCK_S: Final = 10.0  # whoever has it writes one small file. Not tuned.
_HEAD: Final = "# API keys of Outrider, by `outrider keys`. Only digests stand here: a key that is lost is made anew.\n"


def create_key(
    path: Path, name: str, scopes: tuple[Scope, ...], max_requests: int, max_tokens_per_minute: int
) -> tuple[str, KeyRecord]:
    """Add a key to the file, which is made where there is none; returns the key, which stands nowhere else. Raises
    ConfigError."""
    if problem := check_name(name):
        raise ConfigError(f"{name!r}: {problem}")
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    record = KeyRecord(
        name=name,
        hash=hash_key(key),
        scopes=scopes,
        max_requests=max_requests,
        max_tokens_per_minute=max_tokens_per_minute,
        created=_now(),
    )
    with _changing(path) as (text, lines, write):
        if any(line.record.name == name and not line.record.revoked for line in lines):
            raise ConfigError(f"{path}: has a key {name!r} already; revoke it first, or take another name")
        ending = "" if not text or text.endswith("\n") else "\n"
        write((text or _HEAD) + ending + _encode(record) + "\n")
    return key, record


def revoke_key(path: Path, wanted: str) -> KeyRecord:
    """Revoke a key by its name or id; its record stays. Raises ConfigError."""
    with _changing(path, must_exist=True) as (text, lines, write):
        live = [line for line in lines if not line.record.revoked]
        named = [line for line in live if line.record.name == wanted] or [
            line for line in live if line.record.key_id == wanted
        ]
        if not named:
            raise ConfigError(f"{path}: has no key {wanted!r} that is not revoked; see `outrider keys list`")
        record = msgspec.structs.replace(_give_name(named[0]), revoked=_now())
        write(_with_lines(text, {line.number: record for line in named}))
    return record


def hash_plain_keys(path: Path) -> list[KeyRecord]:
    """Put each key that stands in the file as it is away for its digest; all go on working. Raises ConfigError."""
    with _changing(path, must_exist=True) as (text, lines, write):
        changed = {line.number: _give_name(line) for line in lines if line.plain}
        if changed:
            write(_with_lines(text, changed))
    return list(changed.values())


def _give_name(line: KeyLine) -> KeyRecord:
    record = line.record
    return record if record.name else msgspec.structs.replace(record, name=f"plain-{record.key_id}")


def _with_lines(text: str, changed: dict[int, KeyRecord]) -> str:
    lines = text.splitlines()
    for number, record in changed.items():
        lines[number - 1] = _encode(record)
    return "\n".join(lines) + "\n"


def _encode(record: KeyRecord) -> str:
    return msgspec.json.encode(record).decode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def _changing(path: Path, *, must_exist: bool = False) -> Iterator[tuple[str, list[KeyLine], Callable[[str], None]]]:
    """Give the file's text, its records, and what writes a new text. Raises ConfigError, and where it `must_exist` also
    for one that is not there."""
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_S, mode=0o600):
            about = path.stat() if path.exists() else None
            if about is None and must_exist:
                raise ConfigError(f"{path}: is not there; make it with `outrider keys create NAME`")
            text = path.read_text(encoding="utf-8") if about is not None else ""
            yield text, parse_keys(text, path), lambda new: _write(path, new, about)
    except Timeout:
        raise ConfigError(f"{path}: another command changes it; try again") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; run it as the user that owns the file (sudo)") from error


def _write(path: Path, text: str, about: os.stat_result | None) -> None:
    """Replace the file. A new one belongs to the directory's group, so that a service whose directory it is reads
    it."""
    with replace_file(path, 0o600, sync=True) as out:
        owner = (about.st_uid, about.st_gid) if about is not None else (-1, path.parent.stat().st_gid)
        if os.geteuid() == 0:
            os.fchown(out.fileno(), *owner)
        os.fchmod(out.fileno(), about.st_mode & 0o770 if about is not None else _MODE)
        out.write(text.encode())

"""A prepared artefact on disk: a directory with a manifest that says what must be in it.

The manifest is written last and the directory is renamed into place afterwards, so a directory under its
final name was whole once. Damage that came later shows against the manifest: in names and sizes at once, in contents
where every byte is read. Two notes lie beside it: when all bytes were read last, and what was found wrong then.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adapters.boot_id import read_boot_id
from adapters.content_digest import EachChunk, file_identity, hash_file, ignore_chunk
from device_profiles.whole_file import UNFINISHED_SUFFIX, replace_file

MANIFEST = "manifest.json"
VERIFIED = "verified.json"
_DRAFT = re.compile(r"\.(.+)\.(?:new|old)-\d+-[0-9a-f]{8}")
CORRUPT = "corrupt.json"
NOTES = frozenset({MANIFEST, VERIFIED, CORRUPT})
AND = " and "
"""Stands between the recipes of an artefact that is made of several."""
KEPT_SUFFIX = ".kept"
"""Of files that say what of a draft is finished: with one of them, a draft that was left is gone on with."""
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """What an artefact was made from: `source` as the operator wrote it, the digest of the content (32 hex
    digits), and the name and text of the recipe."""

    source: str
    digest: str
    recipe_name: str
    recipe: str


def write_manifest(
    directory: Path,
    origin: Origin,
    each_chunk: EachChunk = ignore_chunk,
    recall: Callable[[Path], str | None] = lambda _path: None,
) -> None:
    """Describe what is in `directory` and bring everything to the disk. `each_chunk` is as in `hash_file`. `recall`
    returns the digest of a file that a link leads to, where it is known. Raises OSError."""

    def find_digest(path: Path) -> str:
        return (path.is_symlink() and recall(path.resolve())) or hash_file(path, each_chunk)

    for path in directory.rglob(f".*{UNFINISHED_SUFFIX}"):
        path.unlink()  # whose writer was killed
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "blake3": find_digest(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != KEPT_SUFFIX
    }
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {"format": _FORMAT, **asdict(origin), "created": created, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def publish(draft: Path, final: Path, aside: Path) -> None:
    """Rename a finished directory into place, and drop the notes that its making could be gone on with by. What stood
    there is moved to `aside`. Raises OSError."""
    if os.path.lexists(final):
        final.rename(aside)
    draft.rename(final)
    _sync(final.parent)
    for note in list_kept(final):
        note.unlink()


def list_kept(directory: Path) -> list[Path]:
    return list(directory.rglob(f"*{KEPT_SUFFIX}"))


def damage(directory: Path, origin: Origin) -> str | None:
    """Return what is wrong with an artefact as far as its notes, names and sizes tell, None when nothing is."""
    manifest = read_manifest(directory)
    if manifest is None:
        return "its manifest is missing or damaged"
    # The source's name may differ: the same content from two places is one artefact.
    if (manifest["digest"], manifest["recipe"]) != (origin.digest, origin.recipe):
        return "it was made from something else"
    for name, facts in manifest["files"].items():
        size = _size(directory / name)
        if size != facts["bytes"]:
            return f"{name} is missing" if size is None else f"{name} has {size} of {facts['bytes']} bytes"
        if not isinstance(facts.get("blake3"), str):
            return "it has no digests, being of an earlier version"
    return find_mark(directory) or None


def find_changed_content(directory: Path, each_chunk: EachChunk = ignore_chunk) -> str | None:
    """Read every byte of an artefact; return what is not as it was written, None when all is. `each_chunk` as in
    `hash_file`."""
    manifest = read_manifest(directory)
    if manifest is None:
        return "its manifest is missing or damaged"
    for name, facts in manifest["files"].items():
        try:
            if hash_file(directory / name, each_chunk) != facts["blake3"]:
                return f"{name} has other content than was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
    return None


def is_verified(directory: Path) -> bool:
    """Return whether every byte was read since this machine was started, and no file was changed since then."""
    note = _read_note(directory / VERIFIED)
    boot = read_boot_id()
    return bool(boot) and note.get("boot_id") == boot and note.get("files") == _identities(directory)


def find_verified_s(directory: Path) -> float:
    """Return when every byte was read last, in seconds since the epoch; 0 where that is not known."""
    at_s = _read_note(directory / VERIFIED).get("at_s")
    return float(at_s) if isinstance(at_s, int | float) else 0.0


def note_verified(directory: Path, now_s: float) -> None:
    """Remember that every byte is as it was written. Without effect where nothing can be written."""
    note = {"boot_id": read_boot_id(), "at_s": now_s, "files": _identities(directory)}
    _write_note(directory / VERIFIED, note)


def mark_corrupt(directory: Path, problem: str) -> None:
    """Remember what is wrong with an artefact, so that the next load makes it again."""
    _write_note(directory / CORRUPT, {"problem": problem, "found": datetime.now(UTC).isoformat(timespec="seconds")})


def find_mark(directory: Path) -> str:
    """Return what `mark_corrupt` remembers; "" where it was never called."""
    if not (directory / CORRUPT).exists():
        return ""
    return str(_read_note(directory / CORRUPT).get("problem") or "it was found damaged")


def _identities(directory: Path) -> dict[str, list[int]]:
    manifest = read_manifest(directory)
    names = [MANIFEST, *manifest["files"]] if manifest is not None else []
    with suppress(OSError):
        return {name: file_identity(directory / name) for name in names}
    return {}


def _read_note(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _write_note(path: Path, note: dict[str, Any]) -> None:
    with suppress(OSError), replace_file(path) as file:
        file.write(json.dumps(note).encode())


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return what a directory's manifest says, None when it is missing or damaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest["format"] == _FORMAT and {"digest", "recipe"} <= manifest.keys()
        whole = whole and all(isinstance(facts["bytes"], int) for facts in manifest["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return dict(manifest) if whole else None


def find_beside(draft: Path, recipe: str) -> Path | None:
    """Return an artefact of the same model that was made by this recipe, or by it and others; None where none is whole
    by its notes, names and sizes."""
    for path in sorted(draft.parent.glob(f"*/{MANIFEST}")):
        manifest = read_manifest(path.parent)
        if manifest is None or find_drafted(path.parent) or recipe not in manifest["recipe"].split(AND):
            continue
        if damage(path.parent, Origin("", manifest["digest"], "", manifest["recipe"])) is None:
            return path.parent
    return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync a directory; the rename is atomic there too
            raise
    finally:
        os.close(descriptor)


def draft_name(artefact: Path, purpose: str) -> Path:
    return artefact.with_name(f".{artefact.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}")


def find_drafted(draft: Path) -> Path | None:
    """Return the artefact that a directory is a draft of, None where it is none."""
    match = _DRAFT.fullmatch(draft.name)
    return draft.with_name(match[1]) if match else None


def remove_drafts(artefact: Path) -> None:
    """Remove the drafts of one artefact. The caller holds its lock, so whoever began them is dead or done."""
    for draft in list_drafts(artefact):
        shutil.rmtree(draft, ignore_errors=True)


def take_draft(artefact: Path, draft: Path) -> None:
    """Go on with the draft that somebody left who had finished a part, or begin a new one. Raises OSError. The caller
    holds the artefact's lock."""
    left = max(filter(list_kept, list_drafts(artefact)), key=lambda draft: draft.stat().st_mtime_ns, default=None)
    if left is None:
        draft.mkdir()
    else:
        left.rename(draft)
    for other in list_drafts(artefact):
        if other != draft:
            shutil.rmtree(other, ignore_errors=True)


def list_drafts(artefact: Path) -> list[Path]:
    return list(artefact.parent.glob(f".{artefact.name}.*"))


def count_disk_bytes(directory: Path) -> int:
    with suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))
    return 0

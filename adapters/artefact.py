"""A prepared artefact on disk: a directory with a manifest that says what must be in it.

The manifest is written last and the directory is renamed into place afterwards, so a directory under its
final name was whole once. Damage that came later shows against the manifest.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """What an artefact was made from: `source` as the operator wrote it, the digest of the content (32 hex
    digits), and the name and text of the recipe."""

    source: str
    digest: str
    recipe_name: str
    recipe: str


def write_manifest(directory: Path, origin: Origin) -> None:
    """Describe what is in `directory` and bring everything to the disk. Raises OSError."""
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {"format": _FORMAT, **asdict(origin), "created": created, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def publish(draft: Path, final: Path, aside: Path) -> None:
    """Rename a finished directory into place; what stood there is moved to `aside`. Raises OSError."""
    if os.path.lexists(final):
        final.rename(aside)
    draft.rename(final)
    _sync(final.parent)


def damage(directory: Path, origin: Origin) -> str | None:
    """Return what is wrong with an artefact as far as names and sizes tell, None when nothing is."""
    manifest = read_manifest(directory)
    if manifest is None:
        return "its manifest is missing or damaged"
    # The source's name may differ: the same content from two places is one artefact.
    if (manifest["digest"], manifest["recipe"]) != (origin.digest, origin.recipe):
        return "it was made from something else"
    for name, facts in manifest["files"].items():
        found = _size(directory / name)
        if found != facts["bytes"]:
            return f"{name} is missing" if found is None else f"{name} has {found} of {facts['bytes']} bytes"
    return None


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return what a directory's manifest says, None when it is missing or damaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest["format"] == _FORMAT and {"digest", "recipe"} <= manifest.keys()
        whole = whole and all(isinstance(facts["bytes"], int) for facts in manifest["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return dict(manifest) if whole else None


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

"""What lies beside an artefact while it is made, and where whoever made it died."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from adapters.artefact import list_kept

_DRAFT = re.compile(r"\.(.+)\.(?:new|old)-\d+-[0-9a-f]{8}")


def draft_name(artefact: Path, purpose: str) -> Path:
    """Return a place for a new draft of an artefact."""
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
    """Return the drafts of an artefact."""
    return list(artefact.parent.glob(f".{artefact.name}.*"))


def count_disk_bytes(directory: Path) -> int:
    """Return what a directory's files take on the disk."""
    with suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))
    return 0

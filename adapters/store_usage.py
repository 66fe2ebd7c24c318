"""What a model store takes on the disk, and what of it nobody needs."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adapters.hf_hub import HUB_PREFIX
from adapters.model_store import ModelStore
from adapters.names import OWN_ADAPTERS

ANY_ADAPTER = "auto"
BLOCK_BYTES = 512  # what st_blocks counts
_LATER = "a later one was made of the same"
_FORMAT = re.compile(r"[ ,]+\d+$")


@dataclass(frozen=True, slots=True)
class SourceUse:
    """A model that somebody uses: its `source` as the operator wrote it, the digest of its files (its first digits, ""
    where that is not known), and the `adapter` that runs it: ANY_ADAPTER for whichever a plan chooses."""

    source: str
    adapter: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Unused:
    """An artefact that nobody needs, or what a conversion that was ended left of one: what it takes, and why it is not
    needed."""

    path: Path
    source: str
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Bytes on the disk: of the whole store, and of prepared models that are in use. `sources`: models that something
    was prepared of. `unused`: what could go."""

    root: Path
    total_bytes: int
    sources: int
    used_bytes: int
    unused: tuple[Unused, ...]

    @property
    def unused_bytes(self) -> int:
        return sum(artefact.size_bytes for artefact in self.unused)

    def to_status(self) -> dict[str, Any]:
        unused = [{**asdict(artefact), "path": str(artefact.path)} for artefact in self.unused]
        figures = {"total_bytes": self.total_bytes, "sources": self.sources, "used_bytes": self.used_bytes}
        return {"root": str(self.root), **figures, "unused_bytes": self.unused_bytes, "unused": unused}


def measure_store(root: Path, uses: Collection[SourceUse]) -> StoreUsage:
    """Return what a store takes, for somebody who has these models. Reads names, sizes and manifests, no weights."""
    store = ModelStore(root)
    artefacts = store.all()
    newest: dict[tuple[str, str, str], str] = {}
    for _, manifest in artefacts:
        kind = _name_kind(manifest)
        newest[kind] = max(newest.get(kind, ""), manifest["created"])
    used_bytes, unused = 0, []
    for path, manifest in artefacts:
        size = measure_directory(path)
        older = manifest["created"] < newest[_name_kind(manifest)]
        why = _find_why_unused(manifest, uses) or (_LATER if older else "")
        if why:
            unused.append(Unused(path, manifest["source"], size, why))
        else:
            used_bytes += size
    for path, artefact in store.list_left():
        size = measure_directory(path)
        beside = [manifest for place, manifest in artefacts if place.parent == path.parent]
        left = _describe_left(path, artefact, beside)
        if why := _find_why_left(left, beside, uses):
            unused.append(Unused(path, left["source"] or left["digest"], size, f"its conversion was ended, and {why}"))
        else:
            used_bytes += size
    sources = len({manifest["source"] for _, manifest in artefacts})
    return StoreUsage(root, measure_directory(root), sources, used_bytes, tuple(unused))


def _find_why_unused(manifest: dict[str, str], uses: Collection[SourceUse]) -> str:
    mine = [use for use in uses if _is_of(manifest, use)]
    if not mine:
        return "the configuration has no such model"
    adapter = manifest["recipe_name"]
    runs = {use.adapter for use in mine}
    if adapter in OWN_ADAPTERS and not runs & {adapter, ANY_ADAPTER}:
        return f"the configuration runs this model on {', '.join(sorted(runs))}"
    return ""


def _describe_left(path: Path, artefact: Path, beside: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return what would be in the manifest, as far as it is known. `beside`: those of what was made of the same model;
    without one, the source is ""."""
    began_s = 0.0
    with suppress(OSError):  # it went meanwhile
        began_s = path.stat().st_mtime
    return {
        "source": beside[0]["source"] if beside else "",
        "digest": path.parent.name,
        "recipe_name": artefact.name.rpartition("-")[0],
        "created": datetime.fromtimestamp(began_s, UTC).isoformat(timespec="seconds"),
    }


def _find_why_left(left: dict[str, str], beside: Sequence[dict[str, str]], uses: Collection[SourceUse]) -> str:
    """Return why no conversion will go on from there, "" where one may."""
    if not beside and any(not use.digest for use in uses):
        return ""  # it may be of that model
    later = any(newer["recipe_name"] == left["recipe_name"] and newer["created"] > left["created"] for newer in beside)
    return _find_why_unused(left, uses) or (_LATER if later else "")


def _is_of(manifest: dict[str, str], use: SourceUse) -> bool:
    if use.digest and manifest["digest"].startswith(use.digest):
        return True
    names = [manifest["source"], use.source]
    if use.source.startswith(HUB_PREFIX):  # the store knows the commit as well
        names = [name.partition("@")[0] for name in names]
    return not use.digest and names[0] == names[1]


def _name_kind(manifest: dict[str, str]) -> tuple[str, str, str]:
    """Return what is alike in artefacts of which only the last one is found: versions of libraries and of our own
    format differ."""
    return manifest["digest"], manifest["recipe_name"], _FORMAT.sub("", manifest["recipe"].partition(";")[0])


def measure_directory(directory: Path) -> int:
    """Return what a directory takes on the disk, in bytes, without what it links to; 0 where it is not there."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it went meanwhile
                total += os.lstat(os.path.join(folder, name)).st_blocks * BLOCK_BYTES
    return total

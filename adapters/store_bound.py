"""Keeps a model store within a size: prepared formats go, those that were used least recently first.

What a process has loaded stays, and what that links into. So do heads and tokenizers: they are small, and a model that
was replaced cannot be served on without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from adapters.artefact_use import claim_unused, find_used_s, is_used
from adapters.model_store import ModelStore
from adapters.store_usage import measure_directory

_KEPT_RECIPES: Final = frozenset({"head", "tokenizer"})


def bound_store(store: ModelStore, max_bytes: int) -> list[Path]:
    """Remove prepared formats until all together take `max_bytes` at most, or what is left is in use; return what was
    removed. One process at a time: others do nothing. Raises OSError and StoreUnwritable."""
    artefacts = [(path, manifest["recipe_name"]) for path, manifest in store.all()]
    left = [path for path, _ in store.list_left()]
    sizes = {path: measure_directory(path) for path in (*(path for path, _ in artefacts), *left)}
    if sum(sizes.values()) <= max_bytes:
        return []
    lock = FileLock(store.root / "bounding.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return []
    try:
        formats = [path for path, recipe in artefacts if recipe not in _KEPT_RECIPES]
        return list(_remove_oldest(store, formats, sizes, max_bytes))
    finally:
        lock.release()


def _remove_oldest(store: ModelStore, formats: list[Path], sizes: dict[Path, int], max_bytes: int) -> Iterator[Path]:
    total = sum(sizes.values())
    for left, _ in store.list_left():  # of a conversion that runs it is kept: its lock is held
        if total > max_bytes and store.remove(left):
            total -= sizes.get(left, 0)
            yield left
    needed = {place for path in formats if is_used(path) for place in _list_linked(path)}
    for path in sorted(formats, key=find_used_s):
        if total <= max_bytes:
            return
        if path in needed:
            continue
        with claim_unused(path) as is_unused:
            if is_unused and store.remove(path):
                total -= sizes[path]
                yield path


def _list_linked(artefact: Path) -> set[Path]:
    """Return the artefacts whose files an artefact has links to."""
    linked = set()
    with suppress(OSError):
        links = (path.resolve() for path in artefact.rglob("*") if path.is_symlink())
        linked = {parent for link in links for parent in link.parents}
    return linked

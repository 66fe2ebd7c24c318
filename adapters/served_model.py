"""Which files a model that is served is loaded from, once others may be at their place.

A worker that starts again is to load what the first one did. What is at the model's place counts where it has that
content; else the store does, which keeps the model's head beside what was prepared from it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from adapters.artefact import Origin, damage, find_changed_content, read_manifest
from adapters.contract import ModelRefused, Progress
from adapters.hf_hub import DownloadFailed
from adapters.model_head import HeadRecipe, restore_head
from adapters.model_identity import ModelIdentity
from adapters.model_source import ModelSource, resolve
from adapters.model_store import (
    DIGEST_DIGITS,
    ModelStore,
    Recipe,
    StoreFull,
    StoreUnwritable,
    describe_replaced,
    explain_errors,
    short_hash,
)
from device_profiles.units import MIB

_RESTORED: Final = "restored-head"
_HEAD: Final = HeadRecipe((), directory=False)
# Free space that is asked for: a head has a few megabytes (ADR 0103).
_HEAD_BYTES: Final = 64 * MIB

_log = logging.getLogger(__name__)


def keep_head(store: ModelStore, file: ModelSource, progress: Progress) -> Path | None:
    """Keep what a model is loaded with beside its weights, so that it can be loaded once its files are replaced.

    Returns where it is; None where that is known or the store takes nothing. Raises ModelRefused for a damaged file.
    """
    if file.digest:
        return None
    recipe = HeadRecipe(file.content, directory=file.path.is_dir())
    try:
        return store.prepare_small(file, recipe, _HEAD_BYTES, progress)
    except (StoreFull, StoreUnwritable) as error:
        _log.warning("%s cannot be loaded again once its files are replaced: %s", file.path.name, error)
        return None


def find_served(
    store: ModelStore, identity: ModelIdentity, base: Path, progress: Progress, adapter: str = ""
) -> ModelSource:
    """Return the model of an identity: what is at its place, whole, if it is that, else its head.

    Where the store has the head, no file is read whose digest is not known. Raises ModelReplaced where neither is
    there.
    """
    file, why = None, ""
    try:
        file = store.whole(resolve(identity.source, base, progress, adapter), progress)
        digest = store.recall_digest(file)
        if digest is None and find_kept(store, identity, _HEAD) is None:
            digest = store.digest(file)
    except (ModelRefused, DownloadFailed) as error:
        why = f"what is at its place cannot be used ({str(error).split('. ')[0]})"
        return _restore(store, identity, None, why)
    if digest is not None and digest[:DIGEST_DIGITS] == identity.digest:
        return replace(file, name=identity.name or file.name)
    digits = f" ({digest[:DIGEST_DIGITS]})" if digest is not None else ""
    why = f"there is another one at its place now{digits}"
    return _restore(store, identity, file if digest is None else None, why)


def find_whole(
    store: ModelStore,
    source: str,
    base: Path,
    identity: ModelIdentity | None,
    progress: Progress,
    adapter: str = "",
) -> ModelSource:
    """Return a model's files, whole: those that it is to have by its `identity`, else those at its place. `adapter`:
    what is to run them. Raises what `resolve` raises, and ModelReplaced."""
    if identity is not None:
        return find_served(store, identity, base, progress, adapter)
    return store.whole(resolve(source, base, progress, adapter), progress)


def find_kept(store: ModelStore, identity: ModelIdentity, recipe: Recipe) -> tuple[Path, str] | None:
    """Return where the store has what a recipe made of a model, and the whole digest of the model's content; None where
    it is not there or is damaged. The model's own files are not looked at."""
    place = store.root / identity.digest / f"{recipe.name}-{short_hash(recipe.recipe())}"
    manifest = read_manifest(place)
    if manifest is None or not str(manifest["digest"]).startswith(identity.digest):
        return None
    origin = Origin(identity.source, str(manifest["digest"]), recipe.name, recipe.recipe())
    whole = damage(place, origin) is None and find_changed_content(place) is None
    return (place, origin.digest) if whole else None


def _restore(store: ModelStore, identity: ModelIdentity, now: ModelSource | None, why: str) -> ModelSource:
    """Return a model whose files are its head. Raises ModelReplaced where there is none."""
    source = identity.origin or identity.source
    kept = find_kept(store, identity, _HEAD)
    if kept is None:
        gone = ModelSource(Path(source), identity.name, source, digest=identity.digest, why_head=why)
        raise describe_replaced(store.root, gone, "what was prepared")
    place, digest = kept
    path, files = _restore_head(store, place)
    return ModelSource(path, identity.name, source, files, digest=digest, now=now, why_head=why)


def _restore_head(store: ModelStore, artefact: Path) -> tuple[Path, tuple[Path, ...]]:
    """Restore a head beside itself, or for this process alone where the store takes nothing. Raises ModelRefused,
    StoreFull and StoreUnwritable."""
    try:
        with explain_errors(store.root):
            return restore_head(artefact, artefact.with_name(_RESTORED))
    except (StoreFull, StoreUnwritable) as error:
        try:
            if artefact not in _own_places:
                _own_places[artefact] = TemporaryDirectory(prefix="outrider-head-")
            restored = restore_head(artefact, Path(_own_places[artefact].name, _RESTORED))
        except OSError:
            raise error from None
        _log.warning("the head of a model is restored in %s: %s", restored[0], error)
        return restored


_own_places: dict[Path, TemporaryDirectory[str]] = {}  # removed when the process ends

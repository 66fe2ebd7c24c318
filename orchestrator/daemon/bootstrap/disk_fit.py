"""Whether the store of a cluster.yaml has the room for what its models are prepared into, before anything is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from adapters.contract import AdapterError
from adapters.model_source import ModelSource
from adapters.model_store import DIGEST_DIGITS, SPACE_FACTOR, ModelStore
from adapters.names import CONVERTING_ADAPTERS, OPENVINO_LLAMA
from device_profiles.units import MIB, human_bytes
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, describe_place
from orchestrator.config.target import Target
from orchestrator.daemon.bootstrap.memory_fit import find_files

_CONVERTING = (*CONVERTING_ADAPTERS, OPENVINO_LLAMA)


def list_disk_notes(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line where the disk of the store, or its bound, has no room for what is to be prepared. Models that a
    plan may run on a runtime that converts nothing are left out."""
    root, base = store_directory(config), path.resolve().parent
    missing = {file.path: file for file, is_prepared in _list_converted(config, root, base) if not is_prepared}
    notes = []
    needed = SPACE_FACTOR * sum(file.weights_bytes for file in missing.values())
    near = next(place for place in (root, *root.parents) if place.exists())
    free = shutil.disk_usage(near).free
    if needed > free:
        text = f"preparing models there needs {human_bytes(needed)}, and {human_bytes(free)} are free in {near}"
        way = f"free {_round_up(needed - free)} there, or name a directory on a disk with {_round_up(needed)}"
        notes.append(f"{describe_place(path, lines, ('store', 'directory'))} {text}; {way}")
    every = {file.path: file for file, _ in _list_converted(config, root, base)}
    least = sum(file.weights_bytes for file in every.values())
    if config.store.max_size is not None and least > config.store.max_size:
        text = f"the models that are converted have {human_bytes(least)}, and what is loaded stays; set"
        notes.append(f"{describe_place(path, lines, ('store', 'max_size'))} {text} {_round_up(least)} or more")
    return notes


def _list_converted(config: ClusterConfig, root: Path, base: Path) -> Iterator[tuple[ModelSource, bool]]:
    store = ModelStore(root)
    made = {(manifest["digest"][:DIGEST_DIGITS], manifest["recipe_name"]) for _, manifest in store.all()}
    for target in config.targets:
        models: list[Target | ModelDraft] = [target.model.with_own(own) for _, own in target.own_replicas]
        models += [draft for _, draft in target.all_drafts if isinstance(draft, ModelDraft)]
        for model in models:
            file = find_files(model, base) if model.adapter in _CONVERTING else None
            if file is not None:
                digest = ""
                with suppress(AdapterError, OSError):
                    digest = (store.recall_digest(file) or "")[:DIGEST_DIGITS]
                yield file, (digest, model.adapter) in made


def _round_up(size_bytes: int) -> str:
    return f"{-(-size_bytes // MIB)} MiB"

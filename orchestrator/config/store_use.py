"""Which prepared models of the store a configuration uses, and what the store takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from adapters.contract import AdapterError
from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import resolve
from adapters.model_store import DIGEST_DIGITS, ModelStore
from adapters.store_usage import SourceUse, StoreUsage, measure_store
from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target_checks import list_split


def measure_store_use(config: ClusterConfig, base: Path) -> StoreUsage:
    """Return what the store of a configuration takes, and what of it that does not use. `base`: its directory."""
    root = store_directory(config)
    digests: dict[str, str] = {}
    uses = set()
    for source, adapter in _list_uses(config):
        if source not in digests:
            digests[source] = _recall_digest(source, base, root)
        uses.add(SourceUse(source, adapter, digests[source]))
    return measure_store(root, uses)


def _list_uses(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    """Return the sources of all models, each with every adapter that may run it."""
    for target in config.targets:
        model = target.model
        adapters = [shard.adapter or its.adapter for _, its in list_split(target) for shard in its.shards]
        adapters += [model.with_own(own).adapter for _, own in target.own_targets]
        yield from ((model.source, adapter) for adapter in adapters)
        for _, draft in target.all_drafts:
            if isinstance(draft, ModelDraft):
                yield draft.source, draft.adapter


def _recall_digest(source: str, base: Path, root: Path) -> str:
    """Return the first digits of a model's digest, where the store knows it without reading the model; else ""."""
    if source.startswith((HUB_PREFIX, SIMULATED_PREFIX)):
        return ""
    with suppress(AdapterError):  # a model that is gone: its artefacts are known by the source's name
        file = resolve(source, base)
        if file.parts is None:  # the joined file has a digest of its own
            return (ModelStore(root).recall_digest(file) or "")[:DIGEST_DIGITS]
    return ""

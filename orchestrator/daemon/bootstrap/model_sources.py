"""What the sources of a target's configuration are now, and which models were replaced since they were loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapters.hf_hub import HUB_PREFIX
from adapters.model_identity import ModelIdentity
from adapters.model_source import pin_source, resolve
from adapters.model_store import ModelStore
from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.sources import FoundSources


@dataclass(frozen=True, slots=True)
class RenewedSources:
    """What sources are now. `replaced`: in a line each, which models are others than those that are served."""

    sources: FoundSources
    replaced: tuple[str, ...] = ()


def bind_sources(config: ClusterConfig) -> FoundSources:
    """Return the sources with models of the hub bound to the commits of now. Raises ModelRefused and DownloadFailed."""
    return FoundSources({source: pin_source(source) for source in config.model_sources})


def renew_sources(
    config: ClusterConfig, base: Path, running: FoundSources, served: Mapping[str, ModelIdentity]
) -> RenewedSources:
    """Return what the sources of a configuration are now. `running`: what they are in the one that runs; `served`: the
    content of each model that was loaded.

    Files are read whole only where they were written since they were read last. Raises ModelRefused and DownloadFailed.
    """
    store = ModelStore(store_directory(config))
    bound = {source: pin_source(source) for source in config.model_sources}
    identities: dict[str, ModelIdentity] = {}
    replaced = []
    for written, source in bound.items():
        before = running.bound.get(written, source)
        if before != source:
            replaced.append(f"{written}: {before} -> {source}")
            continue
        known = running.identities.get(source) or served.get(source)
        if source in running.identities:
            identities[source] = running.identities[source]
        if known is None or source.startswith((SIMULATED_PREFIX, HUB_PREFIX)):
            continue  # what a commit names does not change, and may be on the hosts of workers only
        file = resolve(source, base)
        digest = store.digest(file)
        if digest != known.digest:
            identities[source] = ModelIdentity(source, digest, file.name, file.source)
            replaced.append(f"{written}: the model {known.digest} -> {digest}")
    return RenewedSources(FoundSources(bound, identities), tuple(replaced))

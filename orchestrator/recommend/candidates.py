"""The candidates: the configuration's drafts and those that were named, each alone and all of them as a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.drafts import AnyDraft, EndpointDraft, HeadDraft, IndexDraft, ModelDraft, SuffixDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.source_text import format_place
from orchestrator.config.target import Target
from orchestrator.worker.measuring.prompts import MeasurementError

CHAIN = "chain"
"""All candidates that can be loaded, in order of cost."""
CONFIGURED = "configured"
"""The configuration's drafts together, where that is another chain."""
# The order in which a chain asks: by what a token of each takes.
_COST = {"suffix": 0, "index": 1, "head": 2, "model": 3}


@dataclass(frozen=True, slots=True)
class Candidate:
    """What `drafts` may be, and what it is called here."""

    name: str
    drafts: tuple[AnyDraft, ...]

    def to_items(self) -> list[dict[str, Any]]:
        """Return the items of `drafts`, as cluster.yaml has them."""
        return [draft.model_dump(mode="json", exclude_unset=True) for draft in self.drafts]


def choose_replica(config: ClusterConfig, number: int | None) -> ClusterConfig:
    """Return the configuration of a target that runs as the item of `model.replicas` with this number does, with its
    drafts. None: of one as `model` and `drafts` say; then no item may have drafts of its own. Raises
    MeasurementError."""
    placements = config.model.placements
    if number is None:
        own = next((index for index, placement in enumerate(placements) if placement.own_drafts is not None), None)
        if own is not None:
            why = "it has drafts of its own; say which item to compare for, as in"
            raise MeasurementError(f"{_name_item(config, own)}: {why} --replica {own}")
        return config
    if number >= len(placements):
        raise MeasurementError(f"--replica {number}: there are {len(placements)} items, from 0")
    placement = placements[number]
    if placement.is_endpoint:
        raise MeasurementError(f"{_name_item(config, number)}: another engine's server drafts for itself")
    if placement.host not in ("", THIS_NODE):
        raise MeasurementError(f"{_name_item(config, number)}: it runs on {placement.host}; compare drafts there")
    limits = {name: value for name in ("kv_cache", "max_batch_rows") if (value := getattr(placement, name)) is not None}
    devices = {name: value for name in ("cores", "threads") if (value := getattr(placement, name))}
    return config.model_copy(
        update={
            "model": config.model.with_own(placement).model_copy(update={"replicas": 1}),
            "drafts": config.drafts if placement.own_drafts is None else placement.own_drafts,
            "limits": config.limits.model_copy(update=limits),
            "devices": config.devices.model_copy(update=devices),
        }
    )


def _name_item(config: ClusterConfig, number: int) -> str:
    return format_place(config.find_place("model", "replicas", number))


def format_drafts(items: Sequence[dict[str, Any]]) -> str:
    return yaml.safe_dump({"drafts": list(items)}, sort_keys=False, allow_unicode=True, width=120).rstrip("\n")


def list_candidates(config: ClusterConfig, stores: Sequence[Path], models: Sequence[str]) -> list[Candidate]:
    """Return every draft alone: the configuration's, suffix, then the stores and models that were named; each once."""
    every: list[AnyDraft] = [*config.drafts]
    if not any(isinstance(draft, SuffixDraft) for draft in every):
        every.append(SuffixDraft(method="suffix"))
    every += [IndexDraft(method="index", path=str(path.resolve())) for path in stores]
    every += [_model_draft(source, config.model) for source in models]
    by_name: dict[str, Candidate] = {}
    seen: list[tuple[str, str]] = []
    for draft in every:
        if (what := _identify(draft)) not in seen:
            seen.append(what)
            name = _choose_name(draft, by_name)
            by_name[name] = Candidate(name, (draft,))
    return list(by_name.values())


def chain_candidates(config: ClusterConfig, loaded: Sequence[Candidate]) -> list[Candidate]:
    """Return the chains of those candidates that were loaded: the configuration's own, and all; no lone draft."""
    all_drafts = tuple(sorted((candidate.drafts[0] for candidate in loaded), key=lambda draft: _COST[draft.method]))
    own = tuple(draft for draft in config.drafts if draft in all_drafts)
    chains = {CONFIGURED: own, CHAIN: all_drafts}
    if own == all_drafts:
        del chains[CONFIGURED]
    return [Candidate(name, drafts) for name, drafts in chains.items() if len(drafts) > 1]


def _model_draft(source: str, target: Target) -> ModelDraft:
    """Return a draft model on the target's runtime; a file of this machine by its whole path."""
    if source.startswith(SIMULATED_PREFIX):
        return ModelDraft(method="model", source=source, adapter="simulated")
    path = Path(source).expanduser()
    named = str(path.resolve()) if path.exists() else source
    if target.adapter in ("simulated", "openvino_rt"):
        return ModelDraft(method="model", source=named)
    return ModelDraft(method="model", source=named, adapter=target.adapter)


def _identify(draft: AnyDraft) -> tuple[str, str]:
    match draft:
        case IndexDraft():
            place = draft.path
        case EndpointDraft():
            place = draft.endpoint
        case HeadDraft():
            place = draft.source
        case ModelDraft():
            place = f"{draft.source} {draft.adapter} {draft.device}"
        case _:
            place = ""
    return draft.method, place


def _choose_name(draft: AnyDraft, taken: dict[str, Candidate]) -> str:
    if isinstance(draft, IndexDraft):
        name = f"index {draft.store}"
    elif isinstance(draft, HeadDraft | ModelDraft):
        name = f"{draft.method} {draft.source.rstrip('/').rsplit('/', 1)[-1]}"
    elif isinstance(draft, EndpointDraft):
        name = f"model on {draft.endpoint}"
    else:
        name = draft.method
    count = sum(other == name or other.startswith(f"{name} #") for other in taken)
    return f"{name} #{count + 1}" if count else name

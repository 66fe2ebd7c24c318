"""What LoRA adapters of a target must be: named once, of its architecture and shapes, where a runtime applies them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from adapters.contract import AdapterUnavailable, ModelRefused
from adapters.hf_hub import HUB_PREFIX
from adapters.llama_cpp.fork_faults import NO_LORAS
from adapters.llama_cpp.library import WrongLibrary, check_fault
from adapters.lora import check_lora, find_lora, list_lora_runtimes
from adapters.model_source import is_directory, resolve
from adapters.names import LLAMA_CPP
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import SourceFile
from orchestrator.config.target import AUTO, SPLITTING_KEYS

_SPLIT = "adapters are applied to whole targets; leave {} out"


def check_loras(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse LoRA adapters that no replica could apply, and those whose files are not of this model, as far as it is
    here. Raises ConfigError."""
    model, place = config.model, config.find_place("model", "adapters")
    if not model.adapters:
        return
    for number, lora in enumerate(model.adapters):
        if sum(lora.name == other.name for other in model.adapters) > 1:
            raise file.refuse((*place, number, "name"), f"{lora.name!r} is the name of two adapters; give each its own")
        try:
            find_lora(lora.source, file.base)
        except ModelRefused as error:
            raise file.refuse((*place, number, "source"), error) from error
    _check_runtimes(config, file)
    source = None if model.source.startswith(HUB_PREFIX) else resolve(model.source, file.base)
    if source is None or source.parts is not None:  # whoever has the whole model says what is wrong
        return
    for number, lora in enumerate(model.adapters):
        try:
            check_lora(find_lora(lora.source, file.base), source.path)
        except ModelRefused as error:
            raise file.refuse((*place, number, "source"), error) from error


def find_lora_runtimes(config: ClusterConfig, base: Path) -> tuple[str, ...]:
    """Return which runtimes of ours apply all LoRA adapters of a target, () where it has none. Raises ModelRefused."""
    if not config.model.adapters:
        return ()
    paths = [find_lora(lora.source, base) for lora in config.model.adapters]
    return list_lora_runtimes(is_directory=is_directory(config.model.source, base), loras=paths)


def _check_runtimes(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse adapters that no replica applies, or that the library here does not."""
    model, place = config.model, config.find_place("model", "adapters")
    for key in SPLITTING_KEYS & model.model_fields_set:
        if getattr(model, key) not in ([], 1):
            raise file.refuse(config.find_place("model", key), _SPLIT.format(key))
    able = find_lora_runtimes(config, file.base)
    runtimes = dict.fromkeys(model.with_own(own).adapter for _, own in config.own_replicas)
    if not able or runtimes.keys().isdisjoint((*able, AUTO)):
        which = " and ".join(runtimes) or "no runtime here"
        way_out = f"Set adapter: {' or '.join(able)} for the model or one of its replicas, or leave adapters out."
        if not able:
            way_out = "Of a model in a directory, give adapters as PEFT's directories."
        raise file.refuse(place, f"{which} applies no LoRA adapters of this form. {way_out}")
    if set(able) & runtimes.keys() != {LLAMA_CPP}:
        return
    try:
        with suppress(AdapterUnavailable):  # whoever looks for devices says so
            check_fault(model.source, NO_LORAS)
    except WrongLibrary as error:
        if not config.cluster.across_hosts:  # other hosts have libraries of their own
            raise file.refuse(place, error) from error

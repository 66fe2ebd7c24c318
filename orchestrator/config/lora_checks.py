"""What LoRA adapters of a target must be: named once, of its architecture and shapes, where a runtime applies them."""

from __future__ import annotations

from contextlib import suppress

from adapters.contract import AdapterUnavailable, ModelRefused
from adapters.gguf_splits import read_model_header
from adapters.hf_hub import HUB_PREFIX
from adapters.llama_cpp.fork_faults import NO_LORAS
from adapters.llama_cpp.library import WrongLibrary, check_fault
from adapters.lora import check_lora, find_lora
from adapters.model_source import resolve
from adapters.names import LORA_ADAPTERS
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import SourceFile
from orchestrator.config.target import AUTO

_WAY_OUT = f"Set adapter: {' or '.join(LORA_ADAPTERS)} for the model or one of its replicas, or leave adapters out."


def check_loras(config: ClusterConfig, file: SourceFile) -> None:
    """Refuse LoRA adapters that no replica could apply, and those whose files are not of this model, as far as it is
    here. Raises ConfigError."""
    model, place = config.model, config.find_place("model", "adapters")
    if not model.adapters:
        return
    runtimes = dict.fromkeys(model.with_own(own).adapter for _, own in config.own_replicas)
    if runtimes.keys().isdisjoint((*LORA_ADAPTERS, AUTO)):
        which = " and ".join(runtimes) or "no runtime here"
        raise file.refuse(place, f"{which} applies no LoRA adapters. {_WAY_OUT}")
    for number, lora in enumerate(model.adapters):
        if sum(lora.name == other.name for other in model.adapters) > 1:
            raise file.refuse((*place, number, "name"), f"{lora.name!r} is the name of two adapters; give each its own")
    elsewhere = bool(config.cluster.on_ray and config.cluster.address)
    header = None
    if not model.source.startswith(HUB_PREFIX):
        path = resolve(model.source, file.base).path
        if path.is_dir():
            raise file.refuse(place, f"adapters are applied to GGUF files, and {model.source} is a directory")
        header = read_model_header(path)
    try:
        with suppress(AdapterUnavailable):  # whoever looks for devices says so
            check_fault(model.source, NO_LORAS)
    except WrongLibrary as error:
        if not elsewhere:  # other hosts have libraries of their own
            raise file.refuse(place, error) from error
    for number, lora in enumerate(model.adapters):
        try:
            path = find_lora(lora.source, file.base)
            if header is not None:
                check_lora(path, header)
        except ModelRefused as error:
            raise file.refuse((*place, number, "source"), error) from error

"""What `model.tensor_parallel` may not say together with the rest of cluster.yaml, and with the model's shape."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from adapters.contract import AdapterError
from adapters.decoder.source import open_source
from adapters.decoder.spec import DecoderSpec, describe_too_many
from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import resolve
from adapters.names import OWN_ADAPTERS
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, format_place
from orchestrator.config.target import AUTO, Target
from orchestrator.errors import ConfigError

_SPLITTING = "torch_device"


def check_tensor_parallel(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse tensor parallelism where it cannot be. Raises ConfigError."""
    if config.model.tensor_parallel == 1:
        return
    place: Place = config.find_place("model", "tensor_parallel")
    why = _find_contradiction(config.model) or _find_misfit(config.model, path.resolve().parent)
    if why:
        raise ConfigError(f"{path}:{lines.get(place, 1)}: {format_place(place)}: {why}")


def _find_contradiction(model: Target) -> str:
    if AUTO in (model.adapter, model.device):
        key = "adapter" if model.adapter == AUTO else "device"
        return f"a plan splits no layers, and the {key} is {AUTO!r}; name it, or leave tensor_parallel out"
    if model.adapter in OWN_ADAPTERS and model.adapter != _SPLITTING:
        return f"{model.adapter} cannot split layers; set adapter: {_SPLITTING}, or leave tensor_parallel out"
    if model.static_shapes == "on":
        return "graphs of fixed shape hold whole targets; leave one of static_shapes and tensor_parallel out"
    if model.shards:
        return "a target is in layer shards or its layers are split, not both; leave one of shards and this out"
    return ""


def _find_misfit(model: Target, base: Path) -> str:
    """Return why the model is not for so many ranks, "" where its files are not at hand: its worker looks again."""
    decoder: DecoderSpec | None = None
    if not model.source.startswith(HUB_PREFIX):
        with suppress(AdapterError):  # whoever loads it says what is wrong with the file
            decoder = open_source(resolve(model.source, base).path).spec
    if decoder is None or model.tensor_parallel <= decoder.most_ranks:
        return ""
    return describe_too_many(decoder, model.tensor_parallel)

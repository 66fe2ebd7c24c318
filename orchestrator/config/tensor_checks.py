"""What `model.tensor_parallel` may not say together with the rest of cluster.yaml, and with the model's shape."""

from __future__ import annotations

from pathlib import Path

from adapters.decoder.spec import DecoderSizes, DecoderSpec, describe_too_many
from adapters.names import OWN_ADAPTERS
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, describe_place
from orchestrator.config.target import AUTO, Target
from orchestrator.errors import ConfigError

_SPLITTING = "torch_device"


def check_tensor_parallel(config: ClusterConfig, decoder: DecoderSizes | None, path: Path, lines: Lines) -> None:
    """Refuse tensor parallelism where it cannot be, for the model's shape too where that is known. Raises
    ConfigError."""
    if config.model.tensor_parallel == 1:
        return
    place: Place = config.find_place("model", "tensor_parallel")
    ranks = config.model.tensor_parallel
    why = _find_contradiction(config.model)
    if not why and isinstance(decoder, DecoderSpec) and ranks > decoder.most_ranks:
        why = describe_too_many(decoder, ranks)
    if why:
        raise ConfigError(f"{describe_place(path, lines, place)} {why}")


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

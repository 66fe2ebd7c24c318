"""What `model.shards` may not say together with the rest of cluster.yaml."""

from __future__ import annotations

from pathlib import Path

from adapters.contract import ModelRefused, cut_layers
from adapters.decoder.spec import DecoderSizes
from adapters.names import OWN_ADAPTERS, SHARDING_ADAPTERS
from orchestrator.config.adapter_names import describe_whole, list_sharding
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, describe_place, format_place
from orchestrator.config.target import AUTO
from orchestrator.errors import ConfigError

ONLY_ON_RAY = "goes with Ray, which cluster.address or cluster.runtime: ray asks for; others run on this machine"


def check_shards(config: ClusterConfig, decoder: DecoderSizes | None, path: Path, lines: Lines) -> None:
    """Refuse layer shards that contradict the model's other keys, or its shape where that is known. Raises
    ConfigError."""
    model = config.model
    if not model.shards:
        return
    place: Place = config.find_place("model", "shards")
    where = describe_place(path, lines, place)
    if len(model.shards) == 1:
        raise ConfigError(f"{where} one shard is the whole target; name two or more, or leave it out")
    for number, shard in enumerate(model.shards):
        if shard.host and not config.cluster.on_ray:
            at: Place = (*place, number, "host")
            raise ConfigError(f"{describe_place(path, lines, at)} {ONLY_ON_RAY}")
    whole = model.adapter in OWN_ADAPTERS and model.adapter not in SHARDING_ADAPTERS
    if whole and not all(shard.adapter for shard in model.shards):
        raise ConfigError(
            f"{where} {describe_whole(model.adapter)}; set adapter: {list_sharding()}, or leave shards out"
        )
    if AUTO in (model.adapter, model.device):
        key = "adapter" if model.adapter == AUTO else "device"
        raise ConfigError(f"{where} a plan chooses shards where the {key} is {AUTO!r}; name it, or leave shards out")
    for of, draft in config.all_drafts:
        if isinstance(draft, ModelDraft) and AUTO in (draft.adapter, draft.device):
            raise ConfigError(
                f"{describe_place(path, lines, of)} no plan is made beside {format_place(place)}; "
                "name the draft's adapter and device"
            )
    if model.static_shapes == "on":
        raise ConfigError(f"{where} graphs of fixed shape hold whole targets; leave one of static_shapes and this out")
    if decoder is not None:
        try:
            cut_layers([shard.layers for shard in model.shards], decoder.layers, model.source)
        except ModelRefused as error:
            raise ConfigError(f"{where} {error}") from error

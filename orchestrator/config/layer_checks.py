"""What `device_layers` may not say: devices that hold all layers or nothing."""

from __future__ import annotations

from pathlib import Path

from adapters.names import LLAMA_CPP, OWN_ADAPTERS
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, format_place
from orchestrator.config.target import AUTO, Target
from orchestrator.errors import ConfigError


def check_device_layers(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse a number of layers for a device that holds all of them or nothing. Raises ConfigError."""
    models: list[tuple[Place, Target | ModelDraft]] = [(config.find_place("model"), config.model)]
    models += [(at, draft) for at, draft in config.all_drafts if isinstance(draft, ModelDraft)]
    for at, model in models:
        fits = model.adapter not in OWN_ADAPTERS or (model.adapter == LLAMA_CPP and model.device != "CPU")
        if model.device_layers == "all" or (fits and AUTO not in (model.adapter, model.device)):
            continue
        place = (*at, "device_layers")
        raise ConfigError(
            f"{path}:{lines.get(place, 1)}: {format_place(place)}: {model.adapter} on {model.device} has all layers "
            f"there. Set adapter: {LLAMA_CPP} and a GPU as the device, or leave the key out."
        )

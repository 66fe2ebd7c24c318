"""What `model.replicas` may not say together with the rest of cluster.yaml."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, format_place
from orchestrator.config.target import Placement, ReplicaBounds
from orchestrator.errors import ConfigError

_ROOM = "a second replica would compute on the same"


def list_placements(config: ClusterConfig) -> list[tuple[Place, Placement]]:
    """Return where replicas may run, as far as that is written, with its place in the file."""
    bounds = config.model.bounds
    if bounds is not None:
        return [
            (config.find_place("model", "replicas", "places", index), one) for index, one in enumerate(bounds.places)
        ]
    return [(config.find_place("model", "replicas", index), one) for index, one in enumerate(config.model.placements)]


def check_bounds(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse bounds that contradict each other, and those between which load could change nothing. Raises
    ConfigError."""
    bounds = config.model.bounds
    if bounds is None:
        return
    for key, why in (("max", _refuse_most(bounds)), ("places", _refuse_places(config, bounds))):
        if why:
            place: Place = config.find_place("model", "replicas", key)
            line = lines.get(place, lines.get(place[:-1], 1))
            raise ConfigError(f"{path}:{line}: {format_place(place)}: {why}")


def _refuse_most(bounds: ReplicaBounds) -> str:
    if bounds.max < bounds.min:
        return f"must be at least min, which is {bounds.min}"
    if bounds.max == bounds.min:
        return f"is min, so that load decides nothing; raise it, or write replicas: {bounds.min}"
    return ""


def _refuse_places(config: ClusterConfig, bounds: ReplicaBounds) -> str:
    if bounds.places:
        if config.planned:
            return "the plan chooses them; leave them out, and name devices or hosts in placement.pin_target"
        if len(bounds.places) != bounds.max:
            return f"must be one for each of max, which is {bounds.max}, not {len(bounds.places)}"
        return ""
    if config.planned or config.cluster.address:
        return ""
    if not config.model.device.startswith("CPU"):
        return f"is missing: {_ROOM} device, {config.model.device}; name a place for each, as in [{{}}, {{}}]"
    if not config.devices.threads:
        way_out = "set devices.threads, or name a place for each, as in [{cores: [0, 1]}, {cores: [2, 3]}]"
        return f"is missing: {_ROOM} cores, for each takes all of them; {way_out}"
    return ""

"""Checks of `models` that need the whole configuration."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, Place, describe_place, format_place, format_value
from orchestrator.errors import ConfigError


def check_names(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse targets that a request could not tell apart. Raises ConfigError."""
    if not config.models:
        return
    if not config.model.name:
        where = f"{path}:{lines.get(('model',), 1)}: model.name:"
        raise ConfigError(f"{where} is missing: requests choose among several models by their names")
    seen: dict[str, Place] = {config.model.name: ("model", "name")}
    for index, one in enumerate(config.models):
        place: Place = ("models", index, "name")
        if (first := seen.setdefault(one.name, place)) != place:
            where = describe_place(path, lines, place)
            known = f"{format_place(first)} in line {lines.get(first, 1)}"
            raise ConfigError(f"{where} {format_value(one.name)} is the name of another model, {known}; choose one")


def check_own_placement(target: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse a `placement` of a further target of which nothing is left to a plan. Raises ConfigError."""
    place = target.find_place("placement")
    if place == ("placement",) or target.planned:
        return
    where = describe_place(path, lines, place)
    way_out = f"set {format_place((*place[:-1], 'adapter'))} or device to auto, or leave it out"
    raise ConfigError(f"{where} goes with a plan; {way_out}")

"""Each value of a configuration, and where it came from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator.config.changes import format_setting
from orchestrator.config.further_target import find_first_place
from orchestrator.config.load import admin_socket_path, state_directory, store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.section import Section
from orchestrator.config.source_text import Lines, Place, format_place
from orchestrator.config.target import Target

_DIRECTORIES: Final[dict[Place, tuple[str, str]]] = {
    ("store", "directory"): ("CACHE_DIRECTORY", "XDG_CACHE_HOME"),
    ("state", "directory"): ("STATE_DIRECTORY", "XDG_STATE_HOME"),
    ("api", "admin_socket"): ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"),
}
"""What is left empty is found by these variables, the first one that is set."""
DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as it holds. `origin`: "FILE:LINE", "default", "environment NAME", "derived", or the key that it is
    taken from ("as speculation")."""

    place: Place
    value: str
    origin: str

    @property
    def name(self) -> str:
        """The key as people write it."""
        return format_place(self.place)


def list_settings(config: ClusterConfig, path: Path, lines: Lines) -> list[Setting]:
    """Return every value, in the order of the language. Raises ConfigError where no admin socket can be."""
    return [_derive(setting, config, path) or setting for setting in _walk((), config, path, lines, given=True)]


def list_values(config: ClusterConfig) -> dict[str, str]:
    """Return every value by its key, without secrets."""
    return {setting.name: setting.value for setting in _walk((), config, Path(), {}, given=False)}


def _walk(place: Place, value: Any, path: Path, lines: Lines, *, given: bool) -> Iterator[Setting]:
    """Yield the values below a place. `given`: the file has what holds it."""
    if isinstance(value, Section):
        for name in type(value).model_fields:
            mine = given and name in value.model_fields_set
            yield from _walk((*place, name), getattr(value, name), path, lines, given=mine)
    elif isinstance(value, list | tuple) and any(isinstance(item, Section) for item in value):
        for index, item in enumerate(value):
            yield from _walk((*place, index), item, path, lines, given=given)
    else:
        yield Setting(place, format_setting(value), _find_origin(place, value, path, lines, given=given))


def _find_origin(place: Place, value: Any, path: Path, lines: Lines, *, given: bool) -> str:
    if given:
        near = next((place[:end] for end in range(len(place), 0, -1) if place[:end] in lines), ())
        return f"{path}:{lines.get(near, 1)}"
    if value is None and place[0] == "models" and len(place) == 3:
        return f"as {place[2]}"
    if value is None and "replicas" in place:
        return _find_shared(place)
    return DEFAULT


def _find_shared(place: Place) -> str:
    """Return which key of its target an item of `replicas` takes a value from."""
    key, target = str(place[-1]), place[: place.index("replicas")]
    further = target[:-1] == ("models",)
    if key in Target.model_fields or further:
        return f"as {format_place((*target, key))}"
    return f"as {find_first_place(key)}"


def _derive(setting: Setting, config: ClusterConfig, path: Path) -> Setting | None:
    """Return a value that is left empty as it comes out; None for any other."""
    names = _DIRECTORIES.get(setting.place)
    if names is None or setting.value:
        return None
    value = {
        "store": lambda: store_directory(config),
        "state": lambda: state_directory(config, path),
        "api": lambda: admin_socket_path(config, config.api.port),
    }[str(setting.place[0])]()
    by = next((name for name in names if os.environ.get(name)), "")
    return Setting(setting.place, format_setting(str(value)), f"environment {by}" if by else "derived")

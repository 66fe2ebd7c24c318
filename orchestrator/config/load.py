"""Reads cluster.yaml. Every problem is one line: file:line, the key, what is wrong, the way out."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from adapters.contract import ModelRefused
from adapters.model_source import resolve
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import ConfigError

Place = tuple[str | int, ...]
Lines = dict[Place, int]

SIMULATED_PREFIX = "simulated:"
_USUAL_PLACES = (Path("cluster.yaml"), Path("/etc/outrider/cluster.yaml"))


def load_config(path: Path) -> ClusterConfig:
    """Read and check a cluster.yaml, model files included. Raises ConfigError, one line a problem."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    config, lines = _parse(text, path)
    _check_source(config, path, lines)
    return config


def parse_config(text: str, path: Path) -> ClusterConfig:
    """Check a cluster.yaml's text against the schema only. Raises ConfigError naming `path`."""
    return _parse(text, path)[0]


def default_config_path() -> Path:
    """Return ./cluster.yaml or /etc/outrider/cluster.yaml. Raises ConfigError when neither is there."""
    for path in _USUAL_PLACES:
        if path.is_file():
            return path
    raise ConfigError(f"no configuration: write {_USUAL_PLACES[0]} or name one with --config")


def admin_socket_path(config: ClusterConfig, port: int) -> Path:
    """Return the admin socket's path: as configured, else in the user's runtime directory, by port."""
    if config.api.admin_socket:
        return Path(config.api.admin_socket)
    directory = os.environ.get("RUNTIME_DIRECTORY") or os.environ.get("XDG_RUNTIME_DIR")
    if directory:
        return Path(directory.split(":")[0]) / f"outrider-{port}.sock"
    private = Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.stat().st_uid != os.getuid():
        raise ConfigError(f"{private} belongs to another user: set api.admin_socket")
    return private / f"outrider-{port}.sock"


def store_directory(config: ClusterConfig) -> Path:
    """Return where prepared models are kept."""
    if config.store.directory:
        return Path(config.store.directory).expanduser()
    directory = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return Path(directory) if directory else Path(platformdirs.user_cache_dir("outrider"))


def _parse(text: str, path: Path) -> tuple[ClusterConfig, Lines]:
    lines: Lines = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise ConfigError(f"{path}:1: is empty; it needs at least model.source")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: must be a mapping of keys to values")
        _note_lines(node, (), lines, path)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{path}:{line}: is not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {str(error).splitlines()[0]}") from error
    try:
        return ClusterConfig.model_validate(data), lines
    except ValidationError as error:
        found = sorted(_described(detail, lines) for detail in error.errors())
        raise ConfigError("\n".join(f"{path}:{line}: {message}" for line, message in found)) from error


def _note_lines(node: yaml.Node, place: Place, lines: Lines, path: Path) -> None:
    """Note the line of every key and item; a key that stands twice in one mapping is an error."""
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*place, str(key.value))
            line = key.start_mark.line + 1
            if at in lines:
                raise ConfigError(f"{path}:{line}: {_dotted(at)}: is set twice; the first is in line {lines[at]}")
            lines[at] = line
            _note_lines(value, at, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*place, index), lines, path)


def _dotted(place: Iterable[str | int]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _described(error: ErrorDetails, lines: Lines) -> tuple[int, str]:
    """Return (line, message) of one of pydantic's errors."""
    place: Place = tuple(error["loc"])
    known = place
    while known and known not in lines:
        known = known[:-1]
    line = lines.get(known, 1)
    name = _dotted(place)
    if error["type"] == "extra_forbidden":
        return line, f"{name}: unknown key; {_nearest(str(place[-1]), _valid_keys(place[:-1]))}"
    if error["type"] == "missing":
        return line, f"{name}: is missing"
    return line, f"{name}: {_reason(error)}"


def _reason(error: ErrorDetails) -> str:
    value, kind = error["input"], error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    if kind.startswith("byte_size"):
        return f"{value!r} is no size; write a number and a unit, as in '2 GiB'"
    if kind in ("literal_error", "enum"):
        return f"{_nearest_value(value, str(context.get('expected', '')))}, not {value!r}"
    if kind == "model_type":
        return f"must be a mapping of keys to values, not {value!r}"
    wanted = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"must be {wanted}, not {value!r}"


def _nearest_value(value: object, expected: str) -> str:
    return f"must be {expected}" if isinstance(value, (str, int, float, bool)) else f"must be one of {expected}"


def _nearest(key: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid keys are {', '.join(valid)}"


def _valid_keys(place: Place) -> list[str]:
    """Return the keys of the model that stands at `place`."""
    model: Any = ClusterConfig
    for part in place:
        if isinstance(part, int) or not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        annotation = model.model_fields[part].annotation
        members = [annotation, *getattr(annotation, "__args__", ())]
        model = next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), model)
    return sorted(model.model_fields)


def _check_source(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Find the model's file now, so that a wrong source is told with its line. Raises ConfigError."""
    source, adapter = config.model.source, config.model.adapter
    line = lines.get(("model", "source"), 1)
    if source.startswith(SIMULATED_PREFIX) != (adapter == "simulated"):
        raise ConfigError(
            f"{path}:{line}: model.source: {source!r} does not go with adapter {adapter!r}; "
            "the adapter 'simulated' takes 'simulated:toy' and nothing else does"
        )
    if source.startswith(SIMULATED_PREFIX):
        return
    try:
        resolve(source, path.resolve().parent)
    except ModelRefused as error:
        raise ConfigError(f"{path}:{line}: model.source: {error}") from error

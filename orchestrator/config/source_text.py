"""cluster.yaml's text as plain values, with the line of every key. Nothing here knows which keys are valid."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import ConfigError
from orchestrator.redaction import redact_secrets

Place = tuple[str | int, ...]
Lines = dict[Place, int]

# Aliases can make a short text unfold into an endless one.
MOST_PLACES = 10_000
_LONGEST_SHOWN = 60  # characters of a key or value in a message. Not tuned.
_MERGE_TAG = "tag:yaml.org,2002:merge"
_TEXT_TAG = "tag:yaml.org,2002:str"
# YAML 1.1 reads `off` and `no` as false and 2026-01-31 as a date. Here they are text, as in YAML 1.2, which
# editors follow: `speculation.method: off` means what it says.
_RESOLVED_OTHERWISE = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
_BOOLEANS = ("true", "True", "TRUE", "false", "False", "FALSE")


class _Loader(yaml.SafeLoader):
    """Safe tags only, YAML 1.2's booleans, and every failure as a YAML error with its line."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # the base class declares it so
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _RESOLVED_OTHERWISE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0] and value in _BOOLEANS:
            return "tag:yaml.org,2002:bool"
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # What PyYAML lets through for `!!int ''`, `!!bool abc` or a number of 5000 digits.
            kind = node.tag.rsplit(":", 1)[-1]
            raise yaml.constructor.ConstructorError(
                None, None, f"{format_value(node.value)} cannot be read as {kind}", node.start_mark
            ) from error


def read_text(path: Path) -> str:
    """Return the file's text. Raises ConfigError when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def parse_text(text: str, path: Path, *, least: str = "model.source") -> tuple[object, Lines]:
    """Return the values and the line of each; `least` is what a file must have. Raises ConfigError naming `path` and
    the line."""
    lines: Lines = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise ConfigError(f"{path}:1: is empty; it needs at least {least}")
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(f"{path}:{node.start_mark.line + 1}: must be a mapping of keys to values")
            _note_lines(node, (), lines, path, ())
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{path}:{line}: is not YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: is not YAML: the character {text[error.position]!r}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}:1: is nested too deeply to be a configuration") from error


def describe_place(path: Path, lines: Lines, place: Place) -> str:
    """Return where a place stands in a file, as errors begin: "cluster.yaml:7: drafts[0].method:"."""
    return f"{path}:{find_line(lines, place)}: {format_place(place)}:"


def find_line(lines: Lines, place: Place) -> int:
    """Return the line of a place, or of the nearest above it that is written down."""
    return next((lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in lines), 1)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read, and the line of each value in it."""

    path: Path
    lines: Lines

    @property
    def base(self) -> Path:
        """The directory that relative paths in it begin at."""
        return self.path.resolve().parent

    def resolve(self, written: str) -> Path:
        """Return a path that the file names."""
        return self.base / Path(written).expanduser()

    def refuse(self, place: Place, why: str | Exception) -> ConfigError:
        """Return the error that what stands at a place cannot be used."""
        return ConfigError(f"{describe_place(self.path, self.lines, place)} {why}")


def format_place(place: Place) -> str:
    """Return a place as people write it ("drafts[0].method"), always in one line."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        key = redact_secrets(part)
        name = key if key.isprintable() and len(key) <= _LONGEST_SHOWN else format_value(key)
        text += f".{name}" if text else name
    return text


def format_value(value: object) -> str:
    """Return a value as it is quoted in a message: one line, and short."""
    text = redact_secrets(repr(value).lower() if isinstance(value, bool) else repr(value))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _note_lines(node: yaml.Node, place: Place, lines: Lines, path: Path, above: tuple[yaml.Node, ...]) -> None:
    """Note the line of every key and item. Raises ConfigError for what YAML allows and a configuration cannot be:
    a key that stands twice or is no text, a value inside itself, aliases without end."""
    line = node.start_mark.line + 1
    lines.setdefault(place, line)
    if any(node is outer for outer in above):
        raise ConfigError(f"{path}:{lines[place]}: {format_place(place)}: contains itself")
    if len(lines) > MOST_PLACES:
        raise ConfigError(f"{path}:{line}: has more than {MOST_PLACES} values once its aliases are unfolded")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = _key_place(key, place, path)
            line = key.start_mark.line + 1
            if at in lines:
                raise ConfigError(f"{path}:{line}: {format_place(at)}: is set twice; the first is in line {lines[at]}")
            lines[at] = line
            _note_lines(value, at, lines, path, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*place, index), lines, path, (*above, node))


def _key_place(key: yaml.Node, place: Place, path: Path) -> Place:
    if key.tag in (_TEXT_TAG, _MERGE_TAG):
        return (*place, str(key.value))
    where = f" in {format_place(place)}" if place else ""
    written = format_value(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
    raise ConfigError(f"{path}:{key.start_mark.line + 1}: the key {written}{where} is no text; keys are words")

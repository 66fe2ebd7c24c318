"""Takes keys out of a YAML text, or puts one in, and leaves every other character as it is."""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml

from orchestrator.config.source_text import Place, format_place

Compose = Callable[[str], yaml.Node]


class NotEditable(Exception):
    """The text is written in a way that these edits do not know; the message names the key."""


def take_out(text: str, place: Place, note: str, compose: Compose) -> str:
    """Return the text without the key at a place: as a comment where it has lines of its own, with a note above. A
    mapping that would be empty goes too. Raises NotEditable."""
    root = compose(text)
    parent, index = _find(root, place)
    while len(parent.value) == 1 and len(place) > 1 and isinstance(place[-2], str):
        place = place[:-1]
        parent, index = _find(root, place)
    key, value = parent.value[index]
    first, last = int(key.start_mark.index), _end_of(value)
    line_start = text.rfind("\n", 0, first) + 1
    indent = text[line_start:first]
    newline = "\r\n" if "\r\n" in text else "\n"
    if not parent.flow_style:
        if indent.strip():
            raise NotEditable(f"{format_place(place)}: take it out by hand")
        end = _end_of_line(text, last)
        lines = text[line_start:end].splitlines(keepends=True)
        commented = "".join(f"{indent}# {line[len(indent) :] if line.strip() else line}" for line in lines)
        return f"{text[:line_start]}{indent}# {note}{newline}{commented}{text[end:]}"
    begin, end = first, last
    if index + 1 < len(parent.value):
        comma = re.match(r"\s*,[ \t]*", text[last:])
        if comma is None:
            raise NotEditable(f"{format_place(place)}: take it out by hand")
        end = last + comma.end()
    elif index:
        before = _end_of(parent.value[index - 1][1])
        if not text[before:first].strip(" \t\r\n,"):  # a comment stays, behind a comma that may stay too
            begin = before
    taken = " ".join(text[first:last].split())
    line = text[line_start:]
    margin = line[: len(line) - len(line.lstrip(" \t"))]
    note = f"{margin}# {note}; it was `{taken}`{newline}"
    return f"{text[:line_start]}{note}{text[line_start:begin]}{text[end:]}"


def put_in(text: str, place: Place, value: str, compose: Compose) -> str:
    """Return the text with a key that was not there, at the end of its mapping, which is there. Raises NotEditable."""
    root = compose(text)
    parent: yaml.Node = root
    for part in range(len(place) - 1):
        above, index = _find(root, place[: part + 1])
        parent = above.value[index][1]
    if not isinstance(parent, yaml.MappingNode) or not parent.value:
        raise NotEditable(f"{format_place(place)}: write it by hand: {place[-1]}: {value}")
    last = _end_of(parent.value[-1][1])
    if parent.flow_style:
        return f"{text[:last]}, {place[-1]}: {value}{text[last:]}"
    key = parent.value[0][0].start_mark
    end = _end_of_line(text, last)
    newline = "\r\n" if "\r\n" in text else "\n"
    before = "" if text[:end].endswith("\n") else newline
    return f"{text[:end]}{before}{' ' * key.column}{place[-1]}: {value}{newline}{text[end:]}"


def read_value(text: str, place: Place, compose: Compose) -> str:
    """Return how the value at a place is written. Raises NotEditable where that takes several lines."""
    parent, index = _find(compose(text), place)
    value = parent.value[index][1]
    written = text[value.start_mark.index : _end_of(value)]
    if "\n" in written:
        raise NotEditable(f"{format_place(place)}: move it by hand: it has several lines")
    return written


def _find(root: yaml.Node, place: Place) -> tuple[yaml.MappingNode, int]:
    """Return the mapping that has the last key of a place, and which of its pairs that is."""
    node: yaml.Node = root
    for part in place[:-1]:
        node = _step(node, part, place)
    if isinstance(node, yaml.MappingNode):
        for index, (key, _) in enumerate(node.value):
            if key.value == place[-1]:
                return node, index
    raise NotEditable(f"{format_place(place)}: change it by hand: it stands in an alias, or in a merged mapping")


def _step(node: yaml.Node, part: str | int, place: Place) -> yaml.Node:
    if isinstance(part, int) and isinstance(node, yaml.SequenceNode) and part < len(node.value):
        found: yaml.Node = node.value[part]
        return found
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                inner: yaml.Node = value
                return inner
    raise NotEditable(f"{format_place(place)}: change it by hand: it stands in an alias, or in a merged mapping")


def _end_of(node: yaml.Node) -> int:
    """Return where a node's own text ends: the mark of a block collection is behind the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end_of(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _end_of_line(text: str, index: int) -> int:
    """Return where the next line begins."""
    if index and text[index - 1] == "\n":  # a block scalar ends behind its last line
        return index
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1

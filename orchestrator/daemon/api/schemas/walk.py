"""Finds the schemas within a schema, references followed, without recursion: a client chooses how deep it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

Node = dict[str, Any]

IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Keys that apply other schemas to the same value."""
_ONE = (
    *("additionalItems", "additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_DEFINITIONS = ("$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")
_MOST_SHOWN = 160  # characters of a pointer in a message. Not tuned.
_MOST_BITS = 1100  # more than the largest float has
# Characters of a reference. Bounds work (ADR 0100).
_MOST_REFERENCE = 4096


class SchemaRefused(Exception):
    """A schema that cannot be kept to. The words name the key by its JSON pointer, and the way out."""


class Place(NamedTuple):
    """A schema within a schema: the tokens of its JSON pointer behind those of the schema `above` it."""

    node: Node
    above: Place | None
    tokens: tuple[str, ...]

    def at(self, *keys: str) -> str:
        """Return a key's pointer, as messages show it: with its middle left out where it is long."""
        tokens = list(keys)
        place: Place | None = self
        while place is not None:
            tokens[:0] = place.tokens
            place = place.above
        pointer = "/".join(["#", *(token.replace("~", "~0").replace("/", "~1") for token in tokens)])
        if len(pointer) > _MOST_SHOWN:
            pointer = f"{pointer[: _MOST_SHOWN // 2]}...{pointer[-_MOST_SHOWN // 2 :]}"
        return f"'{pointer}'"

    def refuse(self, key: str, why: str) -> SchemaRefused:
        return SchemaRefused(f"{self.at(key)} cannot be kept to: {why}")


def applies(node: Node, kind: str) -> bool:
    named = node.get("type")
    return kind == named or not isinstance(named, str | list) or (isinstance(named, list) and kind in named)


def copy_json(value: Any) -> Any:
    """Return a deep copy of a JSON value. Raises SchemaRefused for a number that cannot be written."""
    copied: list[Any] = [None]
    left: list[tuple[Any, Any, Any]] = [(value, copied, 0)]
    while left:
        value, into, key = left.pop()
        if isinstance(value, dict):
            into[key] = dict.fromkeys(value)
            left += [(each, into[key], name) for name, each in value.items()]
        elif isinstance(value, list):
            into[key] = [None] * len(value)
            left += [(each, into[key], index) for index, each in enumerate(value)]
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise SchemaRefused("a number in it has too many digits")
        else:
            into[key] = value
    return copied[0]


def find_schemas(root: Node) -> tuple[list[Place], dict[str, Node]]:
    """Return the schemas that a value may have to meet, the root first, each once; and what their references mean,
    where that is a schema. Definitions that nothing refers to are none of them. Raises SchemaRefused where a reference
    is too long, or leads into a value ('const', 'enum', ...)."""
    places: list[Place] = []
    targets: dict[str, Node] = {}
    reached: set[int] = set()
    values: set[int] = set()
    elsewhere = False
    left = [Place(root, None, ())]
    while left:
        place = left.pop()
        if id(place.node) in reached:
            continue
        reached.add(id(place.node))
        places.append(place)
        below = list(_children(place))
        reference = place.node.get("$ref")
        if isinstance(reference, str):
            if len(reference) > _MOST_REFERENCE:
                raise place.refuse("$ref", f"it has over {_MOST_REFERENCE} characters; refer to a name in '$defs'")
            target = targets[reference] if reference in targets else _resolve(root, reference)
            if target is None:
                elsewhere = True
            else:
                targets[reference] = target
                below.append(Place(target, None, tuple(read_pointer(reference))))
        values |= _value_ids(place.node)
        left += reversed(below)
        if not left and elsewhere:  # what is meant may be any of the definitions
            elsewhere = False
            left += [
                Place(node, None, (key, name))
                for key in _DEFINITIONS
                for name, node in _items(root.get(key))
                if isinstance(node, dict)
            ]
    for place in places:
        if id(place.node) in values:
            raise SchemaRefused(f"{place.at()} is a value, and a '$ref' takes it for a schema")
    return places, targets


def _resolve(root: Node, reference: str) -> Node | None:
    if reference != "#" and not reference.startswith("#/"):
        return None
    node: Any = root
    for name in read_pointer(reference):
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isascii() and name.isdecimal() and int(name[:9]) < len(node):
            node = node[int(name)]
        else:
            return None
    return node if isinstance(node, dict) else None


def read_pointer(reference: Any) -> list[str]:
    return [_unescape(token) for token in reference.split("/")[1:]] if isinstance(reference, str) else []


def _children(place: Place) -> Iterator[Place]:
    node = place.node
    for key in _ONE:
        if isinstance(node.get(key), dict):
            yield Place(node[key], place, (key,))
    for key in _LISTS:
        if isinstance(node.get(key), list):
            for index, child in enumerate(node[key]):
                if isinstance(child, dict):
                    yield Place(child, place, (key, str(index)))
    for key in _MAPS:
        for name, child in _items(node.get(key)):
            if isinstance(child, dict):
                yield Place(child, place, (key, name))


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _value_ids(node: Node) -> set[int]:
    """Return the identities of the objects and arrays in what is data to a schema."""
    ids: set[int] = set()
    left = [node[key] for key in _VALUES if key in node]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            ids.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return ids


def _unescape(token: str) -> str:
    if "%" in token:
        token = unquote(token)
    return token.replace("~1", "/").replace("~0", "~")

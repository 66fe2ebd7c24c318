"""Whether finite JSON can satisfy a schema that refers to itself: the library that compiles schemas does not ask.

A schema whose required part is itself has no finite text: an answer under it ends in the middle, or never. What can be
satisfied is a least fixed point over the schema's parts. A part that contradicts itself without going round in a circle
is left to the library, which finds that and says it better: it is empty in the greatest fixed point too.

Keywords that are not known here count as no bound, so that nothing is called empty that is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Final
from urllib.parse import unquote

# ADR 0099: beyond it nothing is claimed, and llguidance's own bounds hold.
_MOST_PARTS: Final = 4000
# For the choices of one part. ADR 0099, as above.
_MOST_STEPS: Final = 10_000
_SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
_KINDS: Final = _SCALARS | {"object", "array"}
_CHOICES: Final = ("anyOf", "oneOf")

_Schemas = tuple[Any, ...]
"""Schemas that must all hold."""
_Chosen = Sequence[Mapping[str, Any]]
_Todo = list[tuple[Any, frozenset[int]]]


class _TooLarge(Exception):
    """More parts than are looked at."""


@dataclass(slots=True)
class _Way:
    """One way to satisfy a part: all of `needed`, and `extra` more out of `once` (once each) and `often`."""

    needed: list[int] = field(default_factory=list)
    extra: int = 0
    once: list[int] = field(default_factory=list)
    often: list[int] = field(default_factory=list)

    def works(self, full: Sequence[bool]) -> bool:
        if not all(full[part] for part in self.needed):
            return False
        return (
            self.extra <= 0 or any(full[part] for part in self.often) or self.extra <= sum(full[p] for p in self.once)
        )


def find_empty_part(schema: Any) -> str | None:
    """Return the place ("#/properties/a") of a part that no finite JSON satisfies because it needs itself, "#" for the
    whole; None where there is none, and for a schema that is too large to tell."""
    graph = _Parts(schema)
    try:
        graph.explore()
    except (_TooLarge, RecursionError):
        return None
    least, greatest = graph.solve(start=False), graph.solve(start=True)
    empty = (place for place, low, high in zip(graph.places, least, greatest, strict=True) if high and not low)
    return next(empty, None)


class _Parts:
    """The parts of a schema that an answer may meet, each once, and how each can be satisfied."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._numbers: dict[frozenset[int], int] = {}
        self._schemas: list[_Schemas] = []
        self.places: list[str] = []
        self._ways: list[list[_Way]] = []

    def explore(self) -> None:
        """Find all parts. Raises _TooLarge."""
        self._number((self._root,), "#")
        done = 0
        while done < len(self._schemas):
            self._ways.append([])
            for chosen in _list_choices(self._schemas[done], self._resolve):
                # A circle needs the part itself: never in the least fixed point, always in the greatest.
                ways = [_Way([done])] if chosen is None else self._list_ways(chosen, self.places[done])
                self._ways[done] += ways
            done += 1

    def solve(self, *, start: bool) -> list[bool]:
        """Return which parts can be satisfied: the least fixed point from False, the greatest from True."""
        finite = [start] * len(self._ways)
        changed = True
        while changed:
            changed = False
            for part in reversed(range(len(finite))):  # what a part needs was mostly found after it
                if finite[part] is start and any(way.works(finite) for way in self._ways[part]) is not start:
                    finite[part] = not start
                    changed = True
        return finite

    def _number(self, schemas: Sequence[Any], place: str) -> int:
        """Return the number of the part that these schemas make together."""
        kept = {id(schema): schema for schema in schemas if schema is not True and schema != {}}
        key = frozenset(kept)
        if key not in self._numbers:
            if len(self._schemas) >= _MOST_PARTS:
                raise _TooLarge
            self._numbers[key] = len(self._schemas)
            self._schemas.append(tuple(kept.values()))
            self.places.append(place)
        return self._numbers[key]

    def _resolve(self, reference: Any) -> Any:
        """Return what a reference means; True (no bound) where that is not in the schema itself."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        node = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return True
        return node

    def _list_ways(self, chosen: _Chosen, place: str) -> Iterator[_Way]:
        kinds = _KINDS
        for schema in chosen:
            kinds &= _list_kinds(schema)
        listed = any("const" in schema or "enum" in schema for schema in chosen)
        for kind in sorted(kinds):
            if listed or kind in _SCALARS:
                yield _Way()
            elif kind == "array":
                yield self._describe_array(chosen, place)
            else:
                yield self._describe_object(chosen, place)

    def _describe_array(self, chosen: _Chosen, place: str) -> _Way:
        heads = [_read_list(schema, "prefixItems") or _read_list(schema, "items") for schema in chosen]
        length = max([0, *map(len, heads)])
        least = max([0, *(_read_count(schema, "minItems") for schema in chosen)])
        way = _Way()
        for index in range(length + 1):
            items = [
                head[index] if index < len(head) else _read_rest(schema)
                for schema, head in zip(chosen, heads, strict=True)
            ]
            part = self._number(items, f"{place}/prefixItems/{index}" if index < length else f"{place}/items")
            if index < least:
                way.needed.append(part)
        return way

    def _describe_object(self, chosen: _Chosen, place: str) -> _Way:
        required = {name for schema in chosen for name in _read_list(schema, "required") if isinstance(name, str)}
        named = {name for schema in chosen for name in _read_table(schema, "properties")}
        way = _Way(extra=max([0, *(_read_count(schema, "minProperties") for schema in chosen)]) - len(required))
        for name in [*sorted(required), *sorted(named - required)]:
            values = [value for schema in chosen for value in _list_values(schema, name)]
            part = self._number(values, f"{place}/properties/{name}")
            (way.needed if name in required else way.once).append(part)
        others = [schema.get("additionalProperties", True) for schema in chosen]
        way.often.append(self._number(others, f"{place}/additionalProperties"))
        for schema in chosen:
            for pattern, value in _read_table(schema, "patternProperties").items():
                way.often.append(self._number((value,), f"{place}/patternProperties/{pattern}"))
        return way


def _list_choices(schemas: _Schemas, resolve: Callable[[Any], Any]) -> Iterator[_Chosen | None]:
    """Yield each choice among alternatives, as the schemas that then hold all together; None for a choice that comes
    back to a schema within itself. Raises _TooLarge."""
    # What is left to do, each with the schemas that it stands in, and what was chosen on the way.
    waiting: list[tuple[_Todo, dict[int, Mapping[str, Any]]]] = [([(schema, frozenset()) for schema in schemas], {})]
    steps = 0
    while waiting:
        todo, chosen = waiting.pop()
        branches: list[_Todo] = []
        circular = dead = False
        while todo and not (circular or dead or branches):
            steps += 1
            schema, above = todo.pop()
            circular, dead = id(schema) in above, schema is False
            if circular or not isinstance(schema, Mapping) or id(schema) in chosen:
                continue
            chosen[id(schema)] = schema
            inside = above | {id(schema)}
            if "$ref" in schema:
                todo.append((resolve(schema["$ref"]), inside))
            todo += [(part, inside) for part in _read_list(schema, "allOf")]
            branches = [[(branch, inside) for branch in schema[key]] for key in _CHOICES if _read_list(schema, key)]
        if branches:
            steps += prod(map(len, branches))
            if steps < _MOST_STEPS:
                waiting += [([*todo, *picked], dict(chosen)) for picked in product(*branches)]
        elif not dead:
            yield None if circular else list(chosen.values())
        if steps >= _MOST_STEPS:
            raise _TooLarge


def _list_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    names = frozenset([named] if isinstance(named, str) else filter(_is_text, _read_list(schema, "type")))
    kinds = _KINDS if not names else names | ({"integer"} if "number" in names else frozenset())
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            kinds &= frozenset().union(*map(_name_kinds, values))
    return kinds


def _name_kinds(value: Any) -> frozenset[str]:
    if value is None or isinstance(value, bool):
        return frozenset({"null" if value is None else "boolean"})
    if isinstance(value, int | float):
        return frozenset({"number", "integer"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array" if isinstance(value, list) else "object"})


def _list_values(schema: Mapping[str, Any], name: str) -> list[Any]:
    named, patterns = _read_table(schema, "properties"), _read_table(schema, "patternProperties")
    schemas = [named[name]] if name in named else []
    for pattern, value in patterns.items():
        try:
            if re.search(pattern, name):
                schemas.append(value)
        except re.error:  # of another language: it may fit, and bounds nothing here
            return schemas or [True]
    return schemas or [schema.get("additionalProperties", True)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _read_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    values = schema.get(key)
    return values if isinstance(values, list) else []


def _read_table(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    fields = schema.get(key)
    return fields if isinstance(fields, Mapping) else {}


def _read_count(schema: Mapping[str, Any], key: str) -> int:
    number = schema.get(key)
    return int(number) if isinstance(number, int | float) and number == number else 0


def _read_rest(schema: Mapping[str, Any]) -> Any:
    """Return what holds for items behind the listed ones."""
    items = schema.get("items", True)
    return schema.get("additionalItems", True) if isinstance(items, list) else items

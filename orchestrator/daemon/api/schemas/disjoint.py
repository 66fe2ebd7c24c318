"""Whether no value meets two of several schemas: then 'oneOf' says what 'anyOf' says, which a grammar can keep to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.daemon.api.schemas.definitions import Definitions
from orchestrator.daemon.api.schemas.walk import Node

# ADR 0100: bounds time; what is not found within it is refused, never guessed.
_MOST_STEPS = 60_000
_MOST_DEPTH = 12  # as above
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
"""'number' is here a number that is no integer."""


class OverlapSearch:
    """Looks at pairs of schemas of one document. `steps`: of all together; what is beyond counts as an overlap."""

    def __init__(self, definitions: Definitions, steps: int = _MOST_STEPS) -> None:
        self._definitions = definitions
        self._steps = steps
        self._views: dict[int, _View] = {}

    @property
    def spent(self) -> bool:
        return self._steps < 0

    def find_overlap(self, beside: Node, options: Sequence[Any]) -> tuple[int, int] | None:
        """Return two of the options that one value may meet, as far as can be seen; None where there are none. What
        stands `beside` them holds for each."""
        views: list[_View] = []
        for option in options:
            if self.spent:
                return 0, len(views)
            views.append(self._count(_View(self._definitions, [beside, option])))
        if self._differ_by_a_constant(views):
            return None
        for first, view in enumerate(views):
            for second in range(first + 1, len(views)):
                if not self._disjoint(view, views[second], 0):
                    return first, second
        return None

    def _view(self, schema: Any) -> _View:
        """Return the view of a schema of the document, which is made once."""
        view = self._views.get(id(schema))
        if view is None:
            view = self._views[id(schema)] = self._count(_View(self._definitions, [schema]))
        return view

    def _count(self, view: _View) -> _View:
        self._steps -= view.size
        return view

    def _disjoint(self, view: _View, other: _View, depth: int) -> bool:
        self._steps -= 1
        if self._steps < 0 or depth > _MOST_DEPTH:
            return False
        if view.values is not None and other.values is not None and not view.values & other.values:
            return True
        common = view.types & other.types
        if not common:
            return True
        if common == {"object"} and self._differ_by_a_property(view, other, depth):
            return True
        pairs = [(each, other) for each in view.choices] + [(each, view) for each in other.choices]
        return any(options and self._all_disjoint(options, against, depth) for options, against in pairs)

    def _all_disjoint(self, options: Sequence[Any], against: _View, depth: int) -> bool:
        return all(self._disjoint(self._view(option), against, depth + 1) for option in options)

    def _differ_by_a_property(self, view: _View, other: _View, depth: int) -> bool:
        for name in {**view.required, **other.required}:
            for first in view.list_schemas(name):
                for second in other.list_schemas(name):
                    if self._disjoint(self._view(first), self._view(second), depth + 1):
                        return True
            if self.spent:
                return False
        return False

    def _differ_by_a_constant(self, views: Sequence[_View]) -> bool:
        """Whether all are objects that one required property, with other values in each, tells apart."""
        if not views or any(view.types != {"object"} for view in views):
            return False
        for name in views[0].required:
            taken: set[str] = set()
            for view in views:
                values = self._values_of(view, name)
                if values is None or values & taken or self.spent:
                    break
                taken |= values
            else:
                return True
        return False

    def _values_of(self, view: _View, name: str) -> frozenset[str] | None:
        if name not in view.required:
            return None
        bounds = [part.values for part in map(self._view, view.list_schemas(name)) if part.values is not None]
        return bounds[0] if bounds else None


class _View:
    """What schemas that hold together say of a value, as far as it tells values apart. `values`: the only ones, None
    where there are others. `choices`: lists of schemas of which one holds. `size`: what it cost to look at."""

    def __init__(self, definitions: Definitions, schemas: Sequence[Any]) -> None:
        self._parts: list[Node] = []
        self.types = _TYPES
        self.values: frozenset[str] | None = None
        self.required: dict[str, None] = {}
        self.choices: list[list[Any]] = []
        self.size = 0
        for part in _conjuncts(definitions, schemas):
            self.size += 1
            if part is False:
                self.types = frozenset()
            elif isinstance(part, dict):
                self._parts.append(part)
                self._add(part)

    def _add(self, part: Node) -> None:
        self.types &= _types_of(part.get("type"))
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list):
            self.size += len(values)
            self.types &= frozenset(_type_of(value) for value in values)
            keys = [_tell(value) for value in values]
            if all(each is not None for each in keys):
                kept = frozenset(each for each in keys if each is not None)
                self.values = kept if self.values is None else self.values & kept
        if isinstance(part.get("required"), list):
            self.size += len(part["required"])
            self.required |= dict.fromkeys(name for name in part["required"] if isinstance(name, str))
        self.choices += [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)]

    def list_schemas(self, name: str) -> list[Any]:
        schemas = []
        for part in self._parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                schemas.append(properties[name])
            elif "patternProperties" not in part and "additionalProperties" in part:
                schemas.append(part["additionalProperties"])
        return schemas


def _conjuncts(definitions: Definitions, schemas: Sequence[Any]) -> Iterator[Any]:
    """Yield the schemas that hold together with these: what 'allOf' and '$ref' add, each once, a bounded number."""
    left, seen = list(schemas), set[int]()
    while left and len(seen) < _MOST_DEPTH:
        part = left.pop(0)
        yield part
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            left += part["allOf"] if isinstance(part.get("allOf"), list) else []
            target = definitions.find(part.get("$ref"))
            left += [] if target is None else [target]


def _types_of(named: Any) -> frozenset[str]:
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list):
        return _TYPES
    kinds = {name for name in names if isinstance(name, str)}
    return frozenset(kinds | {"integer"} if "number" in kinds else kinds)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "integer" if isinstance(value, int) or float(value).is_integer() else "number"


def _tell(value: Any) -> str | None:
    """Return what two values share exactly where they are equal; None where that cannot be said."""
    if isinstance(value, list | dict):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{_type_of(value)} {value}"

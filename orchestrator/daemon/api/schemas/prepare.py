"""Makes a schema ready to become a grammar: what says nothing goes, what cannot be kept to is refused by its pointer.

What is meant stays the same. Some keys are written in another way that a grammar has: a 'oneOf' of which one alone can
hold, property names that are listed, patterns that need not look around. Annotations that a reader could take for a
promise (an unknown 'format') are dropped, and told. All of it takes time in proportion to the schema's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.daemon.api.schemas.definitions import Definitions
from orchestrator.daemon.api.schemas.disjoint import OverlapSearch
from orchestrator.daemon.api.schemas.objects import bound_count, bound_names, require_object
from orchestrator.daemon.api.schemas.patterns import find_plain, looks_around
from orchestrator.daemon.api.schemas.walk import IN_PLACE, Node, Place, applies, copy_json, find_schemas, read_pointer

FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""The formats that a grammar keeps to."""
_ANNOTATIONS = frozenset((
    *("$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "id", "definitions"),
    *("default", "deprecated", "description", "example", "examples", "readOnly", "title", "writeOnly"),
    *("discriminator", "externalDocs", "xml"),
))  # fmt: skip
_KEPT = frozenset((
    *("$ref", "allOf", "anyOf", "const", "enum", "type"),
    *("additionalItems", "items", "maxItems", "minItems", "prefixItems"),
    *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "required"),
    *("format", "maxLength", "minLength", "pattern"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
))  # fmt: skip
_WRITTEN_ANEW = frozenset((
    *("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies"),
    *("dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "oneOf"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
))  # fmt: skip
_KNOWN = _ANNOTATIONS | _KEPT | _WRITTEN_ANEW
_NO_PROMISE = ("contentEncoding", "contentMediaType", "contentSchema")
_ANCHORS = ("$dynamicAnchor", "$recursiveAnchor")
# ADR 0100: bounds of numbers beyond it are drawn in, and told.
_FURTHEST = 10**18
_MOST_WARNINGS = 32  # what a client reads. Not tuned.
_MOST_SHOWN = 80  # characters of a key in a message. Not tuned.


@dataclass
class Dropped:
    """What was dropped of a schema: for each reason where it was first, and how often."""

    reasons: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, place: Place, key: str, why: str) -> None:
        first, count = self.reasons.get(why, ("", 0))
        if count or len(self.reasons) < _MOST_WARNINGS:
            self.reasons[why] = (first or place.at(key), count + 1)

    def list_warnings(self) -> tuple[str, ...]:
        return tuple(
            f"{first}{f' (and {count - 1} more)' if count > 1 else ''} {why}"
            for why, (first, count) in self.reasons.items()
        )


@dataclass(frozen=True, slots=True)
class PreparedSchema:
    """A schema that means what the client's does. `warnings`: what of it the output is not held to."""

    schema: Node
    warnings: tuple[str, ...]


def prepare_schema(schema: Node, *, objects: bool = False) -> PreparedSchema:
    """Return a schema ready to become a grammar. `objects`: of what it allows, these alone. Raises SchemaRefused."""
    root = copy_json(schema)
    (places, targets), dropped = find_schemas(root), Dropped()
    definitions = Definitions(root, targets)
    named = {token for place in places for token in read_pointer(place.node.get("$ref"))}
    for place in places:
        _note_unknown(place, dropped, named)
        for rule in _RULES:
            rule(place, dropped)
        bound_count(place, dropped.add)
    for place in places:  # what names and options mean is said by now
        bound_names(place, definitions, dropped.add)
    if "oneOf" not in named:  # an option that is referred to stays where it is
        overlaps = OverlapSearch(definitions)
        for place in places:
            _bound_choice(place, overlaps)
    if objects:
        require_object(root, places, definitions)
    return PreparedSchema(root, dropped.list_warnings())


def _note_unknown(place: Place, dropped: Dropped, named: set[str]) -> None:
    if place.node.pop("x-guidance", None) is not None:
        dropped.add(place, "x-guidance", "is not read: how JSON is written is the server's")
    for key in place.node:
        if key in _NO_PROMISE:
            dropped.add(place, key, "is an annotation: the text is not held to it")
        elif key == "nullable":
            dropped.add(place, key, "is no keyword of JSON Schema: add 'null' to 'type' to allow it")
        elif key not in _KNOWN and key not in named and not key.startswith("x-"):
            shown = key if len(key) <= _MOST_SHOWN else f"{key[:_MOST_SHOWN]}..."
            dropped.add(place, key, f"is not read: '{shown}' is no keyword of JSON Schema")


def _bound_format(place: Place, dropped: Dropped) -> None:
    named = place.node.get("format")
    if isinstance(named, str) and named not in FORMATS:
        del place.node["format"]
        dropped.add(place, "format", f"is an annotation: the text is not held to the format '{named[:_MOST_SHOWN]}'")


def _bound_pattern(place: Place, _: Dropped) -> None:
    node = place.node
    pattern = node.get("pattern")
    if isinstance(pattern, str) and looks_around(pattern):
        plain = find_plain(pattern)
        if plain is None or (plain.max_length is not None and node.get("format") != "hostname"):
            raise place.refuse("pattern", "look-around and references back are not supported; write it without")
        node["pattern"] = plain.pattern
        if plain.max_length is not None:
            own = node.get("maxLength")
            node["maxLength"] = min(own, plain.max_length) if isinstance(own, int) else plain.max_length
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict) and any(looks_around(each) for each in patterns):
        raise place.refuse("patternProperties", "look-around and references back are not supported; write it without")


def _bound_range(place: Place, dropped: Dropped) -> None:
    """Draw bounds in that are further out than a grammar counts."""
    for key, side in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = place.node.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) <= _FURTHEST:
            continue
        if bound * side < 0:
            raise place.refuse(key, f"numbers are held to {-_FURTHEST} at the least and {_FURTHEST} at the most")
        place.node[key] = side * _FURTHEST
        dropped.add(place, key, f"is drawn in to {side * _FURTHEST}: numbers are not written further out")


def _bound_items(place: Place, dropped: Dropped) -> None:
    node = place.node
    most = node.get("maxItems")
    if "uniqueItems" in node:
        idle = node["uniqueItems"] is False or not applies(node, "array") or (isinstance(most, int) and most <= 1)
        if not idle:
            raise place.refuse("uniqueItems", "an item could come twice; leave it out, and drop what comes twice")
        _drop(place, "uniqueItems", dropped)
    if "contains" not in node or not applies(node, "array"):
        for key in ("contains", "minContains", "maxContains"):
            _drop(place, key, dropped)
    if "contains" in node:
        raise place.refuse("contains", "name what an array has in 'prefixItems' or 'items' instead")


def _bound_condition(place: Place, dropped: Dropped) -> None:
    node = place.node
    if "if" not in node or not ("then" in node or "else" in node):
        for key in ("if", "then", "else"):
            _drop(place, key, dropped)
    if "if" in node:
        way_out = "write the cases as 'anyOf' instead, each with what holds in it"
        raise place.refuse("if", way_out)
    if node.get("not") is False:
        _drop(place, "not", dropped)
    elif node.get("not") in ({}, True):  # nothing at all is allowed
        del node["not"]
        node["enum"] = []
    elif "not" in node:
        raise place.refuse("not", "say what is allowed instead, by 'enum' or 'anyOf'")


def _bound_dependencies(place: Place, dropped: Dropped) -> None:
    node = place.node
    required = set(map(str, node["required"])) if isinstance(node.get("required"), list) else set()
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        needs = node.get(key)
        if key not in node:
            continue
        idle = isinstance(needs, dict) and all(
            needed is True or needed == {} or (isinstance(needed, list) and set(map(str, needed)) <= required)
            for needed in needs.values()
        )
        if not (idle or not applies(node, "object")):
            raise place.refuse(key, "write the cases as 'anyOf' instead, or make the properties required")
        _drop(place, key, dropped)


def _bound_unevaluated(place: Place, dropped: Dropped) -> None:
    node = place.node
    for key, known, kind in (
        ("unevaluatedProperties", "additionalProperties", "object"),
        ("unevaluatedItems", "items", "array"),
    ):
        if key not in node:
            continue
        if node[key] is True or node[key] == {} or not applies(node, kind):
            _drop(place, key, dropped)
        elif any(other in node for other in IN_PLACE):
            raise place.refuse(key, f"write the schemas beside it as one, with '{known}'")
        elif known in node and not isinstance(node[known], list):  # nothing is left that could be meant
            _drop(place, key, dropped)
        else:
            node["additionalItems" if known in node else known] = node.pop(key)


def _bound_references(place: Place, dropped: Dropped) -> None:
    for key in ("$dynamicRef", "$recursiveRef"):
        if key in place.node:
            raise place.refuse(key, "write '$ref' instead")
    for key in _ANCHORS:
        _drop(place, key, dropped)


def _bound_choice(place: Place, overlaps: OverlapSearch) -> None:
    """Make a 'oneOf' an 'anyOf' where no value meets two of its options."""
    node = place.node
    options = node.get("oneOf")
    if not isinstance(options, list):
        return
    overlap = overlaps.find_overlap({key: node[key] for key in node if key not in ("oneOf", "anyOf")}, options)
    if overlap is not None:
        why = "there is too much to compare in it" if overlaps.spent else f"a value could meet {_name(overlap)} of it"
        raise place.refuse("oneOf", f"{why}; write 'anyOf', or give each a required property with another 'const'")
    del node["oneOf"]
    if "anyOf" in node:
        node["allOf"] = [*_list_of(node.get("allOf")), {"anyOf": options}]
    else:
        node["anyOf"] = options


def _name(options: tuple[int, int]) -> str:
    return f"the options {options[0]} and {options[1]}"


def _drop(place: Place, key: str, dropped: Dropped) -> None:
    if place.node.pop(key, None) is not None:
        dropped.add(place, key, "says nothing here")


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_Rule = Callable[[Place, Dropped], None]
_RULES: Sequence[_Rule] = (
    _bound_format,
    _bound_pattern,
    _bound_range,
    _bound_items,
    _bound_condition,
    _bound_dependencies,
    _bound_unevaluated,
    _bound_references,
)

"""Schemas that are made to end whoever compiles them, or that no text satisfies."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def chain_nested(links: int, depth: int) -> Schema:
    """References in a chain, each under so many levels of `items`."""
    schema: Schema = {"$ref": "#/0"}
    for link in range(links):
        inner: Schema = {"$ref": f"#/{link + 1}"} if link < links - 1 else {"type": "null"}
        for _ in range(depth):
            inner = {"items": inner}
        schema[str(link)] = inner
    return schema


def chain_of(key: str, links: int) -> Schema:
    """References in a chain: bare ones, or each within `allOf` or `anyOf`."""
    schema: Schema = {"$ref": "#/0"}
    for link in range(links):
        inner: Schema = {"$ref": f"#/{link + 1}"} if link < links - 1 else {"type": "null"}
        schema[str(link)] = inner if key == "$ref" else {key: [inner]}
    return schema


def nest_names(names: list[str], depth: int) -> Schema:
    """Objects whose names are listed, in one another: of each name's values nothing is known but what they share."""
    schema: Schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "propertyNames": {"enum": names}, "additionalProperties": schema}
    return schema


def patterns_that_explode(numbers: range) -> Schema:
    """Patterns whose intersection has very many states."""
    return {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{number}}}"} for number in numbers]}


DEADLY: dict[str, Schema] = {
    "references through items": chain_nested(17, 100),
    "references": chain_of("$ref", 1500),
    "allOf": chain_of("allOf", 1500),
    "anyOf": chain_of("anyOf", 1500),
    "patterns": patterns_that_explode(range(20, 60)),
    "names by patterns": {
        "type": "object",
        "patternProperties": {f"^x{number}[a-z]+$": {"type": "string"} for number in range(900)},
    },
}

_SELF: Schema = {"$ref": "#"}
_AGAIN: Schema = {"type": "object", "properties": {"a": _SELF}, "required": ["a"]}
UNSATISFIABLE: dict[str, Schema] = {
    "itself": _SELF,
    "allOf itself": {"allOf": [_SELF]},
    "anyOf itself": {"anyOf": [_SELF, _SELF]},
    "each other": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}},
    "a required property": _AGAIN,
    "oneOf": {"oneOf": [_AGAIN, {"type": "array", "items": _SELF, "minItems": 1}]},
    "nested": {"type": "object", "properties": {"b": {"$ref": "#/properties/b"}}},
    "required through a definition": {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
    },
    "items": {"type": "array", "items": _SELF, "minItems": 2},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, _SELF], "minItems": 2},
    "minProperties": {"type": "object", "additionalProperties": _SELF, "minProperties": 1},
    "required in another part": {"allOf": [{"type": "object", "properties": {"a": _SELF}}, {"required": ["a"]}]},
    "a part that may be left out": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}},
        "required": ["a"],
        "$defs": {"b": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1}},
    },
}
SATISFIABLE: dict[str, Schema] = {
    "a tree": {"type": "object", "properties": {"a": _SELF}},
    "a list of lists": {"type": "array", "items": _SELF},
    "an end among choices": {
        "type": "object",
        "properties": {"next": {"anyOf": [_SELF, {"type": "null"}]}},
        "required": ["next"],
    },
    "another type": {"type": ["object", "null"], "properties": {"a": _SELF}, "required": ["a"]},
    "no type at all": {"properties": {"a": _SELF}, "required": ["a"]},
    "a part that is forbidden": {"type": "object", "properties": {"a": False, "b": {"type": "string"}}},
    "other properties": {
        "type": "object",
        "properties": {"b": {"type": "string"}},
        "required": ["b"],
        "additionalProperties": _SELF,
        "minProperties": 1,
    },
}

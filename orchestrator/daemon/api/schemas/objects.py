"""Objects: the arguments of a tool are one, names of properties, and how many there may be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.daemon.api.schemas.definitions import Definitions
from orchestrator.daemon.api.schemas.patterns import looks_around
from orchestrator.daemon.api.schemas.walk import Node, Place, SchemaRefused, applies

Note = Callable[[Place, str, str], None]
_IDLE_IN_NAMES = frozenset((
    *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples"),
    *("readOnly", "title", "type", "writeOnly"),
))  # fmt: skip
_BESIDE = ("$defs", "definitions", "$schema", "$id", "id")
# Characters of a name, up to which lengths of names can be a pattern (ADR 0100). Not tuned.
_MOST_NAME = 256
_NAME_BYTES = 32  # of a name: its quotes, and a reference to what it has
_MOST_HOPS = 8  # references in a row to what names are. Not tuned.
_NAMES = "say with 'enum' or 'pattern' alone what names there may be, or list the properties in 'properties'"


def require_object(root: Node, places: Sequence[Place], definitions: Definitions) -> None:
    """Leave of what a schema allows the objects. `places`: the schemas in it, of which some may mean all that it allows
    (`$ref: "#"`), and still do. Raises SchemaRefused where its 'type' has no objects."""
    named = root.get("type")
    if named == "object" or (named is not None and not isinstance(named, str | list)):
        return
    if isinstance(named, str) or (named is not None and "object" not in named):
        shown = json.dumps(named)[:60]
        raise SchemaRefused(f"'#/type' is {shown}, and arguments are an object: write 'object', with 'properties'")
    again = [place.node for place in places if place.node.get("$ref") == "#"]
    if again:
        # What the root has is written twice, which it cannot be again: a document has one root.
        reference = definitions.define({key: root[key] for key in root if key not in _BESIDE})
        for node in again:
            node["$ref"] = reference
    root["type"] = "object"


def bound_names(place: Place, definitions: Definitions, note: Note) -> None:
    """Write 'propertyNames' as a grammar has it: as properties, or as a pattern of them. Raises SchemaRefused."""
    node = place.node
    if "propertyNames" not in node:
        return
    names = node["propertyNames"]
    for _ in range(_MOST_HOPS):
        target = definitions.find(names.get("$ref")) if isinstance(names, dict) and len(names) == 1 else None
        if target is None:
            break
        names = target
    if names is not node["propertyNames"] and not definitions.may_copy(_measure(names)):
        raise place.refuse("propertyNames", "names are referred to too often for lists of this length; list less")
    bounds = {key: names[key] for key in names if key not in _IDLE_IN_NAMES} if isinstance(names, dict) else {}
    why = "says nothing here"
    if isinstance(bounds.get("format"), str):
        why = "has a 'format', which is an annotation: names are not held to it"
        del bounds["format"]
    if not applies(node, "object") or names is True or (not bounds and _are_texts(names)):
        del node["propertyNames"]
        note(place, "propertyNames", why)
        return
    if not _are_texts(names) or not bounds:
        raise place.refuse("propertyNames", "no name is allowed; leave the object out")
    if "additionalProperties" in node and definitions.leads_through("additionalProperties"):
        raise place.refuse("propertyNames", "a '$ref' leads into 'additionalProperties'; refer to '$defs' instead")
    if set(bounds) <= {"enum", "const"}:
        _list_names(place, bounds, definitions)
    else:
        _match_names(place, bounds)


def _measure(names: Node) -> int:
    """Return about how many bytes a grammar writes for names, and what it takes to read them."""
    listed = names.get("enum")
    texts = [*(listed if isinstance(listed, list) else ()), names.get("const"), names.get("pattern")]
    return len(names) + sum(_NAME_BYTES + len(text) if isinstance(text, str) else 1 for text in texts)


def _list_names(place: Place, bounds: Node, definitions: Definitions) -> None:
    node = place.node
    listed = [bounds["const"]] if "const" in bounds else bounds["enum"]
    if "patternProperties" in node or not isinstance(listed, list):
        raise place.refuse("propertyNames", _NAMES)
    if "const" in bounds and "enum" in bounds and isinstance(bounds["enum"], list):
        listed = [name for name in listed if name in bounds["enum"]]
    names = list(dict.fromkeys(name for name in listed if isinstance(name, str)))
    rest = node.get("additionalProperties", True)
    known = node.get("properties")
    known = known if isinstance(known, dict) else {}
    if isinstance(rest, dict) and rest and sum(name not in known for name in names) > 1:
        rest = {"$ref": definitions.define(rest)}
    del node["propertyNames"]
    node["properties"] = {name: known.get(name, rest) for name in names}
    node["additionalProperties"] = False


def _match_names(place: Place, bounds: Node) -> None:
    node = place.node
    least, most, pattern = bounds.get("minLength", 0), bounds.get("maxLength"), bounds.get("pattern")
    lengths = isinstance(least, int) and (most is None or isinstance(most, int)) and max(least, most or 0) <= _MOST_NAME
    if (
        not set(bounds) <= {"minLength", "maxLength", "pattern"}
        or not lengths
        or (pattern is not None and len(bounds) > 1)
    ):
        raise place.refuse("propertyNames", _NAMES)
    if pattern is None:
        pattern = rf"^[\s\S]{{{least},{'' if most is None else most}}}$"
    if "properties" in node or "patternProperties" in node or not isinstance(pattern, str) or looks_around(pattern):
        raise place.refuse("propertyNames", _NAMES)
    del node["propertyNames"]
    node["patternProperties"] = {pattern: node.get("additionalProperties", True)}
    node["additionalProperties"] = False


def _are_texts(names: Any) -> bool:
    return isinstance(names, dict) and applies(names, "string")


def bound_count(place: Place, note: Note) -> None:
    """Take 'minProperties' and 'maxProperties' where a grammar can keep to them: it counts properties, and cannot see
    that a name comes twice. Raises SchemaRefused."""
    node = place.node
    required, named = set(_texts(node.get("required"))), node.get("properties")
    named = named if isinstance(named, dict) else {}
    least, most = node.get("minProperties"), node.get("maxProperties")
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if isinstance(least, int) and (least <= len(required) or not applies(node, "object")):
        del node["minProperties"]
        note(place, "minProperties", "says nothing here")
    elif isinstance(least, int) and least > len(required) + 1 and not closed:
        raise place.refuse(
            "minProperties", "a property could be written twice; name the properties in 'properties' and 'required'"
        )
    if isinstance(most, int) and ((closed and most >= len(named)) or not applies(node, "object")):
        del node["maxProperties"]
        note(place, "maxProperties", "says nothing here")
    for key in ("minProperties", "maxProperties"):
        if key in node and not set(named) <= required:
            raise place.refuse(key, "it goes with 'properties' that are all 'required'; make them so, or leave it out")


def _texts(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []

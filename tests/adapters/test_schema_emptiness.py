"""Which schemas no finite JSON satisfies, compared with a search for JSON of bounded depth."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.schema_emptiness import find_empty_part
from tests.support.untrusted import SATISFIABLE, UNSATISFIABLE

NAMES = ("a", "b")
DEFINITIONS = 3


@pytest.mark.parametrize("schema", UNSATISFIABLE.values(), ids=UNSATISFIABLE)
def test_a_part_that_needs_itself_is_found(schema):
    assert find_empty_part(schema) is not None


@pytest.mark.parametrize(
    "schema",
    [
        *SATISFIABLE.values(),
        True,
        False,  # empty, but not for going round in a circle
        {},
        {"enum": []},
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
        {"$ref": "#anchor"},
        {"$ref": "https://example.com/schema"},
        {"$ref": 7, "allOf": "no list", "properties": [], "required": {}, "minItems": "x", "type": 3, "items": 4},
    ],
)
def test_what_does_not_need_itself_is_left_alone(schema):
    assert find_empty_part(schema) is None


def test_a_part_is_named_by_its_place():
    schema = {"type": "object", "properties": {"b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/b"}}}}
    schema["$defs"] = {"b": {"allOf": [{"$ref": "#/$defs/b"}]}}
    assert find_empty_part(schema) in {"#/properties/b", "#/properties/b/items"}


def test_schemas_too_large_to_tell_end_soon():
    doubled: dict[str, Any] = {"$ref": "#/0"}
    for level in range(60):
        doubled[str(level)] = {key: [{"$ref": f"#/{level + 1}"}] * 2 for key in ("anyOf", "oneOf", "allOf")}
    assert find_empty_part(doubled) is None
    wide = {"type": "object", "properties": {f"p{number}": {"items": {"type": "null"}} for number in range(5000)}}
    assert find_empty_part(wide) is None


def definitions() -> st.SearchStrategy[dict[str, Any]]:
    reference = st.integers(0, DEFINITIONS - 1).map(lambda number: {"$ref": f"#/$defs/{number}"})
    leaf = st.one_of(reference, reference, st.just({"type": "null"}))

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.builds(
                lambda values, required: {"type": "object", "properties": values, "required": required},
                st.dictionaries(st.sampled_from(NAMES), inner, min_size=1),
                st.lists(st.sampled_from(NAMES), unique=True),
            ),
            st.builds(
                lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 2)
            ),
            st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
            st.builds(lambda schema: {"allOf": [schema]}, inner),
        )

    each = st.recursive(leaf, extend, max_leaves=4)
    return st.lists(each, min_size=DEFINITIONS, max_size=DEFINITIONS).map(
        lambda some: {"$ref": "#/$defs/0", "$defs": {str(number): schema for number, schema in enumerate(some)}}
    )


def has_text(schema: Any, root: Any, depth: int) -> bool:
    """Whether JSON satisfies a schema that looks into at most so many others on its way."""
    if depth == 0:
        return False
    if "$ref" in schema:
        return has_text(root["$defs"][schema["$ref"].rpartition("/")[2]], root, depth - 1)
    if "anyOf" in schema:
        return any(has_text(choice, root, depth - 1) for choice in schema["anyOf"])
    if "allOf" in schema:
        return has_text(schema["allOf"][0], root, depth - 1)
    if schema["type"] == "object":
        values = schema["properties"]
        return all(name not in values or has_text(values[name], root, depth - 1) for name in schema["required"])
    if schema["type"] == "array":
        return schema["minItems"] == 0 or has_text(schema["items"], root, depth - 1)
    return True


def count_parts(schema: Any) -> int:
    if isinstance(schema, dict):
        return 1 + sum(map(count_parts, schema.values()))
    return sum(map(count_parts, schema)) if isinstance(schema, list) else 0


@settings(max_examples=300, deadline=None)
@given(definitions())
def test_it_finds_what_a_search_does_not_satisfy(schema):
    # Nothing here contradicts itself in another way, so the least depth of a text is no more than the number of parts.
    depth = count_parts(schema) + 1
    problem = find_empty_part(schema)
    if problem is None:
        assert has_text(schema, schema, min(depth, 40))
    if not has_text(schema, schema, min(depth, 40)):
        assert problem == "#"

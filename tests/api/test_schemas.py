"""Schemas before they are grammars: what libraries write is taken or refused by its key, and what is meant stays."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import time
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from adapters.grammar import GrammarCompiler
from orchestrator.daemon.api.schemas.patterns import _PLAIN, looks_around
from orchestrator.daemon.api.schemas.prepare import FORMATS, prepare_schema
from orchestrator.daemon.api.schemas.walk import SchemaRefused
from orchestrator.protocol.commands import Grammar
from tests.api.support import TOKENIZER

WRITTEN = pathlib.Path(__file__).parent / "schemas"
COMPILER = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocabulary_size)


def compile_schema(schema: Any) -> None:
    """Raises GrammarFailed where it is no grammar."""
    COMPILER.prepare(Grammar("json_schema", json.dumps(schema)))


def list_written(name: str) -> list[tuple[str, dict[str, Any]]]:
    return list(json.loads((WRITTEN / f"{name}.json").read_text()).items())


ZOD = [(f"{name} {key}", schema) for name in ("zod4", "zod3") for key, schema in list_written(name)]
REFUSED = {
    "zod4 emoji": "'#/pattern'",
    "zod3 set/jsonSchema7": "'#/uniqueItems'",
    "zod3 set/named/jsonSchema7": "'#/definitions/It/uniqueItems'",
    "zod3 inter/jsonSchema2019-09": "'#/unevaluatedProperties'",
}
NO_VALUE = {"zod4 never", "zod3 never/jsonSchema7"}  # z.never(), and a property of it that is required


@pytest.mark.parametrize(("name", "schema"), ZOD, ids=[name for name, _ in ZOD])
def test_what_zod_writes_is_taken_or_refused_by_its_key(name, schema):
    if name in REFUSED:
        with pytest.raises(SchemaRefused, match=re.escape(REFUSED[name])):
            prepare_schema(schema)
    elif name not in NO_VALUE:
        compile_schema(prepare_schema(schema).schema)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    good: bool


class Tree(pydantic.BaseModel):
    name: str
    children: list[Tree] = []


LONG = Annotated[str, pydantic.StringConstraints(min_length=1)]
KEYED = Annotated[str, pydantic.StringConstraints(pattern="^k_")]
SHORT = Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z]{2,4}$", min_length=2, max_length=4)]


FIELDS: dict[str, Any] = {
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "url": pydantic.HttpUrl,
    "dsn": pydantic.PostgresDsn,
    "uuid": uuid.UUID,
    "uuid4": pydantic.UUID4,
    "union": Cat | Dog,
    "discriminated": Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
    "optional": int | None,
    "pair": tuple[int, str],
    "many": tuple[int, ...],
    "record": dict[str, int],
    "record_of_enum": dict[Color, int],
    "record_of_literal": dict[Literal["a", "b"], int],
    "record_of_int": dict[int, str],
    "record_of_uuid": dict[uuid.UUID, str],
    "record_of_date": dict[datetime.date, str],
    "record_of_text": dict[LONG, int],
    "record_of_pattern": dict[KEYED, int],
    "record_of_one": Annotated[dict[str, int], pydantic.Field(min_length=1)],
    "literal": Literal["a", 1, None],
    "enum": Color,
    "text": SHORT,
    "decimal": decimal.Decimal,
    "bounded_decimal": Annotated[decimal.Decimal, pydantic.Field(ge=0, max_digits=6, decimal_places=2)],
    "bytes": bytes,
    "base64": pydantic.Base64Bytes,
    "secret": pydantic.SecretStr,
    "address": ipaddress.IPv4Address,
    "network": ipaddress.IPv4Network,
    "path": pathlib.Path,
    "in_text": pydantic.Json,
    "tree": Tree,
    "positive": pydantic.PositiveInt,
    "past": pydantic.PastDate,
    "any": Any,
    "default": (int, 3),
}


@pytest.mark.parametrize("name", FIELDS)
def test_what_pydantic_writes_is_taken(name):
    field = FIELDS[name]
    fields: Any = {name: field if isinstance(field, tuple) else (field, ...)}
    model = pydantic.create_model("Model", **fields)
    compile_schema(prepare_schema(model.model_json_schema(), objects=True).schema)


DROPPED: list[tuple[Any, str]] = [
    ({"format": "password"}, "'#/format' is an annotation: the text is not held to the format 'password'"),
    ({"type": "integer", "format": "int32"}, "'#/format' is an annotation: the text is not held to the format 'int32'"),
    ({"type": "object", "propertyNames": {"type": "string"}}, "'#/propertyNames' says nothing here"),
    ({"items": {"uniqueItems": False}}, "'#/items/uniqueItems' says nothing here"),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, "'#/uniqueItems' says nothing here"),
    ({"anyOf": [{"if": {"type": "string"}}]}, "'#/anyOf/0/if' says nothing here"),
    ({"minContains": 2}, "'#/minContains' says nothing here"),
    ({"contentEncoding": "base64"}, "'#/contentEncoding' is an annotation: the text is not held to it"),
    ({"minlength": 3}, "'#/minlength' is not read: 'minlength' is no keyword of JSON Schema"),
    ({"nullable": True}, "'#/nullable' is no keyword of JSON Schema: add 'null' to 'type' to allow it"),
    ({"x-guidance": {"lenient": True}}, "'#/x-guidance' is not read: how JSON is written is the server's"),
    ({"minimum": -3.4e38}, f"'#/minimum' is drawn in to -{10**18}: numbers are not written further out"),
    (
        {"$ref": "#/a~1b/0", "a/b": [{"format": "jwt"}]},
        "'#/a~1b/0/format' is an annotation: the text is not held to the format 'jwt'",
    ),
]


@pytest.mark.parametrize(("schema", "warning"), DROPPED)
def test_what_says_nothing_is_dropped_and_told(schema, warning):
    before = json.dumps(schema)
    prepared = prepare_schema(schema)
    assert prepared.warnings == (warning,)
    compile_schema(prepared.schema)
    assert json.dumps(schema) == before  # the client's own is told to the model as it came


def test_one_reason_is_one_warning_however_often():
    properties = {name: {"type": "string", "format": "password"} for name in "abc"}
    (warning,) = prepare_schema({"properties": properties}).warnings
    assert warning.startswith("'#/properties/a/format' (and 2 more) is an annotation")
    many = {str(number): {"type": "string", "format": f"own-{number}"} for number in range(500)}
    assert len(prepare_schema({"properties": many}).warnings) == 32


KEPT = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "not": {"not": {"type": "string"}},
    "contains": {"contains": {"type": "string"}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "propertyNames": {"propertyNames": {"pattern": "^a", "minLength": 3}},
    "unevaluatedProperties": {"allOf": [{"type": "object"}], "unevaluatedProperties": False},
    "minProperties": {"additionalProperties": {"type": "integer"}, "minProperties": 2},
    "maxProperties": {"properties": {"a": {}}, "maxProperties": 2},
    "pattern": {"pattern": r"(a)\1"},
    "patternProperties": {"patternProperties": {"^(?!a)": {}}},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "minimum": {"minimum": 1e300},
}


@pytest.mark.parametrize("key", KEPT)
@pytest.mark.parametrize("place", ["#", "#/items", "#/properties/a~1b", "#/anyOf/1", "#/$defs/x"])
def test_what_cannot_be_kept_to_is_refused_by_its_pointer(key, place):
    schema: Any = {
        "#": KEPT[key],
        "#/items": {"items": KEPT[key]},
        "#/properties/a~1b": {"properties": {"a/b": KEPT[key]}},
        "#/anyOf/1": {"anyOf": [True, KEPT[key]]},
        "#/$defs/x": {"$ref": "#/$defs/x", "$defs": {"x": KEPT[key]}},
    }[place]
    with pytest.raises(SchemaRefused) as refused:
        prepare_schema(schema)
    assert f"'{place}/{key}' cannot be kept to: " in str(refused.value)


def test_definitions_that_nothing_refers_to_are_not_looked_at():
    assert prepare_schema({"type": "null", "$defs": KEPT, "definitions": KEPT}).warnings == ()


def test_a_value_is_no_schema():
    schema = {"const": {"format": "own"}, "$ref": "#/const"}
    with pytest.raises(SchemaRefused, match="is a value"):
        prepare_schema(schema)
    kept: Any = {"enum": [{"format": "own", "uniqueItems": True}], "default": {"not": {}}}
    assert prepare_schema(kept).schema == kept


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_formats_that_are_kept_are_the_library_s(name):
    compile_schema({"type": "string", "format": name})


@pytest.mark.parametrize("pattern", _PLAIN)
@given(st.data())
@settings(max_examples=60)
def test_a_pattern_without_look_around_means_the_same(pattern, data):
    plain = _PLAIN[pattern]
    assert looks_around(pattern)
    assert not looks_around(plain.pattern)
    compile_schema({"type": "string", "pattern": plain.pattern})
    said = data.draw(
        st.one_of(st.text("PTWYMDHS019.,+-@ab_'", max_size=12), st.from_regex(plain.pattern, fullmatch=True))
    )
    assume("\n" not in said and said.isascii() and len(said) <= (plain.max_length or 1000))
    if plain.max_length is not None:
        assume(not said.endswith("."))
    assert bool(re.search(pattern, said)) == bool(re.search(plain.pattern, said))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["", "a", "b", "ab", 0.5]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["", "a", "b", "ab"]), inner, max_size=3)
    ),
    max_leaves=6,
)
LEAVES = st.sampled_from([
    *(True, {}, {"type": "string"}, {"type": "integer"}, {"type": ["number", "null"]}, {"format": "own"}),
    *({"const": "a"}, {"const": 1}, {"enum": ["a", "b"]}, {"enum": [1, None]}, {"$ref": "#/$defs/x"}, {"not": {}}),
])  # fmt: skip
NAMES = st.sampled_from([
    *({"type": "string"}, {}, True, {"enum": ["a", "b"]}, {"const": "a"}, {"pattern": "^a"}, {"minLength": 1}),
    *({"maxLength": 1}, {"$ref": "#/$defs/x"}, {"type": "string", "enum": ["ab", 3]}),
])  # fmt: skip


def keys(always: dict[str, st.SearchStrategy[Any]], /, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(always, optional=optional)


def combine(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    needed = st.lists(st.sampled_from(["a", "b"]), unique=True, max_size=2)
    return st.one_of(
        keys(
            {"type": st.just("object")}, properties=named, required=needed, additionalProperties=inner | st.just(False)
        ),
        keys({"propertyNames": NAMES}, type=st.just("object"), properties=named, additionalProperties=inner),
        keys(
            {}, required=needed, unevaluatedProperties=st.booleans(), minProperties=st.integers(0, 2), properties=named
        ),
        keys({}, required=needed, dependentRequired=st.dictionaries(st.just("a"), needed), additionalProperties=inner),
        keys({"type": st.just("array")}, items=inner, uniqueItems=st.just(False), minContains=st.just(1)),
        keys({"prefixItems": some}, unevaluatedItems=inner, items=inner, maxItems=st.integers(0, 3)),
        keys({"oneOf": some}, required=needed, type=st.just("object"), anyOf=some),
        keys({"anyOf": some}, then=inner, **{"not": st.just(False), "if": st.just({})}),
        keys({"allOf": some}, **{"if": inner}),
    )


@given(st.recursive(LEAVES, combine, max_leaves=6), LEAVES, st.lists(VALUES, min_size=1, max_size=6))
@example({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "integer"}]}, {}, ["a", "b", 1])
@example({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, {}, [{"a": 1, "b": 1}])
@settings(max_examples=500)
def test_what_is_taken_means_what_the_client_meant(schema, named, values):
    whole: dict[str, Any] = {"allOf": [schema], "$defs": {"x": {"type": "string"} if named is True else named}}
    assume("$ref" not in whole["$defs"]["x"])
    try:
        prepared = prepare_schema(whole).schema
    except SchemaRefused:
        return
    before, after = (jsonschema.Draft202012Validator(one) for one in (whole, prepared))
    for value in values:
        assert before.is_valid(value) == after.is_valid(value), (whole, prepared, value)


LONG_REFERENCE = "#" + "/a" * 50_000
READ_AGAIN: list[dict[str, Any]] = [
    {"$ref": LONG_REFERENCE, "oneOf": [{"const": number} for number in range(500)]},
    {"n": {"$ref": LONG_REFERENCE}, "anyOf": [{"type": "string", "propertyNames": {"$ref": "#/n"}}] * 300},
    {"allOf": [{"$ref": "#x" + "a" * 5000}]},
]


@pytest.mark.parametrize("schema", READ_AGAIN, ids=["options", "names", "an anchor"])
def test_a_long_reference_is_refused_at_once(schema):
    began_s = time.process_time()
    with pytest.raises(SchemaRefused, match=r"/\$ref' cannot be kept to: it has over 4096 characters"):
        prepare_schema(schema)
    assert time.process_time() - began_s < 0.5


def test_a_reference_is_read_once_however_many_options_it_stands_beside():
    def measure_s(more: dict[str, Any]) -> float:
        options = [{"properties": {"k": {"const": number}}, "required": ["k"]} for number in range(2000)]
        began_s = time.process_time()
        assert len(prepare_schema({"type": "object", "oneOf": options} | more).schema["anyOf"]) == 2000
        return time.process_time() - began_s

    alone_s, beside_s = (min(measure_s(more) for _ in range(3)) for more in ({}, {"$ref": "#" + "/a" * 2000}))
    assert beside_s < 2 * alone_s + 0.1


@pytest.mark.parametrize(
    "named",
    [
        {"enum": [f"a_name_{number}" for number in range(900)]},
        {"enum": [None] * 5000},
        {"pattern": f"^{'a' * 20_000}$"},
    ],
    ids=["enum", "no names", "pattern"],
)
def test_names_that_many_objects_share_are_not_written_for_each(named):
    places = [{"type": "object", "propertyNames": {"$ref": "#/$defs/x"}, "title": str(at)} for at in range(300)]
    schema = {"anyOf": places, "$defs": {"x": named}}
    with pytest.raises(SchemaRefused, match="referred to too often"):
        prepare_schema(schema)
    few = json.dumps(prepare_schema(schema | {"anyOf": places[:2]}).schema)
    assert len(few) < 8 * len(json.dumps(schema))


def test_what_many_names_share_is_one_definition_beside_the_client_s_own():
    shared = {"type": "object", "properties": {"x": {"$ref": "#/$defs/1"}}}
    names = {"propertyNames": {"enum": ["a", "b", "c"]}, "properties": {"c": {"type": "null"}}}
    for own in ({"0": {"type": "string"}, "1": {"type": "integer"}}, [{"type": "string"}, {"type": "integer"}]):
        prepared = prepare_schema({"additionalProperties": shared, "$defs": own} | names).schema
        assert json.dumps(prepared).count(json.dumps(shared)) == 1
        assert prepared["properties"] == {"a": {"$ref": "#/$defs/2"}, "b": {"$ref": "#/$defs/2"}, "c": {"type": "null"}}
        validator = jsonschema.Draft202012Validator(prepared)
        for value, fine in (({"a": {"x": 1}, "b": {}}, True), ({"b": {"x": "y"}}, False), ({"c": 1}, False)):
            assert validator.is_valid(value) is fine
        compile_schema(prepared)


@pytest.mark.parametrize("names", [{"enum": ["a", "b"]}, {"const": "a"}, {"pattern": "^a"}])
def test_what_a_reference_means_does_not_move(names):
    named = {"propertyNames": names, "additionalProperties": {"type": "string"}}
    schema = {"anyOf": [named, {"items": {"$ref": "#/anyOf/0/additionalProperties"}}]}
    with pytest.raises(SchemaRefused, match="leads into 'additionalProperties'"):
        prepare_schema(schema)


OBJECTS: list[Any] = [{}, {"type": ["null", "object"]}, {"$ref": "#/$defs/x", "$defs": {"x": {}}}, {"anyOf": [True]}]


@pytest.mark.parametrize("schema", OBJECTS)
def test_objects_alone_are_arguments(schema):
    assert prepare_schema(schema, objects=True).schema["type"] == "object"


@pytest.mark.parametrize("kind", ["string", ["null", "integer"], []])
def test_a_type_without_objects_is_refused(kind):
    with pytest.raises(SchemaRefused, match=r"'#/type' is .* arguments are an object"):
        prepare_schema({"type": kind}, objects=True)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (
            {"anyOf": [{"type": "null"}, {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}]},
            {"next": None},
            {},
        ),
        ({"type": ["integer", "object"], "additionalProperties": {"$ref": "#"}}, {"a": {"b": 1}}, {"a": "b"}),
        ({"items": {"$ref": "#"}, "properties": {"a": {"$ref": "#"}}, "$defs": {"0": {}}}, {"a": [[1]]}, [1]),
    ],
)
def test_what_refers_to_the_whole_schema_means_what_it_meant(schema, taken, refused):
    prepared = prepare_schema(schema, objects=True).schema
    compile_schema(prepared)
    validator = jsonschema.Draft202012Validator(prepared)
    assert validator.is_valid(taken)
    assert not validator.is_valid(refused)
    assert not validator.is_valid(None)

"""What clients are told of their schemas at every door: what was dropped, and what cannot be kept to, by its key."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.support import ScriptedControl, app_over, client_of, serving
from tests.api.test_tools import WEATHER, answering, check_text

SAID: Any = {"role": "user", "content": "x"}
ODD = {"type": "object", "properties": {"word": {"type": "string", "format": "password"}}}
SET = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
WARNING = "'#/properties/word/format' is an annotation: the text is not held to the format 'password'"


def ask_for(door: str, where: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A body whose answer, or whose tool's arguments, have this schema."""
    base: dict[str, Any] = {"model": "toy"}
    if door == "messages":
        base |= {"max_tokens": 9, "messages": [SAID]}
        tool: Any = {"name": "look", "input_schema": schema}
        tooled = {"tools": [tool], "tool_choice": {"type": "any"}}
        formatted: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    elif door == "responses":
        base["input"] = "x"
        tooled = {"tools": [{"type": "function", "name": "look", "parameters": schema}], "tool_choice": "required"}
        formatted = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    else:
        base |= {"prompt": "x"} if door == "completions" else {"messages": [SAID]}
        function = {"name": "look", "parameters": schema}
        tooled = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        formatted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    return base | (tooled if where == "tools" else formatted)


ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
FORMAT_OF = {"responses": "text.format", "messages": "output_config.format"}
PLACES = [
    (door, where) for door in ROUTES for where in ("tools", "format") if (door, where) != ("completions", "tools")
]


async def post(control: ScriptedControl, door: str, body: dict[str, Any]) -> httpx.Response:
    async with serving(app_over(control)) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        return await client.post(ROUTES[door], json=body)


@pytest.mark.parametrize(("door", "where"), PLACES)
async def test_what_was_dropped_is_told_with_the_answer(door, where):
    control = answering('{"word": "x"}' if where == "format" else WEATHER.replace("get_weather", "look"))
    body = ask_for(door, where, ODD)
    expected = [f"{'tool ' if where == 'tools' else ''}{name_of(door, where)}: {WARNING}"]
    assert (await post(control, door, body)).json()["warnings"] == expected
    lines = (await post(control, door, body | {"stream": True})).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if door == "messages":
        assert events[0]["message"]["warnings"] == expected
    elif door == "responses":
        assert [event["response"]["warnings"] for event in events if "response" in event] == [expected] * 3
    else:
        assert [event["choices"][0]["finish_reason"] for event in events if "warnings" in event] == [
            "tool_calls" if where == "tools" else "stop"
        ]
        assert events[-1]["warnings"] == expected
    clean = await post(control, door, ask_for(door, where, {"type": "object"}))
    assert "warnings" not in clean.json()


def name_of(door: str, where: str) -> str:
    return "'look'" if where == "tools" else f"'{FORMAT_OF.get(door, 'response_format')}'"


@pytest.mark.parametrize(("door", "where"), PLACES)
async def test_what_cannot_be_kept_to_is_refused_by_tool_and_key(door, where):
    control = answering("x")
    refused = await post(control, door, ask_for(door, where, SET))
    assert refused.status_code == 400
    error = refused.json()["error"]
    named = f"the schema of {'the tool ' if where == 'tools' else ''}{name_of(door, where)} cannot be used: "
    assert error["message"].startswith(f"{named}'#/properties/tags/uniqueItems' cannot be kept to: ")
    if door != "messages":
        assert error["code"] == "unsupported_schema"
        assert error["param"] == ("tools" if where == "tools" else FORMAT_OF.get(door, "response_format"))
    assert control.submits == []


@pytest.mark.parametrize("name", ["messages", "stop", "max_tokens", "response_format"])
@pytest.mark.parametrize("door", ["chat", "responses", "messages"])
async def test_a_tool_keeps_its_name_in_what_is_said_of_its_schema(door, name):
    said = json.dumps(ask_for(door, "tools", {"type": "object", "not": {"title": "-"}})).replace("look", name)
    refused = (await post(answering("x"), door, json.loads(said))).json()["error"]
    assert refused["message"].startswith(f"the schema of the tool '{name}' cannot be used: '#/not' ")
    odd = json.dumps(ask_for(door, "tools", {"type": "object", name: 1})).replace("look", name)
    called = answering(WEATHER.replace("get_weather", name))
    assert (await post(called, door, json.loads(odd))).json()["warnings"] == [
        f"tool '{name}': '#/{name}' is not read: '{name}' is no keyword of JSON Schema"
    ]


@pytest.mark.parametrize("name", ["output_format", "output_config"])
async def test_messages_says_the_name_by_which_a_format_came(name):
    def ask(schema: dict[str, Any]) -> dict[str, Any]:
        form = {"type": "json_schema", "schema": schema}
        asked = {"output_format": form} if name == "output_format" else {"output_config": {"format": form}}
        return {"model": "toy", "max_tokens": 9, "messages": [SAID]} | asked

    called = "output_format" if name == "output_format" else "output_config.format"
    refused = (await post(answering("x"), "messages", ask(SET))).json()["error"]
    assert refused["message"].startswith(f"the schema of '{called}' cannot be used: ")
    assert (await post(answering('{"word": "x"}'), "messages", ask(ODD))).json()["warnings"] == [
        f"'{called}': {WARNING}"
    ]


NO_OBJECT: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": ["null", "array"]},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}},
    {"allOf": [{"type": "array"}]},
    {"allOf": [False]},
    {"const": 1},
    {"enum": ["a", None]},
]


@pytest.mark.parametrize("schema", NO_OBJECT, ids=str)
@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "look"}}])
async def test_a_tool_whose_arguments_can_be_no_object_is_refused(schema, choice):
    control = answering("x")
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}]
    async with client_of(app_over(control)) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="toy", messages=[SAID], tools=tools, tool_choice=choice)
    assert refused.value.param == "tools"
    assert "'look'" in refused.value.message
    assert "%json" not in refused.value.message  # no line of the grammar
    assert refused.value.code == "unsupported_schema"
    assert control.submits == []


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "integer"}}}]},
        {"anyOf": [True, {"type": "null"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"title": "anything"}}},
        {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {}}},
        {"enum": [{"a": 1}, "b", None]},
    ],
    ids=str,
)
@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_arguments_are_an_object_whatever_else_a_schema_allows(schema, choice):
    control = answering("x")
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}]
    async with client_of(app_over(control)) as client:
        await client.chat.completions.create(model="toy", messages=[SAID], tools=tools, tool_choice=choice)
    (submit,) = control.submits
    assert submit.grammar is not None
    begun = '<tool_call>\n{"name": "look", "arguments": '
    assert check_text(submit.grammar, f'{begun}{{"a": 1}}}}\n</tool_call>')[0]
    for other in ("null", '"b"', "1", "[", "true"):
        assert not check_text(submit.grammar, begun + other)[0]


@pytest.mark.parametrize("given", ["", " ", "null", "{}"])
async def test_a_call_without_arguments_reaches_the_model_with_an_empty_object(given):
    control = answering("x")
    call: Any = {"id": "a", "type": "function", "function": {"name": "look", "arguments": given}}
    messages: Any = [
        SAID,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "y"},
    ]
    async with client_of(app_over(control)) as client:
        await client.chat.completions.create(model="toy", messages=messages)
    prompt = bytes(token for token in control.submits[0].prompt if token < 256).decode()
    assert '{"name": "look", "arguments": {}}' in prompt

"""`/v1/messages` as the real `anthropic` client uses it: content blocks, events in their order, tools, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pydantic
import pytest
from fastapi import FastAPI

from adapters.chat_template import ChatTemplate
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.keys import Keys
from tests.api.support import TOKENIZER, ScriptedControl, app_over, client_of, serving
from tests.api.test_responses_route import CALLS, MESSAGES, THOUGHT
from tests.api.test_resume import book_of
from tests.api.test_tools import CITY, TWICE, WEATHER, answering
from tests.support.daemon import Daemon, configuration, running

ASK: dict[str, Any] = {"model": "toy", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
TOOLS: Any = [
    {"name": "get_weather", "description": "Weather of a city", "input_schema": CITY},
    {"name": "add", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    with running(configuration(tmp_path_factory.mktemp("messages"))) as started:
        yield started
        assert started.stop() == 0


def library() -> Any:
    """The library, imported late: it takes two seconds, which whoever only collects tests needs not."""
    import anthropic

    return anthropic


def anthropic_at(url: str) -> Any:
    """The real client of a daemon. `Any`: an answer's blocks are of many types, and each test knows which it has."""
    return library().Anthropic(base_url=url, api_key="unused", max_retries=0)


@asynccontextmanager
async def anthropic_of(app: FastAPI, key: str = "unused") -> AsyncIterator[Any]:
    """Serve an app and give the real client for it, which never retries."""
    async with serving(app) as url, library().AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


async def events_of(control: ScriptedControl, **body: Any) -> list[Any]:
    async with anthropic_of(app_over(control)) as client:
        return [event async for event in await client.messages.create(**ASK | body, stream=True)]


async def test_a_text_comes_in_the_documented_order():
    async with serving(app_over(answering("Hello", each=2))) as url, httpx.AsyncClient(base_url=url) as client:
        lines = (await client.post("/v1/messages", json=ASK | {"stream": True})).text.split("\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [event["type"] for event in told]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("each", [1, 3, 1000])
async def test_thoughts_text_and_calls_are_blocks_however_they_come(each):
    text = f"<think>I will look.</think>{TWICE}"
    async with anthropic_of(app_over(answering(text, each))) as client:
        whole = await client.messages.create(**ASK, tools=TOOLS)
        async with client.messages.stream(**ASK, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        thought, said, weather, add = message.content
        assert (thought.thinking, said.text) == ("I will look.", "Let me see.")
        assert (weather.name, weather.input) == ("get_weather", {"city": "Oslo"})
        assert (add.name, add.input) == ("add", {"a": 1, "b": True})
        assert message.stop_reason == "tool_use"


async def test_what_was_remembered_is_counted_apart_from_the_input():
    control = answering("Hello")
    control.reused = 7
    async with anthropic_of(app_over(control)) as client:
        usage = (await client.messages.create(**ASK)).usage
        async with client.messages.stream(**ASK) as stream:
            assert (await stream.get_final_message()).usage.input_tokens == usage.input_tokens
    assert usage.cache_read_input_tokens == 7
    assert usage.input_tokens + 7 == len(control.submits[0].prompt)


@pytest.mark.parametrize(
    ("text", "finish", "fields", "reason", "stop"),
    [
        ("Hel", "length", {"max_tokens": 3}, "max_tokens", None),
        ("Hel", "length", {"max_tokens": 5_000}, "model_context_window_exceeded", None),
        ("one two three", "stop", {"stop_sequences": ["never", " three"]}, "stop_sequence", " three"),
        ("one", "stop", {"stop_sequences": ["never"]}, "end_turn", None),
        (WEATHER, "stop", {"tools": TOOLS}, "tool_use", None),
        (WEATHER[:60], "length", {"tools": TOOLS, "max_tokens": 60}, "max_tokens", None),
    ],
)
async def test_why_an_answer_ended_is_told(text, finish, fields, reason, stop):
    control = answering(text, finish=finish)
    async with anthropic_of(app_over(control)) as client:
        message = await client.messages.create(**ASK | fields)
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)
    events = await events_of(answering(text, finish=finish), **fields)
    (delta,) = [event.delta for event in events if event.type == "message_delta"]
    assert (delta.stop_reason, delta.stop_sequence) == (reason, stop)


async def test_arguments_that_were_cut_are_told_as_they_are():
    async with anthropic_of(app_over(answering(WEATHER[:60], finish="length"))) as client:
        message = await client.messages.create(**ASK, tools=TOOLS)
    assert message.content[0].input == {"INVALID_JSON": '{"city": "O'}


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', '{"\\ud800": 1}', '{"a": ' * 5_000 + "1" + "}" * 5_000],
    ids=["value", "key", "deep"],
)
async def test_arguments_that_no_json_can_have_are_told_as_they_are(arguments):
    call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    async with anthropic_of(app_over(answering(call, each=1000))) as client:
        message = await client.messages.create(**ASK, tools=TOOLS)
    assert message.content[0].input == {"INVALID_JSON": arguments}
    turned = f'<tool_call>\n{{"arguments": {arguments}, "name": "add"}}\n</tool_call>'
    async with anthropic_of(app_over(answering(turned, each=1000))) as client:
        message = await client.messages.create(**ASK, tools=TOOLS)
    (block,) = message.content
    assert block.text == turned if len(arguments) > 1000 else block.input == {"INVALID_JSON": arguments}


async def test_an_error_behind_the_first_token_is_an_event():
    control = ScriptedControl(error=RuntimeError("broken"), error_at=1)
    with pytest.raises(library().APIStatusError) as failed:
        await events_of(control, max_tokens=9)
    assert failed.value.type == "api_error"
    assert "broken" not in str(failed.value)


CONVERSATION: Any = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "One moment.", "citations": None},
            *(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in CALLS
            ),
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain", "is_error": False},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "3"}]},
            {"type": "text", "text": "and ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "now?"},
        ],
    },
]


async def test_blocks_are_the_tokens_that_the_chat_route_has_for_the_same():
    control = answering("x")
    app = app_over(control)
    functions = [
        {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
        for tool in TOOLS
    ]
    tools: Any = [{"type": "function", "function": function} for function in functions]
    more: Any = {"system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}], "tools": TOOLS}
    async with anthropic_of(app) as client, client_of(app) as other:
        counted = await client.messages.count_tokens(model="toy", messages=CONVERSATION, **more)
        await client.messages.create(**ASK | {"messages": CONVERSATION} | more, metadata={"user_id": "ada"})
        await other.chat.completions.create(model="toy", messages=MESSAGES, tools=tools, max_tokens=50, user="ada")
    ours, theirs = control.submits
    assert ours.prompt == theirs.prompt
    assert counted.input_tokens == len(ours.prompt)
    assert (ours.max_tokens, ours.user) == (theirs.max_tokens, theirs.user)
    assert (ours.route, theirs.route) == ("/v1/messages", "/v1/chat/completions")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}])
def test_the_text_is_the_chat_route_s_to_the_letter(daemon, sampling):
    asked: Any = {"model": "toy", "max_tokens": 40, "messages": ASK["messages"], "extra_body": {"seed": 5, **sampling}}
    chat = daemon.client.chat.completions.create(**asked)
    with anthropic_at(daemon.url) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            last = stream.get_final_message()
    assert whole.content[0].text == last.content[0].text == chat.choices[0].message.content
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_keeps_to_its_schema(daemon, choice):
    tools = [TOOLS[0] | {"input_schema": CITY | {"additionalProperties": False}}]
    with anthropic_at(daemon.url) as client:
        message = client.messages.create(
            **ASK | {"max_tokens": 200}, tools=tools, tool_choice=choice | {"disable_parallel_tool_use": True}
        )
    (call,) = message.content
    assert call.input["city"] in ("Oslo", "Rome")


class Weather(pydantic.BaseModel):
    city: str


async def test_a_schema_is_parsed_by_the_client_and_bound_by_a_grammar():
    control = answering('{"city": "Oslo"}')
    async with anthropic_of(app_over(control)) as client:
        parsed = await client.messages.parse(**ASK, output_format=Weather)
    assert parsed.parsed_output == Weather(city="Oslo")
    assert control.submits[0].grammar is not None


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}]
)
async def test_thinking_may_be_asked_for_in_each_form(thinking):
    async with anthropic_of(app_over(answering(THOUGHT))) as client:
        message = await client.messages.create(**ASK, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]


OMITTED: Any = {"type": "adaptive", "display": "omitted"}


@pytest.mark.parametrize("each", [1, 3, 1000])
async def test_a_thought_that_is_to_be_omitted_is_a_block_with_a_signature_alone(each):
    text = f"<think>I will look, в 雨.</think>{TWICE}"
    async with anthropic_of(app_over(answering(text, each))) as client:
        whole = await client.messages.create(**ASK, tools=TOOLS, thinking=OMITTED)
        shown = await client.messages.create(**ASK, tools=TOOLS, thinking={"type": "adaptive"})
        async with client.messages.stream(**ASK, tools=TOOLS, thinking=OMITTED) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
    assert "в 雨" in shown.content[0].thinking
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (message.content[0].thinking, message.content[1].text) == ("", "Let me see.")
        assert message.content[0].signature == whole.content[0].signature != ""
        assert message.usage.output_tokens == shown.usage.output_tokens
    deltas = [event.delta.type for event in events if event.type == "content_block_delta" and event.index == 0]
    assert deltas == ["signature_delta"]


async def test_a_thought_that_was_omitted_reaches_the_template_when_it_comes_back():
    control = answering("<think>I will look, в 雨.</think>Yes")
    template = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.content }}|{% endfor %}"
    tokenizer = Tokenizer(TOKENIZER._vocabulary, ChatTemplate(template, bos_token="", eos_token=""))
    async with anthropic_of(app_over(control, tokenizer=tokenizer)) as client:
        for thinking in (OMITTED, {"type": "adaptive"}):
            answer = await client.messages.create(**ASK, thinking=thinking)
            messages = [*ASK["messages"], {"role": "assistant", "content": answer.content}, *ASK["messages"]]
            await client.messages.create(**ASK | {"messages": messages}, thinking=thinking)
    _, omitted, _, shown = control.submits
    assert omitted.prompt == shown.prompt
    assert "I will look, в 雨./Yes|" in tokenizer.decode(omitted.prompt, skip_special=False)


@pytest.mark.parametrize("signature", ["EqoBCkgIARABGAIiQL2U", "outrider.!", "outrider./w==", "", None])
async def test_what_is_no_signature_of_ours_says_nothing(signature):
    control = answering("x")
    block = {"type": "thinking", "thinking": "", "signature": signature}
    said = [{"role": "assistant", "content": [block, {"type": "text", "text": "Yes"}]}, *ASK["messages"]]
    plain = [{"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}, *ASK["messages"]]
    async with anthropic_of(app_over(control)) as client:
        for messages in (said, plain):
            await client.messages.create(**ASK | {"messages": [*ASK["messages"], *messages]})
    assert control.submits[0].prompt == control.submits[1].prompt


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"thinking": {"type": "adaptive", "display": "whole"}}, "thinking.display"),
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'.*text only"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
            "role",
        ),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "So"}]}, "assistant"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "runs at the client"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "one name"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' needs 'tools'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: "),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers' is not supported"),
        ({"stop_sequence": ["x"]}, "did you mean 'stop_sequences'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "schema cannot be used"),
    ],
)
async def test_what_is_wrong_is_named(fields, says):
    async with anthropic_of(app_over(answering("x"))) as client:
        with pytest.raises(library().BadRequestError, match=says) as refused:
            await client.messages.create(**ASK | {"extra_body": fields})
    assert refused.value.type == "invalid_request_error"


async def test_every_error_has_anthropic_s_shape(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alpha\n")
    path.chmod(0o600)
    app = app_over(answering("x"), keys=Keys(path))
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        found = []
        asked: list[tuple[str, str, str, dict[str, Any]]] = [
            ("POST", "/v1/messages", "wrong", {}),
            ("POST", "/v1/messages", "", {}),
            ("GET", "/v1/messages", "alpha", {}),
            ("GET", "/v1/messages/batches", "alpha", {}),
            ("POST", "/v1/messages", "alpha", {"content": b"{", "headers": {}}),
            ("POST", "/v1/messages", "alpha", {"json": ASK | {"model": "other"}}),
            ("POST", "/v1/messages", "alpha", {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
            ("POST", "/v1/messages", "alpha", {"json": ASK, "headers": {"anthropic-version": "2023-01-01"}}),
            ("POST", "/v1/messages", "alpha", {"content": b" " * 70_000}),
        ]
        for method, route, key, more in asked:
            headers = {**more.pop("headers", {}), **({"x-api-key": key} if key else {})}
            answer = await client.request(method, route, headers=headers, **more)
            body = answer.json()
            assert set(body) == {"type", "error", "request_id"}
            assert body["request_id"] == answer.headers["X-Request-Id"]
            found.append((answer.status_code, body["error"]["type"]))
    wrong = "invalid_request_error"
    assert found == [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (405, wrong),
        (404, "not_found_error"),
        (400, wrong),
        (404, "not_found_error"),
        (415, wrong),
        (400, wrong),
        (413, "request_too_large"),
    ]


async def test_the_key_may_come_in_either_header(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alpha\n")
    path.chmod(0o600)
    async with serving(app_over(answering("x"), keys=Keys(path))) as url:
        ways: Any = ({"api_key": "alpha"}, {"auth_token": "alpha"})
        for given in ways:
            async with library().AsyncAnthropic(base_url=url, max_retries=0, **given) as client:
                assert (await client.messages.create(**ASK)).content[0].text == "x"
        both = {"x-api-key": "alpha", "Authorization": "Bearer beta"}  # then it is Authorization that counts
        async with httpx.AsyncClient(base_url=url, headers=both) as other:
            assert (await other.post("/v1/messages", json=ASK)).status_code == 401


async def test_an_idempotency_key_brings_the_same_answer_and_is_its_route_s():
    control = answering("Hello")
    app = app_over(control, book=book_of())
    headers = {"Idempotency-Key": "one"}
    async with serving(app) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        first = (await client.post("/v1/messages", json=ASK)).json()
        assert (await client.post("/v1/messages", json=ASK)).json() == first
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 422
    assert len(control.submits) == 1

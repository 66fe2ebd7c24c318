"""`/v1/responses` as the real `openai` client uses it: items, events in their order, tools, JSON, and what is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pydantic
import pytest
from fastapi import FastAPI

from orchestrator.config.model import Api
from orchestrator.daemon.api.doors.blocks import BlockBuilder
from orchestrator.daemon.api.doors.responses.store import ResponseStore
from orchestrator.daemon.api.keys import Keys
from orchestrator.daemon.api.streaming import Piece
from orchestrator.daemon.api.tools.calls import Text, render_parts
from orchestrator.daemon.api.tools.forms import build_thought_splitter
from orchestrator.daemon.api.wire import ChatRequest
from tests.api.support import TOKENIZER, HandClock, ScriptedControl, app_over, client_of, serving
from tests.api.test_tools import CITY, TWICE, answering
from tests.support.daemon import Daemon, configuration, running

ASK: dict[str, Any] = {"model": "toy", "input": "hello"}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": CITY, "strict": None},
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False},
]
THOUGHT = "<think>\nLet me see.\n</think>\n\nHello"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    with running(configuration(tmp_path_factory.mktemp("responses"))) as started:
        yield started
        assert started.stop() == 0


def client_at(daemon: Daemon) -> Any:
    """As `daemon.client`, see `responses_of`."""
    return daemon.client


@asynccontextmanager
async def responses_of(app: FastAPI) -> AsyncIterator[Any]:
    """As `client_of`. `Any`: a response's items are of many types, and each test knows which it has."""
    async with client_of(app) as client:
        yield client


async def events_of(text: str, each: int = 1, finish: str = "stop", **body: Any) -> list[Any]:
    async with responses_of(app_over(answering(text, each, finish))) as client:
        return [event async for event in await client.responses.create(**ASK | body, stream=True)]


async def test_a_text_comes_in_the_documented_order():
    events = await events_of("Hello", each=2)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    response = events[-1].response
    assert response.output_text == "Hello"
    assert {event.item_id for event in events[3:9]} == {response.output[0].id}
    assert (response.usage.output_tokens, response.status) == (5, "completed")
    assert events[0].response.id == response.id


@pytest.mark.parametrize("each", [1, 3, 1000])
async def test_thoughts_text_and_calls_are_items_however_they_come(each):
    text = f"<think>I will look.</think>{TWICE}"
    events = await events_of(text, each, tools=TOOLS)
    streamed = events[-1].response
    async with responses_of(app_over(answering(text, each))) as client:
        whole = await client.responses.create(**ASK, tools=TOOLS)
    for response in (streamed, whole):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        thought, said, weather, add = response.output
        assert thought.content[0].text == "I will look."
        assert said.content[0].text == "Let me see."
        assert (weather.name, json.loads(weather.arguments)) == ("get_weather", {"city": "Oslo"})
        assert (add.name, json.loads(add.arguments)) == ("add", {"a": 1, "b": True})
        assert response.usage.output_tokens_details.reasoning_tokens == len("I will look.")
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == streamed.output
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert (
        "".join(event.delta for event in deltas if event.item_id == streamed.output[2].id)
        == streamed.output[2].arguments
    )


async def test_the_client_s_own_stream_helper_understands_it():
    async with responses_of(app_over(answering(THOUGHT, 4))) as client, client.responses.stream(**ASK) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert final.output_text == "Hello"
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.completed"} <= kinds


class Weather(pydantic.BaseModel):
    city: str


async def test_a_schema_is_parsed_by_the_client_and_bound_by_a_grammar():
    control = answering('{"city": "Oslo"}')
    async with responses_of(app_over(control)) as client:
        parsed = await client.responses.parse(**ASK, text_format=Weather)
    assert parsed.output_parsed == Weather(city="Oslo")
    assert control.submits[0].grammar is not None
    assert json.loads(control.submits[0].grammar.text)["properties"]["city"]["type"] == "string"


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("stop", None)])
async def test_an_answer_that_is_cut_is_incomplete(finish, reason):
    events = await events_of("Hel", finish=finish)
    response = events[-1].response
    assert events[-1].type == ("response.incomplete" if reason else "response.completed")
    assert response.output[0].status == ("incomplete" if reason else "completed")
    assert (response.incomplete_details.reason if reason else response.incomplete_details) == reason


async def test_an_answer_without_text_has_an_empty_message():
    events = await events_of("\n", finish="stop", extra_body={"stop": "\n"})
    assert [item.type for item in events[-1].response.output] == ["message"]
    assert events[-1].response.output_text == ""


async def test_an_error_behind_the_first_token_is_a_response_that_failed():
    control = ScriptedControl(error=RuntimeError("broken"), error_at=1)
    async with responses_of(app_over(control)) as client:
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "broken" not in events[-1].response.error.message


CONVERSATION: Any = [
    {"role": "user", "content": "weather?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}], "id": "m"},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}', "id": "fc"},
    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "and "}, {"type": "input_text", "text": "now?"}]},
]
CALLS: Any = [
    {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
]
MESSAGES: Any = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "One moment.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "tool", "tool_call_id": "c2", "content": "3"},
    {"role": "user", "content": "and now?"},
]


async def test_items_are_the_tokens_that_the_chat_route_has_for_the_same():
    control = answering("x")
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    async with responses_of(app_over(control)) as client:
        await client.responses.create(model="toy", instructions="be brief", input=CONVERSATION, tools=TOOLS, top_p=0.5)
        await client.chat.completions.create(model="toy", messages=MESSAGES, tools=tools, top_p=0.5)
    ours, theirs = control.submits
    assert ours.prompt == theirs.prompt
    assert ours.max_tokens == theirs.max_tokens
    assert (ours.route, theirs.route) == ("/v1/responses", "/v1/chat/completions")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}])
def test_the_text_is_the_chat_route_s_to_the_letter(daemon, sampling):
    seed = {name: sampling[name] for name in sampling.keys() & {"seed"}}
    fields = {name: sampling[name] for name in sampling.keys() - {"seed"}}
    chat = daemon.client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hello"}], max_tokens=40, **sampling
    )
    asked: Any = {**ASK, "max_output_tokens": 40, **fields, "extra_body": seed}
    whole = client_at(daemon).responses.create(**asked)
    last = list(client_at(daemon).responses.create(**asked, stream=True))[-1].response
    assert whole.output_text == last.output_text == chat.choices[0].message.content
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call_keeps_to_its_schema(daemon, choice):
    tools: Any = [tool | {"parameters": CITY | {"additionalProperties": False}} for tool in TOOLS[:1]]
    response = client_at(daemon).responses.create(**ASK, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = response.output
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_tools_and_a_schema_together_give_one_or_the_other(daemon):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "f", "schema": schema}}
    for seed in range(4):
        response = client_at(daemon).responses.create(
            **ASK, tools=TOOLS[:1], text=form, max_output_tokens=300, extra_body={"seed": seed}
        )
        for item in response.output:
            if item.type == "message":
                assert set(json.loads(item.content[0].text)) == {"a"}
            elif response.status == "completed":
                assert isinstance(json.loads(item.arguments), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"tools": [{"type": "shell"}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "first"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"temprature": 1}, "temprature"),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(fields, param):
    async with responses_of(app_over(answering("x"))) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(**ASK | {"extra_body": fields})
    assert refused.value.status_code in (400, 404)
    assert refused.value.param == param


LONG = "sea " * 8000


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": "x", "instructions": LONG}, "instructions"),
        ("/v1/responses", {"input": [{"role": "user", "content": LONG}]}, "input"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "x", "output": LONG}]}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "system": LONG}, "system"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": LONG}]}]},
            "messages",
        ),
    ],
)
async def test_what_cannot_fit_is_refused_by_its_bytes(route, body, param):
    async with serving(app_over(answering("x"))) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(route, json={"model": "toy", "max_tokens": 1} | body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    if route == "/v1/messages":
        assert message.startswith("prompt is too long: ")
    else:
        assert "maximum context length is 4096 tokens. However, you sent at least" in message
        assert f"in '{param}'" in message


async def test_events_have_no_ids_to_go_on_behind():
    async with serving(app_over(answering("x"))) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/responses", json=ASK, headers={"Last-Event-ID": "resp-1:1.1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_response_is_kept_goes_on_and_is_deleted():
    control = answering("Hello")
    async with responses_of(app_over(control)) as client:
        first = await client.responses.create(**ASK, instructions="be brief")
        assert await client.responses.retrieve(first.id) == first
        second = await client.responses.create(model="toy", input="again", previous_response_id=first.id)
        messages: Any = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "again"},
        ]
        await client.chat.completions.create(model="toy", messages=messages)
        assert control.submits[-2].prompt == control.submits[-1].prompt
        streamed = [
            event
            async for event in await client.responses.create(
                model="toy", input="more", previous_response_id=second.id, stream=True
            )
        ]
        assert (await client.responses.retrieve(streamed[-1].response.id)).previous_response_id == second.id
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(first.id)
        await client.responses.delete(first.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(first.id)
        unkept = await client.responses.create(**ASK, store=False)
        assert unkept.model_extra is not None
        assert unkept.model_extra["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)


async def test_a_response_is_its_key_s(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alpha\nbeta\n")
    path.chmod(0o600)
    async with serving(app_over(answering("x"), keys=Keys(path))) as url:
        alpha, beta = (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("alpha", "beta")
        )
        async with alpha, beta:
            made = await alpha.responses.create(**ASK)
            assert (await alpha.responses.retrieve(made.id)).id == made.id
            with pytest.raises(openai.NotFoundError):
                await beta.responses.retrieve(made.id)
            with pytest.raises(openai.BadRequestError, match="no response"):
                await beta.responses.create(**ASK, previous_response_id=made.id)


async def test_where_none_are_kept_a_request_that_needs_it_is_told():
    async with responses_of(app_over(answering("x"), stored_responses=0)) as client:
        made = await client.responses.create(**ASK)
        assert made.model_extra is not None
        assert made.model_extra["store"] is False
        with pytest.raises(openai.BadRequestError, match=r"api\.stored_responses"):
            await client.responses.create(**ASK, store=True)
        with pytest.raises(openai.BadRequestError, match="stored_responses is 0"):
            await client.responses.create(**ASK, previous_response_id=made.id)


def test_what_is_kept_is_bounded_by_count_bytes_and_time():
    clock = HandClock()
    few = Api.model_validate({"stored_responses": 3, "stored_responses_memory": "100 B", "stored_responses_s": 10.0})
    store = ResponseStore(few, clock)
    for number in range(5):
        store.put("me", str(number), b"x" * 10, b"y" * 10)
    assert [store.find("me", str(number)) is not None for number in range(5)] == [False, False, True, True, True]
    store.put("me", "large", b"x" * 60, b"")
    assert [store.find("me", name) is not None for name in ("2", "3", "4", "large")] == [False, True, True, True]
    store.put("me", "huge", b"x" * 101, b"")
    assert store.find("me", "huge") is None
    clock.now_s += 5.0
    store.put("me", "late", b"x", b"")
    clock.now_s += 5.0
    assert [store.find("me", name) is not None for name in ("large", "late")] == [False, True]
    assert store.delete("me", "late")
    assert not store.delete("me", "late")
    store.put("me", "fits", b"x" * 100, b"")  # all bytes were given back
    assert store.find("me", "fits") is not None
    store.set_bounds(Api(stored_responses=0))
    assert store.find("me", "fits") is None


def blocks_of(texts: list[str], prompt: str = "") -> list[tuple[str, str]]:
    """What a text in these pieces is taken for."""
    body = ChatRequest.model_validate({"model": "toy", "messages": [{"role": "user", "content": "x"}]})
    thoughts, builder = build_thought_splitter(body, list(prompt.encode()), TOKENIZER), BlockBuilder()
    for index, text in enumerate(texts):
        last = index == len(texts) - 1
        parts = render_parts(thoughts.push([Text(text)], last=last), "x")
        builder.push(Piece(0, parts, finish="stop" if last else ""))
    return [(block.kind, block.text) for block in builder.blocks]


@pytest.mark.parametrize(
    ("prompt", "text", "blocks"),
    [
        ("", "Hello", [("text", "Hello")]),
        ("", THOUGHT, [("thought", "Let me see."), ("text", "Hello")]),
        ("", " <thin", [("text", " <thin")]),
        ("", "a <think>b</think>", [("text", "a <think>b</think>")]),
        ("", "<think>a < b </thin", [("thought", "a < b </thin")]),
        ("", "<think></think>x", [("text", "x")]),
        ("<think>\n", "so\n</think>\nx y ", [("thought", "so"), ("text", "x y ")]),
        ("<think>\n", "so", [("thought", "so")]),
    ],
)
def test_thoughts_are_told_apart_however_they_come(prompt, text, blocks):
    assert blocks_of([text], prompt) == blocks_of(list(text), prompt) == blocks
    for cut in range(len(text)):
        assert blocks_of([text[:cut], text[cut:]], prompt) == blocks

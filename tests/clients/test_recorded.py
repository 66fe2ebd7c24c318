"""Bodies that other clients sent, recorded as they came. Each is answered whole and streamed, in its client's types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.support import READY, ScriptedControl, app_over, serving
from tests.support.daemon import Daemon, configuration, running
from tests.support.ready import change_ready

RECORDED = Path(__file__).parent / "recorded"
CONTEXT_TOKENS = 100_000


def read_requests() -> list[Any]:
    """Every recorded request, named by its client."""
    found = []
    for path in sorted(RECORDED.glob("*.json")):
        for request in json.loads(path.read_text(encoding="utf-8"))["requests"]:
            found.append(pytest.param(request["path"], request["body"], id=f"{path.stem}-{request['name']}"))
    return found


EVERY = read_requests()
REQUESTS = [one for one in EVERY if "thread" not in one.values[1]]


def find_schema(body: dict[str, Any]) -> dict[str, Any] | None:
    """The schema that the text of an answer keeps to, wherever this API has it."""
    places = (
        body.get("response_format", {}).get("json_schema", {}),
        body.get("text", {}).get("format", {}),
        body.get("output_config", {}).get("format", {}),
    )
    return next((place["schema"] for place in places if "schema" in place), None)


def forces_a_call(body: dict[str, Any]) -> bool:
    """Whether the answer has to be a call."""
    choice = body.get("tool_choice", "auto")
    return (choice["type"] if isinstance(choice, dict) else choice) not in ("auto", "none")


def list_functions(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The functions that a body offers: the namespace ("": none) and the name."""
    found = []
    for tool in body.get("tools", []):
        inside = tool["tools"] if tool.get("type") == "namespace" else [tool]
        space = tool["name"] if tool.get("type") == "namespace" else ""
        found += [(space, one.get("function", one)["name"]) for one in inside if "name" in one.get("function", one)]
    return found


def read_whole(path: str, body: dict[str, Any]) -> tuple[str, list[tuple[str, str, str]], Any]:
    """An answer as its client's own types have it: text, calls (namespace, name, arguments), and why it ended."""
    if path == "/v1/messages":
        from anthropic.types import Message

        message: Any = Message.model_validate(body)
        calls = [("", one.name, json.dumps(one.input)) for one in message.content if one.type == "tool_use"]
        return "".join(one.text for one in message.content if one.type == "text"), calls, message.stop_reason
    if path == "/v1/responses":
        response = Response.model_validate(body)
        calls = [
            (one.namespace or "", one.name, one.arguments) for one in response.output if one.type == "function_call"
        ]
        return response.output_text, calls, response.status
    choice = ChatCompletion.model_validate(body).choices[0]
    made: Any = choice.message.tool_calls or []
    return (
        choice.message.content or "",
        [("", one.function.name, one.function.arguments) for one in made],
        (choice.finish_reason),
    )


def read_stream(path: str, text: str) -> tuple[str, list[tuple[str, str, str]], Any]:
    """As `read_whole`, of the events of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == "/v1/messages":
        return read_message_events(events)
    if path == "/v1/responses":
        adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        read = [adapter.validate_python(event) for event in events]
        assert [event.sequence_number for event in read] == list(range(len(read)))
        return read_whole(path, events[-1]["response"])
    said, calls, finish = "", list[list[str]](), None
    for chunk in map(ChatCompletionChunk.model_validate, events):
        for choice in chunk.choices:
            said += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                if delta.index == len(calls):
                    calls.append(["", delta.function.name or "", ""])
                calls[delta.index][2] += delta.function.arguments or ""
    return said, [(one[0], one[1], one[2]) for one in calls], finish


def read_message_events(events: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str, str]], Any]:
    """As `read_stream`, of events in Anthropic's form."""
    from anthropic.types import RawMessageStreamEvent

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    said, calls, stop = "", list[list[str]](), None
    for event in (adapter.validate_python(one) for one in events if one["type"] != "ping"):
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            calls.append(["", event.content_block.name, ""])
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            said += event.delta.text
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            calls[-1][2] += event.delta.partial_json
        if event.type == "message_delta":
            stop = event.delta.stop_reason
    return said, [(one[0], one[1], one[2]) for one in calls], stop


async def ask(path: str, body: dict[str, Any], text: str) -> tuple[Any, Any, ScriptedControl]:
    """What a client reads of an answer with this text, whole and streamed."""
    raw = text.encode()
    steps = [list(raw[start : start + 5]) for start in range(0, len(raw), 5)]
    ready = change_ready(READY, context_tokens=CONTEXT_TOKENS)
    control = ScriptedControl(steps=steps, finish="stop", ready=ready)
    async with serving(app_over(control, max_body=2**20)) as url, httpx.AsyncClient(base_url=url) as client:
        plain = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        whole = await client.post(path, json=plain | {"stream": False})
        assert whole.status_code == 200, whole.text
        options = {key: body[key] for key in ("stream_options",) if key in body}
        streamed = await client.post(path, json=plain | options | {"stream": True})
        assert streamed.status_code == 200, streamed.text
    return read_whole(path, whole.json()), read_stream(path, streamed.text), control


@pytest.mark.parametrize(("path", "body"), [one for one in REQUESTS if not forces_a_call(one.values[1])])
async def test_a_recorded_body_is_answered_whole_and_streamed(path, body):
    schema = find_schema(body)
    text = '{"city": "Oslo", "rain_mm": 1}' if schema is not None else "It rains."
    (said, calls, end), streamed, control = await ask(path, body, text)
    assert (said, calls) == (text, [])
    assert end in ("stop", "completed", "end_turn")
    assert streamed == (said, calls, end)
    assert (control.submits[0].grammar is not None) >= (schema is not None)


@pytest.mark.parametrize(("path", "body"), [one for one in REQUESTS if list_functions(one.values[1])])
async def test_every_function_that_a_recorded_body_offers_can_be_called(path, body):
    for space, name in list_functions(body):
        told = f"{space}.{name}" if space else name
        text = f'<tool_call>\n{{"name": "{told}", "arguments": {{"city": "Oslo"}}}}\n</tool_call>'
        (said, calls, end), streamed, _ = await ask(path, body, text)
        assert [(one[0], one[1], json.loads(one[2])) for one in calls] == [(space, name, {"city": "Oslo"})]
        assert (said, end in ("tool_calls", "completed", "tool_use")) == ("", True)
        assert (streamed[0], [one[:2] for one in streamed[1]], streamed[2]) == ("", [(space, name)], end)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    with running(configuration(tmp_path_factory.mktemp("recorded"))) as started:
        yield started
        assert started.stop() == 0


@pytest.mark.parametrize(
    ("path", "body"), [one for one in REQUESTS if find_schema(one.values[1]) and "codex" not in str(one.id)]
)
def test_a_recorded_schema_is_kept_to(daemon, path, body):
    schema = find_schema(body)
    answer = httpx.post(f"{daemon.url}{path}", json=body | {"stream": False, "seed": 3})
    assert answer.status_code == 200, answer.text
    said, _, end = read_whole(path, answer.json())
    if end in ("stop", "completed", "end_turn"):
        jsonschema.validate(json.loads(said), schema or {})
    else:
        assert said.startswith("{")


async def test_a_thread_is_refused_in_the_words_that_its_client_goes_on_from():
    asked = [one.values for one in EVERY if "thread" in one.values[1]]
    assert asked
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        for path, body in asked:
            answer = await client.post(str(path), json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"

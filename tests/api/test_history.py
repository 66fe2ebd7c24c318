"""What clients send back: their history is taken with whatever stands in it, and nothing of it is lost in silence."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from pydantic import ValidationError

from adapters.chat_template import ChatTemplate
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.conversation import Message
from tests.api.support import TOKENIZER, app_over, client_of, serving
from tests.api.test_tools import CHAT, TWICE, answering, prompt_of

USER: Any = {"role": "user", "content": "x"}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


async def post(path: str, body: dict[str, Any], tokenizer: Tokenizer = TOKENIZER) -> tuple[httpx.Response, str]:
    """The answer to a body, and the prompt that the model was given."""
    control = answering("ok")
    async with serving(app_over(control, tokenizer=tokenizer)) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(path, json={"model": "toy"} | body)
    return answer, prompt_of(control) if control.submits else ""


async def chat(*messages: Any, **fields: Any) -> tuple[httpx.Response, str]:
    return await post("/v1/chat/completions", {"messages": list(messages)} | fields)


def collect_calls(chunks: list[ChatCompletionChunk]) -> list[dict[str, Any]]:
    """Put streamed calls together as clients do: the first delta as it is, the text of later ones behind it."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            told = delta.model_dump()
            if delta.index == len(calls):
                calls.append(told)
            else:
                calls[delta.index]["function"]["arguments"] += told["function"]["arguments"] or ""
    return calls


@pytest.mark.parametrize("each", [1, 1000])
async def test_streamed_calls_that_were_collected_are_taken_back(each):
    async with client_of(app_over(answering(TWICE, each))) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
        calls = collect_calls(chunks)
        assert [call["index"] for call in calls] == [0, 1]
        whole = (await client.chat.completions.create(**CHAT)).choices[0].message
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    said = {"role": "assistant", "content": "Let me see."}
    answer, prompt = await chat(USER, said | {"tool_calls": calls}, *results)
    assert answer.status_code == 200, answer.text
    plain = [call | {"index": None, "id": None} for call in calls]
    assert (await chat(USER, said | {"tool_calls": plain}, *results))[1] == prompt
    assert (await chat(USER, whole.model_dump(), *results))[1] == prompt


@pytest.mark.parametrize(
    "extra",
    [
        {"annotations": [], "audio": None, "function_call": None, "refusal": None},
        {"cache_control": {"type": "ephemeral"}},
        {"extra_content": {"google": {"thought_signature": "x"}}},
        {"provider_specific_fields": {"citations": []}, "images": []},
        {"prefix": False, "weight": 1},
        {"metadata": {"a": 1}, "id": "msg_1", "created_at": 1},
    ],
)
async def test_what_other_servers_put_into_a_message_changes_nothing(extra):
    said = {"role": "assistant", "content": "One moment.", "tool_calls": [CALL | extra]}
    told = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"} | extra]}
    answer, prompt = await chat(USER | extra, said | extra, told | extra)
    assert answer.status_code == 200, answer.text
    plain = (USER, said | {"tool_calls": [CALL]}, told | {"content": "3"})
    assert prompt == (await chat(*plain))[1]


@pytest.mark.parametrize(
    ("content", "more", "words", "thought"),
    [
        ([{"type": "refusal", "refusal": "I will not."}], {}, "I will not.", ""),
        (None, {"refusal": "I will not."}, "I will not.", ""),
        ([{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}], {}, "Yes.", "Hm."),
        ("Yes.", {"reasoning": "Hm."}, "Yes.", "Hm."),
        ("Yes.", {"reasoning_content": "Hm.", "thinking": "other"}, "Yes.", "Hm."),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "citations": []}], {}, "ab", ""),
        ([], {}, "", ""),
    ],
)
async def test_parts_of_the_assistant_are_words_or_thoughts(content, more, words, thought):
    source = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    tokenizer = Tokenizer(TOKENIZER._vocabulary, ChatTemplate(source, bos_token="", eos_token=""))
    body = {"messages": [USER, {"role": "assistant", "content": content} | more, USER]}
    answer, prompt = await post("/v1/chat/completions", body, tokenizer)
    assert answer.status_code == 200, answer.text
    assert prompt == f"[|x][{thought}|{words}][|x]"


LOST: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "contents": "hi"}]}, "messages.0.content", "'content'"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content", "'content'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "'content'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}, "messages.0.content", "'content'"),
    ("/v1/chat/completions", {"messages": [USER, {"role": "tool", "output": "3"}]}, "messages.1.content", "'tool'"),
    ("/v1/chat/completions", {"messages": [USER, {"role": "assistant"}, USER]}, "messages.1.content", "assistant"),
    ("/v1/chat/completions", {"messages": [USER | {"images": ["eA=="]}]}, "messages.0.images", "'images'"),
    ("/v1/chat/completions", {"messages": [USER | {"videos": ["x"]}]}, "messages.0.videos", "'videos'"),
    (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "content": "", "function_call": CALL["function"]}, USER]},
        "messages.1.function_call",
        "'tool_calls'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "content": "So", "prefix": True}]},
        "messages.1.prefix",
        "'prefix'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "txt": "hi"}]}]},
        "messages.0.content.0.text",
        "is missing",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "contents of type 'image_url' are not supported: the served model takes text only",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}]},
        "messages.0.content",
        "'thinking'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
        "tools",
        "did you mean 'parameters'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]},
        "tools",
        "did you mean 'parameters'",
    ),
    ("/tokenize", {"messages": [{"role": "user", "contents": "hi"}]}, "messages.0.content", "'content'"),
    ("/v1/responses", {"input": [{"role": "user", "contents": "hi"}]}, "input.0.content", "is missing"),
    ("/v1/responses", {"input": [{"role": "user", "content": []}]}, "input.0.content", "'content'"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "txt": "hi"}]}]},
        "input.0.content.0.text",
        "is missing",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]},
        "input.0.content.0.refusal",
        "is missing",
    ),
    ("/v1/responses", {"input": [USER | {"images": ["eA=="]}]}, "input.0.images", "'images'"),
    (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameter": {}}]},
        "tools",
        "did you mean 'parameters'",
    ),
    ("/v1/messages", {"messages": [{"role": "user", "contents": "hi"}]}, "messages.0.content", "is missing"),
    ("/v1/messages", {"messages": [{"role": "user", "content": []}]}, "messages.0.content", "'content'"),
    ("/v1/messages", {"messages": [USER | {"images": ["eA=="]}]}, "messages.0.images", "'images'"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "txt": "hi"}]}]},
        "messages.0.content.0.text",
        "is missing",
    ),
    (
        "/v1/messages",
        {"messages": [USER], "tools": [{"name": "f", "input_schema": {}, "desciption": "x"}]},
        "tools",
        "did you mean 'description'",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), LOST)
async def test_nothing_of_a_message_is_lost_in_silence(path, body, param, says):
    answer, prompt = await post(path, {"max_tokens": 9} | body if path == "/v1/messages" else body)
    assert (answer.status_code, prompt) == (400, "")
    error = answer.json()["error"]
    assert says in error["message"]
    assert path == "/v1/messages" or error["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": None}},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": None, "more": None}},
        {"response_format": {"type": "json_schema", "strict": True, "json_schema": {"name": "a", "schema": {}}}},
        {"response_format": {"type": "json_object", "json_schema": None}},
        {"tools": [{"type": "function", "cache_control": {}, "function": {"name": "f", "returns": {"type": "null"}}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "schema": {}, "parameter": 1}}]},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a", "cache_control": {}}]}},
    ],
)
async def test_nulls_and_hints_of_nested_parts_are_taken(fields):
    answer, _ = await chat(USER, **fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema"),
        ({"speculative_config": {"depth": 3}}, "speculative_config.depth"),
        ({"tool_choice": {"type": "function", "function": {"name": "f", "namespace": "x"}}}, "tool_choice"),
    ],
)
async def test_what_could_change_the_answer_is_still_refused(fields, param):
    answer, _ = await chat(USER, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["content", "refusal", "tool_calls", "images", "prefix", "name", "reasoning", "other"])
PARTS = st.lists(
    st.dictionaries(st.sampled_from(["type", "text", "refusal", "thinking", "more"]), JSON | st.just("text")),
    max_size=3,
)


@settings(max_examples=300)
@given(
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    fields=st.dictionaries(KEYS, JSON | PARTS | st.just([CALL]), max_size=4),
)
def test_a_message_is_refused_or_all_of_its_text_reaches_the_template(role, fields):
    try:
        message = Message.model_validate({"role": role, **fields})
    except ValidationError:
        return
    plain = message.plain()
    content = fields.get("content")
    assert isinstance(plain["content"], str)
    if isinstance(content, str) and content:
        assert plain["content"] == content
    if isinstance(content, list):
        words = [part["text"] for part in content if part["type"] == "text"]
        assert all(text in plain["content"] for text in words)
        thoughts = [part["thinking"] for part in content if part["type"] == "thinking"]
        assert not any(thoughts) or plain["reasoning_content"]
    assert not {"images", "prefix"} & plain.keys()
    assert role == "assistant" or "content" in fields
    json.dumps(plain)


@pytest.mark.parametrize("depth", [100, 480, 700, 980, 5000])
async def test_arguments_of_any_depth_are_rendered_or_refused(depth):
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}{{ tools }}<tool_call>"
    with_tools = Tokenizer.bytes_only()
    with_tools.render_by(lambda _: ChatTemplate(template, bos_token="", eos_token=""))
    body = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}
    for tokenizer in (TOKENIZER, with_tools):
        answer, _ = await post("/v1/chat/completions", body, tokenizer)
        assert answer.status_code == 200 or (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_an_effort_counts_in_the_tokens_of_a_chat():
    answer, _ = await post("/tokenize", {"messages": [USER], "reasoning_effort": "high"})
    assert answer.status_code == 200

"""Schemas that would end their compiler, and those that no text satisfies: 400 by the parameter's name, before any
event, at every door."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import psutil
import pytest

from adapters.chat_template import ChatTemplate
from orchestrator.daemon.sandbox.sandbox import Sandbox, SandboxedTemplate
from tests.api.support import _SANDBOX, READY, TOKENIZER, ScriptedControl, app_over, serving
from tests.api.test_overload import Watched
from tests.support.ready import change_ready
from tests.support.untrusted import DEADLY, SATISFIABLE, UNSATISFIABLE, Schema, nest_names

BOUND_S = 3.0
MESSAGES: Any = [{"role": "user", "content": "x"}]
CHAT: dict[str, Any] = {"model": "toy", "messages": MESSAGES}
SOUND: Schema = {"type": "object", "properties": {"q": {"type": "string"}}}


def tool_of(name: str, schema: Schema, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema} | more}


def ask_everywhere(schema: Schema) -> dict[str, tuple[str, dict[str, Any], str]]:
    """The routes that take a schema: path, body, and the parameter that is to be named."""
    named = {"name": "answer", "schema": schema}
    chat, tools = "/v1/chat/completions", [tool_of("find", SOUND), tool_of("book", schema)]
    response = {"type": "json_schema", "json_schema": named}
    strict = [tool_of("find", SOUND, strict=True), tool_of("book", schema, strict=True)]
    return {
        "chat": (chat, CHAT | {"response_format": response}, "response_format"),
        "chat, streamed": (chat, CHAT | {"response_format": response, "stream": True}, "response_format"),
        "completions": (
            "/v1/completions",
            {"model": "toy", "prompt": "x", "response_format": response},
            "response_format",
        ),
        "forced tools": (chat, CHAT | {"tools": tools, "tool_choice": "required"}, "tools"),
        "a forced tool": (
            chat,
            CHAT | {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "book"}}},
            "tools",
        ),
        "strict tools": (chat, CHAT | {"tools": strict, "stream": True}, "tools"),
        "an answer beside tools": (
            chat,
            CHAT | {"tools": [tool_of("find", SOUND)], "response_format": response},
            "response_format",
        ),
        "responses": (
            "/v1/responses",
            {"model": "toy", "input": "x", "text": {"format": {"type": "json_schema"} | named}},
            "text.format",
        ),
        "messages": (
            "/v1/messages",
            {
                "model": "toy",
                "max_tokens": 9,
                "messages": MESSAGES,
                "tools": [{"name": "book", "input_schema": schema}],
                "tool_choice": {"type": "any"},
            },
            "tools",
        ),
    }


def control_of_room() -> ScriptedControl:
    """A control whose context has room for tools."""
    return ScriptedControl(ready=change_ready(READY, context_tokens=100_000))


DOORS = list(ask_everywhere({}))


async def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(url + path, json=body)


@pytest.mark.parametrize("door", DOORS)
async def test_a_schema_that_ends_its_compiler_is_the_clients_mistake_everywhere(door):
    control = control_of_room()
    app = app_over(control, translation_timeout_s=60.0)  # two compilers are ended by it, however busy the machine is
    path, body, _ = ask_everywhere(DEADLY["references through items"])[door]
    async with serving(app) as url:
        answer = await post(url, path, body)
        assert answer.status_code == 400, answer.text
        assert "nested deeper" in answer.text
        again_s = time.monotonic()
        assert (await post(url, path, body)).text.partition("request_id")[0] == answer.text.partition("request_id")[0]
        assert time.monotonic() - again_s < BOUND_S
    assert control.submits == []


@pytest.mark.parametrize("name", DEADLY)
async def test_such_schemas_end_within_the_bound_and_nothing_of_them_goes_on(name):
    app = app_over(control_of_room(), translation_timeout_s=BOUND_S)
    path, body, param = ask_everywhere(DEADLY[name])["chat"]
    async with serving(app) as url:
        await post(url, path, CHAT)
        began_s = time.monotonic()
        answer = await post(url, path, body)
        assert time.monotonic() - began_s < BOUND_S + 2.0
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await post(url, path, CHAT | {"response_format": {"type": "json_object"}})).status_code == 200


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["itself", "a required property", "a part that may be left out"])
async def test_a_schema_that_no_text_satisfies_is_refused_by_name(door, name):
    control = control_of_room()
    path, body, param = ask_everywhere(UNSATISFIABLE[name])[door]
    async with serving(app_over(control)) as url:
        answer = await post(url, path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "no finite JSON satisfies" in error["message"]
    if param == "tools":
        assert "the tool 'book'" in error["message"]
    if "param" in error:
        assert error["param"] == param
    assert control.submits == []


@pytest.mark.parametrize("name", UNSATISFIABLE)
async def test_every_schema_that_no_text_satisfies_is_refused(name):
    path, body, param = ask_everywhere(UNSATISFIABLE[name])["chat, streamed"]
    async with serving(app_over(control_of_room())) as url:
        answer = await post(url, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", SATISFIABLE)
async def test_a_recursion_that_ends_is_taken(name):
    async with serving(app_over(control_of_room())) as url:
        no_object = SATISFIABLE[name].get("type") == "array"  # which arguments of tools are
        for door in ("chat",) if no_object else ("chat", "forced tools"):
            path, body, _ = ask_everywhere(SATISFIABLE[name])[door]
            answer = await post(url, path, body)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("door", DOORS)
async def test_names_that_are_listed_in_one_another_do_not_multiply(door):
    control = control_of_room()
    before_bytes = psutil.Process().memory_info().rss
    async with serving(app_over(control, translation_timeout_s=BOUND_S)) as url:
        for depth in (4, 14, 40):  # each that is written too long is found before the next
            schema = nest_names(["a", "b"], depth)
            began_s = time.monotonic()
            path, body, _ = ask_everywhere(schema)[door]
            answer = await post(url, path, body)
            assert answer.status_code == 200, answer.text
            assert time.monotonic() - began_s < BOUND_S + 2.0
            grammar = control.submits[-1].grammar
            assert grammar is not None
            assert len(grammar.text) < 2 * len(json.dumps(schema)) + 2048
    assert psutil.Process().memory_info().rss - before_bytes < 64 << 20


@pytest.mark.parametrize("door", ["chat", "forced tools", "responses"])
async def test_a_schema_over_the_operator_s_bound_is_refused_before_it_is_looked_at(door):
    control = control_of_room()
    schema = {"type": "object", "not": {"type": "null"}, "title": "x" * 3000}  # 'not' cannot be kept to either
    path, body, param = ask_everywhere(schema)[door]
    async with serving(app_over(control, max_grammar=2500)) as url:
        error = (await post(url, path, body)).json()["error"]
    assert (error["code"], error["param"]) == ("schema_too_large", param)
    assert "2500 are taken" in error["message"]
    assert "limits.max_grammar" in error["message"]


async def test_small_requests_wait_neither_for_a_slow_schema_nor_for_a_slow_template():
    app = app_over(control_of_room(), tokenizer=Templated(LOOPS, _SANDBOX), translation_timeout_s=20.0)
    chat = "/v1/chat/completions"
    patterns = {f"^x{number}[a-z]+$": {"type": "null"} for number in range(230)}
    named = {"name": "x", "schema": {"type": "object", "patternProperties": patterns}}
    slow_schema = {"type": "json_schema", "json_schema": named}
    fine = CHAT | {"messages": [{"role": "user", "content": "1"}]}
    loops = CHAT | {"messages": [{"role": "user", "content": "loop"}]}
    async with serving(app) as url:
        await post(url, chat, fine)
        slow = [asyncio.create_task(post(url, chat, loops))]
        slow += [asyncio.create_task(post(url, chat, fine | {"response_format": slow_schema}))]
        await asyncio.sleep(0.2)
        began_s = time.monotonic()
        quick = await post(url, chat, fine | {"response_format": {"type": "json_object"}})
        assert quick.status_code == 200
        assert time.monotonic() - began_s < 8.0, "the template alone has ten seconds"
        ended, _ = await asyncio.gather(*slow)
        assert ended.status_code == 400


class Templated(Watched):
    """A tokenizer with another chat template, which the sandbox runs."""

    def __init__(self, source: str, sandbox: Sandbox) -> None:
        super().__init__()
        template = ChatTemplate(source, bos_token="", eos_token="")
        self.render_by(lambda _: SandboxedTemplate(template, sandbox))


LOOPS = "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
LOOPS += "{% endfor %}{% endif %}{{ 'x' * (messages[0].content | int) }}<|start|>"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"max_tokens": 3}),
        ("/v1/messages/count_tokens", {}),
        ("/tokenize", {}),
    ],
)
async def test_a_template_that_loops_is_ended_and_says_so(path, more):
    app = app_over(control_of_room(), tokenizer=Templated(LOOPS, _SANDBOX), translation_timeout_s=2 * BOUND_S / 2)
    async with serving(app) as url:
        for content, says in (("loop", "chat template takes longer than 1.5 s"), ("999999999", "more memory")):
            began_s = time.monotonic()
            body = {"model": "toy", "messages": [{"role": "user", "content": content}]} | more
            answer = await post(url, path, body)
            assert (answer.status_code, says in answer.text) == (400, True), answer.text
            assert time.monotonic() - began_s < BOUND_S + 2.0
        fine = await post(url, path, {"model": "toy", "messages": [{"role": "user", "content": "4"}]} | more)
        assert fine.status_code == 200


def test_tokens_are_the_same_as_without_a_sandbox():
    boxed = Templated("{% for one in messages %}<|start|>{{ one.content }}{% endfor %}", _SANDBOX)
    tricky: Any = [{"role": "user", "content": "a <|end|> that is no end \ud83d"}]
    plain = Watched()
    plain.render_by(
        lambda _: ChatTemplate(
            "{% for one in messages %}<|start|>{{ one.content }}{% endfor %}", bos_token="", eos_token=""
        )
    )
    assert boxed.encode_chat(tricky) == plain.encode_chat(tricky)
    assert TOKENIZER.eos_ids == boxed.eos_ids

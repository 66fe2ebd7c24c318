"""Tools of `/v1/responses` and `/v1/messages` that are no plain functions: namespaces, hosted ones, and histories."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.support import TOKENIZER, app_over, client_of, serving
from tests.api.test_messages_route import anthropic_of, library
from tests.api.test_tools import CITY, answering, prompt_of

USER: Any = {"role": "user", "content": "x"}
LIST = {"type": "function", "name": "list", "description": "Lists.", "parameters": CITY}
FILES = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [LIST, LIST | {"name": "read"}]}
USERS = {"type": "namespace", "name": "users", "tools": [LIST | {"description": None}]}
TOOLS: Any = [LIST, FILES, USERS]
SEARCH: Any = {"type": "web_search", "external_web_access": False}


def calling(*names: str) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Oslo"}}}}\n</tool_call>' for name in names
    )


async def create(text: str, **body: Any) -> tuple[Any, Any, str]:
    """A response, the last event of the same as a stream, and the prompt."""
    control = answering(text)
    async with client_of(app_over(control)) as client:
        asked: Any = {"model": "toy", "input": "x"} | body
        whole = await client.responses.create(**asked)
        events: Any = [event async for event in await client.responses.create(**asked, stream=True)]
    done = [event.name for event in events if event.type == "response.function_call_arguments.done"]
    assert done == [item.name for item in whole.output if item.type == "function_call"]
    return whole, events[-1].response, prompt_of(control)


async def test_functions_of_namespaces_are_kept_apart():
    names = ["list", "files.list", "users.list", "files.read"]
    whole, streamed, prompt = await create(calling(*names), tools=TOOLS)
    for response in (whole, streamed):
        called = [(call.namespace or "", call.name) for call in response.output]
        assert called == [("", "list"), ("files", "list"), ("users", "list"), ("files", "read")]
        assert [tool.type for tool in response.tools] == ["function", "namespace", "namespace"]
    assert '"name": "files.list", "description": "Of files.\\nLists."' in prompt
    assert '"name": "files.read", "description": "Lists."' in prompt
    assert '"name": "users.list", "parameters"' in prompt


async def test_what_was_called_in_a_namespace_is_taken_back():
    whole, _, _ = await create(calling("files.list"), tools=TOOLS)
    (call,) = whole.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"}
    _, _, prompt = await create("ok", tools=TOOLS, input=[USER, call.model_dump(), result])
    assert '<tool_call>\n{"name": "files.list", "arguments": {"city": "Oslo"}}' in prompt
    control = answering(calling("files.list"))
    async with client_of(app_over(control)) as client:
        first = await client.responses.create(model="toy", input="x", tools=TOOLS)
        await client.responses.create(model="toy", input=[result], tools=TOOLS, previous_response_id=first.id)  # type: ignore[list-item]  # as agents send it
    assert '{"name": "files.list"' in TOKENIZER.decode(control.submits[1].prompt)


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ({"type": "function", "name": "read"}, ["files.read"]),
        ({"type": "function", "name": "list"}, ["list"]),
        ({"type": "function", "name": "list", "namespace": "users"}, ["users.list"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}, SEARCH]},
            ["files.read"],
        ),
        ("required", ["list", "files.list", "files.read", "users.list"]),
    ],
)
async def test_a_choice_names_a_function_with_or_without_its_namespace(choice, offered):
    control = answering(calling(offered[0]))
    async with client_of(app_over(control)) as client:
        await client.responses.create(model="toy", input="x", tools=[*TOOLS, SEARCH], tool_choice=choice)
    grammar = control.submits[0].grammar
    assert grammar is not None
    for name in ("list", "files.list", "files.read", "users.list"):
        assert (f'\\"{name}\\"' in grammar.text) == (name in offered)


HOSTED = [
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
]


@pytest.mark.parametrize("kind", HOSTED)
async def test_tools_that_run_on_a_server_are_left_out(kind):
    hosted = {"type": kind, "server_label": "x", "container": {"type": "auto"}}
    whole, streamed, prompt = await create("ok", tools=[hosted, LIST], include=["web_search_call.action.sources"])
    assert prompt == (await create("ok", tools=[LIST]))[2]
    assert [tool.name for tool in whole.tools] == [tool.name for tool in streamed.tools] == ["list"]
    assert (await create("ok", tools=[hosted]))[2] == (await create("ok"))[2]


@pytest.mark.parametrize("kind", HOSTED)
@pytest.mark.parametrize("how", ["named", "only", "allowed"])
async def test_a_hosted_tool_that_must_be_called_is_refused(kind, how):
    choice: Any = {
        "named": {"type": kind},
        "only": "required",
        "allowed": {"type": "allowed_tools", "mode": "required", "tools": [{"type": kind}]},
    }[how]
    tools = [{"type": kind}] if how == "only" else [{"type": kind}, LIST]
    with pytest.raises(openai.BadRequestError, match="runs on a server") as refused:
        await create("ok", tools=tools, tool_choice=choice)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("custom", "free text; offer a function with one string"),
        ("shell", "runs at the client"),
        ("local_shell", "runs at the client"),
        ("apply_patch", "runs at the client"),
        ("computer_use_preview", "runs at the client"),
        ("unheard_of", "taken: 'function', 'namespace'"),
    ],
)
async def test_tools_that_run_at_the_client_are_refused_in_their_own_words(kind, says):
    tool: Any = {"type": kind, "name": "x"}
    for tools in ([tool], [{"type": "namespace", "name": "n", "tools": [tool]}]):
        with pytest.raises(openai.BadRequestError) as refused:
            await create("ok", tools=tools)
        assert says.replace(", 'namespace'", "") in refused.value.message.replace(", 'namespace'", "")
        assert "run on a server" not in refused.value.message
    with pytest.raises(openai.BadRequestError, match=kind):
        await create("ok", tools=[LIST], tool_choice=tool)


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "computer_20251124", "memory_20250818"])
async def test_messages_refuses_the_client_s_own_tools_in_their_own_words(kind):
    async with anthropic_of(app_over(answering("ok"))) as client:
        with pytest.raises(library().BadRequestError, match="runs at the client"):
            await client.messages.create(
                model="toy", max_tokens=9, messages=[USER], tools=[{"type": kind, "name": "x"}]
            )


async def test_messages_leaves_hosted_tools_out_unless_they_are_forced():
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    own = {"name": "list", "input_schema": CITY}
    control = answering("ok")
    asked: Any = {"model": "toy", "max_tokens": 9, "messages": [USER]}
    async with anthropic_of(app_over(control)) as client:
        await client.messages.create(**asked, tools=[search, own])
        await client.messages.create(**asked, tools=[own])
        assert control.submits[0].prompt == control.submits[1].prompt
        await client.messages.create(**asked, tools=[search, own], tool_choice={"type": "any"})
        for tools, choice in (([search], {"type": "any"}), ([search, own], {"type": "tool", "name": "web_search"})):
            with pytest.raises(library().BadRequestError, match="runs on a server"):
                await client.messages.create(**asked, tools=tools, tool_choice=choice)


@pytest.mark.parametrize(
    ("call", "output", "name", "arguments", "result"),
    [
        (
            {
                "type": "custom_tool_call",
                "call_id": "c",
                "name": "apply_patch",
                "input": "*** Begin",
                "status": "completed",
            },
            {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
            "apply_patch",
            {"input": "*** Begin"},
            "Done",
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "edit", "namespace": "files", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Done"}]},
            "files.edit",
            {"input": "x"},
            "Done",
        ),
        (
            {
                "type": "local_shell_call",
                "id": "l",
                "call_id": "c",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None},
            },
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
            "local_shell",
            {"type": "exec", "command": ["ls"], "env": {}},
            "a.txt",
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
            "local_shell",
            {"type": "exec", "command": ["ls"]},
            "a.txt",
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.txt", "stderr": ""}]},
            "shell",
            {"commands": ["ls"]},
            '[{"stdout": "a.txt", "stderr": ""}]',
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a.txt"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
            "apply_patch",
            {"type": "delete_file", "path": "a.txt"},
            "completed",
        ),
    ],
)
async def test_calls_of_other_kinds_are_taken_back(call, output, name, arguments, result):
    _, _, prompt = await create("ok", input=[USER, call, output, USER])
    function = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    assert f"<tool_call>\n{function}\n</tool_call>" in prompt
    assert f"<tool_response>\n{result}\n</tool_response>" in prompt


async def test_items_that_say_nothing_here_are_left_out():
    plain = (await create("ok", input=[USER, {"role": "assistant", "content": "a"}, USER]))[2]
    search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"}
    told = [USER, thought, search, {"role": "assistant", "content": "a"}, thought, USER]
    assert (await create("ok", input=told))[2] == plain
    with pytest.raises(openai.BadRequestError, match="encrypted for the server"):
        await create("ok", input=[USER, {"type": "compaction", "encrypted_content": "x"}])


async def test_long_arguments_in_a_history_are_prompt_and_not_parameters():
    call = {"type": "function_call", "call_id": "c", "name": "write", "arguments": json.dumps({"text": "sea " * 500})}
    text = {"type": "custom_tool_call", "call_id": "c", "name": "write", "input": "sea " * 500}
    many = [USER, *[call, text] * 20, USER]
    control = answering("ok")
    app = app_over(control, max_body=2**20, max_parameters=1024)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/responses", json={"model": "toy", "input": many})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_there_is_no_route_to_compact_and_one_to_count():
    async with client_of(app_over(answering("ok"))) as client:
        with pytest.raises(openai.NotFoundError, match="not compacted here"):
            await client.post("/responses/compact", cast_to=object, body={"model": "toy", "input": "x"})
        counted = await client.responses.input_tokens.count(model="toy", input="hello", instructions="be brief")
        made = await client.responses.create(model="toy", input="hello", instructions="be brief")
        assert made.usage is not None
        assert counted.input_tokens == made.usage.input_tokens
        more = await client.responses.input_tokens.count(
            model="toy", input="a", previous_response_id=made.id, tools=TOOLS
        )
        assert more.input_tokens > counted.input_tokens

"""Tools as the real `openai` client uses them: told to the model, called, streamed, answered; forced by a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from adapters.chat_template import ChatTemplate
from adapters.grammar import GrammarCompiler
from adapters.tokenizer import Tokenizer
from orchestrator.protocol.commands import Grammar
from tests.api.support import EOS, READY, TOKENIZER, ScriptedControl, app_over, client_of
from tests.support.daemon import Daemon, configuration, running
from tests.support.ready import change_ready

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": CITY | {"additionalProperties": False},
        },
    },
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWICE = f'Let me see.\n{WEATHER}\n<tool_call>{{"name": "add", "arguments": {{"a": 1, "b": true}}}}</tool_call>'


def answering(text: str, each: int = 1, finish: str = "stop") -> ScriptedControl:
    """A control whose model answers with this text, so many bytes a delta."""
    raw = list(text.encode())
    steps = [raw[start : start + each] for start in range(0, len(raw), each)]
    return ScriptedControl(steps=steps, finish=finish, ready=change_ready(READY, context_tokens=4096))


def prompt_of(control: ScriptedControl) -> str:
    return TOKENIZER.decode(control.submits[0].prompt, skip_special=False)


async def read_stream(client: openai.AsyncOpenAI, **body: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """What a client puts together from the chunks: content, calls, finish reason."""
    content, calls, finish = "", list[dict[str, str]](), None
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                if delta.index == len(calls):
                    assert delta.id
                    assert delta.type == "function"
                    calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
                calls[delta.index]["arguments"] += delta.function.arguments or ""
    return content, calls, finish


@pytest.mark.parametrize("each", [1, 5, 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_taken_out_of_the_text(stream, each):
    async with client_of(app_over(answering(TWICE, each))) as client:
        if stream:
            content, calls, finish = await read_stream(client, **CHAT)
        else:
            choice = (await client.chat.completions.create(**CHAT)).choices[0]
            content, finish = choice.message.content, choice.finish_reason
            calls = [
                {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
                for call in choice.message.tool_calls
            ]
    assert (content, finish) == ("Let me see.", "tool_calls")
    assert [call["name"] for call in calls] == ["get_weather", "add"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Oslo"}, {"a": 1, "b": True}]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") for call in calls)


async def test_an_answer_that_is_only_a_call_has_no_content():
    async with client_of(app_over(answering(WEATHER))) as client:
        message = (await client.chat.completions.create(**CHAT)).choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_text_without_a_call_is_an_answer_like_any_other(stream):
    async with client_of(app_over(answering(" 1 < 2 <tool_box> "))) as client:
        if stream:
            assert await read_stream(client, **CHAT) == (" 1 < 2 <tool_box> ", [], "stop")
        else:
            choice = (await client.chat.completions.create(**CHAT)).choices[0]
            assert (choice.message.content, choice.finish_reason) == (" 1 < 2 <tool_box> ", "stop")
            assert choice.message.tool_calls is None


async def test_arguments_are_streamed_as_they_come():
    async with client_of(app_over(answering(WEATHER, each=4))) as client:
        sizes = [
            len(delta.function.arguments or "")
            async for chunk in await client.chat.completions.create(**CHAT, stream=True)
            for choice in chunk.choices
            for delta in choice.delta.tool_calls or []
        ]
    assert len(sizes) > 4
    assert max(sizes) <= 4


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str


async def test_the_client_s_own_helpers_understand_it():
    tool: Any = openai.pydantic_function_tool(Weather, name="get_weather")
    body: Any = {"model": "toy", "messages": CHAT["messages"], "tools": [tool]}
    async with client_of(app_over(answering(WEATHER, each=3))) as client:
        parsed = await client.chat.completions.parse(**body)
        async with client.chat.completions.stream(**body) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
    for completion in (parsed, final):
        (call,) = completion.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="Oslo")
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


async def test_a_call_cut_off_by_the_limit_says_length():
    async with client_of(app_over(answering(WEATHER[:60], finish="length"))) as client:
        choice = (await client.chat.completions.create(**CHAT)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "O'


@pytest.mark.parametrize("each", [1, 1000])
async def test_without_parallel_calls_the_first_ends_the_answer(each):
    control = answering(TWICE, each)
    async with client_of(app_over(control)) as client:
        answer = await client.chat.completions.create(**CHAT, parallel_tool_calls=False)
        choice = answer.choices[0]
        assert answer.usage.completion_tokens == TWICE.index("}}") + 2  # a byte a token, however many at once
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
        assert choice.finish_reason == "tool_calls"
        await control.until_all_ended()
        content, calls, finish = await read_stream(client, **CHAT, parallel_tool_calls=False)
    assert (content, len(calls), finish) == ("Let me see.", 1, "tool_calls")


async def test_choice_none_neither_tells_of_tools_nor_looks_for_calls():
    control = answering(WEATHER)
    async with client_of(app_over(control)) as client:
        choice = (await client.chat.completions.create(**CHAT, tool_choice="none")).choices[0]
    assert (choice.message.content, choice.finish_reason) == (WEATHER, "stop")
    assert "get_weather" not in prompt_of(control)


async def test_a_template_that_knows_no_tools_gets_them_in_the_system_message():
    control = answering("ok")
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
                for name in "ab"
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "sun"}]},
        {"role": "user", "content": "And <|end|> now?"},
    ]
    async with client_of(app_over(control)) as client:
        await client.chat.completions.create(**CHAT | {"messages": messages})
    shown = prompt_of(control)
    system, user, assistant, results, last, _ = shown.split("<|start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n# Tools")
    assert json.dumps({"type": "function", "function": TOOLS[0]["function"]}) in system
    assert '"name": "now", "parameters": {"type": "object", "properties": {}' in system
    assert user == "user\nWeather?<|end|>"
    assert assistant == f"assistant\n{WEATHER}\n{WEATHER}<|end|>"
    assert results == ("user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|end|>")
    assert last.startswith("user\nAnd ")
    assert control.submits[0].prompt.count(256) == 5  # the written <|end|> is text


def test_a_template_that_knows_tools_gets_them_itself():
    source = (
        "{% if tools %}T{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}<tool_call>{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, bos_token="", eos_token="")
    assert template.takes_tools
    assert not ChatTemplate("{{ tools }}", bos_token="", eos_token="").takes_tools  # in a form that we do not read
    shown = template.render([{"role": "user", "content": "x"}], add_generation_prompt=True, tools=[{"a": 1}])
    assert shown == 'T{"a": 1}user:x'


def test_a_tool_cannot_smuggle_a_control_token_in():
    tools = [{"function": {"<|end|>": "<|end|>"}}]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}<tool_call>"
    tokenizer = Tokenizer(TOKENIZER._vocabulary, ChatTemplate(source, bos_token="", eos_token=""))
    ids = tokenizer.encode_chat([{"role": "user", "content": "x"}], tools=tools)
    assert 256 not in ids
    assert tokenizer.decode(ids) == f"x{json.dumps(tools)}<tool_call>"


FORCED: list[tuple[Any, list[str]]] = [
    ("required", ["get_weather", "add", "now"]),
    ({"type": "function", "function": {"name": "add"}}, ["add"]),
]


@pytest.mark.parametrize(("choice", "names"), FORCED)
async def test_a_forced_choice_is_a_grammar(choice, names):
    control = answering(WEATHER)
    async with client_of(app_over(control)) as client:
        await client.chat.completions.create(**CHAT, tool_choice=choice)
        await client.chat.completions.create(**CHAT | {"tools": [TOOLS[0], TOOLS[2]]})
    grammar, free = control.submits[0].grammar, control.submits[1].grammar
    assert grammar is not None
    assert free is None
    for tool in TOOLS:
        name = tool["function"]["name"]
        assert (f'\\"{name}\\"' in grammar.text) == (name in names)


def check_text(grammar: Grammar, text: str) -> tuple[bool, bool]:
    """Whether the text may begin an answer, and whether the answer may end behind it."""
    progress = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocabulary_size).start(grammar)
    for byte in text.encode():
        if not progress.mask()[byte]:
            return False, False
        progress.advance(byte)
    return True, progress.ended or bool(progress.mask()[EOS])


ADDING = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "many", "alone"),
    [
        ("any text, < and <tool_box> \n", (True, True), (True, True)),
        (f"Let me see.\n{ADDING}", (True, True), (True, True)),
        (f"{WEATHER}\n{ADDING} and text", (True, True), (False, False)),
        ("x<tool_call>", (True, False), (True, False)),
        ("x<tool_call>no", (False, False), (False, False)),
        ('<tool_call>\n{"name": "fly"', (False, False), (False, False)),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 10', (False, False), (False, False)),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"town": [1]}', (True, False), (True, False)),
    ],
)
async def test_a_strict_tool_binds_what_begins_as_a_call_and_nothing_else(text, many, alone):
    control = answering("x")
    async with client_of(app_over(control)) as client:
        await client.chat.completions.create(**CHAT)
        await client.chat.completions.create(**CHAT, parallel_tool_calls=False)
    for submit, expected in zip(control.submits, (many, alone), strict=True):
        assert submit.grammar is not None
        assert check_text(submit.grammar, text) == expected


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": "x"}}]}, "tools.0.function.parameters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    (
        {
            "messages": [{"role": "user", "content": "x", "tool_calls": []}, {"role": "tool", "content": "y"}],
            "tool_choice": 5,
        },
        "tool_cho",
    ),
    (
        {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}]},
        "messages.0",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}]}, "messages.0.tool_calls.0"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "nothing"}}}],
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_what_is_wrong_is_named(fields, param):
    control = answering("x")
    async with client_of(app_over(control)) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT | fields)
    assert (refused.value.param or "").startswith(param)
    assert control.submits == []


async def test_completions_take_no_tools():
    async with client_of(app_over(answering("x"))) as client:
        with pytest.raises(openai.BadRequestError, match="tools"):
            await client.completions.create(model="toy", prompt="x", extra_body={"tools": TOOLS})


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    with running(configuration(tmp_path_factory.mktemp("tools"))) as started:
        yield started
        assert started.stop() == 0


CHECKED = {
    "get_weather": lambda given: set(given) == {"city"} and given["city"] in ("Oslo", "Rome"),
    "add": lambda given: set(given) == {"a", "b"} and 0 <= given["a"] <= 9 and isinstance(given["b"], bool),
    "now": lambda given: given == {},
}


@pytest.mark.parametrize(("choice", "names"), FORCED)
@pytest.mark.parametrize("seed", range(4))
def test_a_forced_call_is_made_whatever_the_model_would_rather_say(daemon, choice, names, seed):
    texts = set()
    for config in ({"method": "auto"}, {"method": "off"}):
        whole = daemon.client.chat.completions.create(
            **CHAT,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=300,
            temperature=1.0,
            seed=seed,
            extra_body={"speculative_config": config},
        )
        answer = whole.choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        assert CHECKED[call.function.name](json.loads(call.function.arguments))
        texts.add((call.function.name, call.function.arguments, whole.usage.completion_tokens))
    assert len(texts) == 1  # speculation changes nothing here either


def test_a_strict_tool_changes_no_text(daemon):
    loose = [tool | {"function": {**tool["function"], "strict": False}} for tool in TOOLS]
    texts = {
        daemon.client.chat.completions.create(
            **CHAT | {"tools": tools}, max_tokens=60, temperature=0, extra_body={"speculative_config": config}
        )
        .choices[0]
        .message.content
        for tools in (TOOLS, loose)
        for config in ({"method": "auto"}, {"method": "off"})
    }
    assert len(texts) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_ignore_eos_goes_on_beside_a_strict_tool(daemon, strict):
    tools = [tool | {"function": {**tool["function"], "strict": strict}} for tool in TOOLS]
    at_once: Any = {"logit_bias": {str(EOS): 100}, "temperature": 0, "max_tokens": 30}
    ended = daemon.client.chat.completions.create(**CHAT | {"tools": tools}, **at_once)
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (1, "stop")
    for config in ({"method": "auto"}, {"method": "off"}):
        extra = {"ignore_eos": True, "speculative_config": config}
        answer = daemon.client.chat.completions.create(**CHAT | {"tools": tools}, **at_once, extra_body=extra)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (30, "length")


def test_several_calls_may_be_required(daemon):
    body: Any = CHAT | {"tool_choice": "required", "max_tokens": 1000, "temperature": 1.0}
    counts = []
    for seed in range(6):
        choice = daemon.client.chat.completions.create(**body, seed=seed, n=2).choices[seed % 2]
        counts.append(len(choice.message.tool_calls))
        whole = choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]
        assert all(CHECKED[call.function.name](json.loads(call.function.arguments)) for call in whole)
    assert min(counts) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", range(1, len(WEATHER)))
async def test_max_tokens_within_a_forced_call_leaks_no_tag(stream, end):
    control = answering(WEATHER[:end], finish="length")
    body = CHAT | {"tool_choice": "required", "tools": TOOLS[:1]}
    async with client_of(app_over(control)) as client:
        if stream:
            content, calls, finish = await read_stream(client, **body)
        else:
            choice = (await client.chat.completions.create(**body)).choices[0]
            content, calls, finish = choice.message.content or "", choice.message.tool_calls or [], choice.finish_reason
    assert content == ""
    assert finish == "length"
    assert len(calls) == (end > WEATHER.index('{"city"'))

"""Models of each form behind the API, as the real clients see them: thoughts, calls and forced calls."""

from __future__ import annotations

import json
import random
from typing import Any

import anthropic
import httpx
import openai
import pytest

from adapters.chat_template import ChatTemplate
from adapters.grammar import GrammarCompiler
from adapters.output_form import FORMS
from adapters.tokenizer import Tokenizer
from orchestrator.protocol.commands import Grammar
from tests.api.form_tokenizers import SHOWN, build_form_tokenizer
from tests.api.recorded_outputs import CALL_BEGIN, CALLS_BEGIN, RECORDED, SCHEMAS, SEP, Recorded
from tests.api.support import EOS, READY, TOKENIZER, ScriptedControl, app_over, client_of, serving
from tests.support.ready import change_ready

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}


def answer_with(tokens: list[int], each: int = 1) -> ScriptedControl:
    """A control whose model answers with these tokens, so many a delta."""
    steps = [tokens[start : start + each] for start in range(0, len(tokens), each)]
    return ScriptedControl(steps=steps, finish="stop", ready=change_ready(READY, context_tokens=4096))


def ask_for(recorded: Recorded) -> dict[str, Any]:
    return CHAT | {"extra_body": {"chat_template_kwargs": {"tail": "<think>" if recorded.opened else ""}}}


async def read_stream(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, str, list[list[str]], str | None]:
    """Content, thoughts, calls and the end, as a client puts them together."""
    content, thought, calls, finish = "", "", list[list[str]](), None
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                if delta.id:
                    assert delta.index == len(calls)
                    calls.append([delta.function.name, "", delta.id])
                calls[delta.index][1] += delta.function.arguments or ""
    return content, thought, calls, finish


@pytest.mark.parametrize("each", [1, 7])
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.form)
async def test_a_chat_has_content_thoughts_and_calls_apart(recorded: Recorded, each):
    tokenizer = build_form_tokenizer(recorded.form)
    assert tokenizer.output_form == recorded.form
    control = answer_with(tokenizer.encode(recorded.output, special=True), each)
    async with client_of(app_over(control, tokenizer=tokenizer)) as client:
        content, thought, calls, finish = await read_stream(client, ask_for(recorded))
        choice = (await client.chat.completions.create(**ask_for(recorded))).choices[0]
    assert (content, thought) == (recorded.text, recorded.thought)
    assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == list(recorded.calls)
    assert finish == choice.finish_reason == ("tool_calls" if recorded.calls else "stop")
    assert (choice.message.content or "") == content
    assert getattr(choice.message, "reasoning_content", "") == thought
    whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert whole == [(name, arguments) for name, arguments, _ in calls]
    if recorded.form == "mistral":
        assert all(len(call_id) == 9 for _, _, call_id in calls)


THINKING = [recorded for recorded in RECORDED if recorded.thought and recorded.calls]


@pytest.mark.parametrize("recorded", THINKING, ids=lambda recorded: recorded.form)
async def test_the_other_routes_have_the_same_in_their_own_items(recorded: Recorded):
    tokenizer = build_form_tokenizer(recorded.form)
    control = answer_with(tokenizer.encode(recorded.output, special=True))
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    keywords = ask_for(recorded)["extra_body"]
    async with serving(app_over(control, tokenizer=tokenizer)) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            response = await client.responses.create(model="toy", input="x", tools=flat, extra_body=keywords)
        async with httpx.AsyncClient(base_url=url) as plain:
            named = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
            body = {"model": "toy", "max_tokens": 999, "messages": [{"role": "user", "content": "x"}], "tools": named}
            message = anthropic.types.Message.model_validate(
                (await plain.post("/v1/messages", json=body | keywords)).raise_for_status().json()
            )
    names = [name for name, _ in recorded.calls]
    thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content or []]
    assert ("".join(thoughts), response.output_text) == (recorded.thought, recorded.text)
    assert [item.name for item in response.output if item.type == "function_call"] == names
    blocks = message.content
    assert "".join(block.thinking for block in blocks if block.type == "thinking") == recorded.thought
    assert [(block.name, block.input) for block in blocks if block.type == "tool_use"] == list(recorded.calls)


async def test_a_configured_form_stands_for_what_the_template_shows():
    recorded = next(recorded for recorded in RECORDED if recorded.form == "qwen3_coder" and recorded.calls)
    tokenizer = build_form_tokenizer("hermes")
    tokenizer.configured_form = "qwen3_coder"
    control = answer_with(tokenizer.encode(recorded.output, special=True))
    async with client_of(app_over(control, tokenizer=tokenizer)) as client:
        _, _, calls, _ = await read_stream(client, CHAT)
    assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == list(recorded.calls)


async def test_a_template_s_own_tags_of_thoughts_are_known():
    tokenizer = build_form_tokenizer("qwen3_coder", more="{# <seed:think> #}")
    control = answer_with(list(b"<seed:think>Hm.</seed:think>\nYes"))
    async with client_of(app_over(control, tokenizer=tokenizer)) as client:
        assert await read_stream(client, CHAT) == ("Yes", "Hm.", [], "stop")


async def test_thoughts_stay_in_the_content_where_a_client_asks_for_that():
    tokenizer = build_form_tokenizer("hermes")
    control = answer_with(list(b"<think>\nHm.</think>\n\nYes"))
    async with client_of(app_over(control, tokenizer=tokenizer)) as client:
        plain = await read_stream(client, CHAT | {"extra_body": {"reasoning_format": "none"}})
        apart = await read_stream(client, CHAT)
        stopped = await read_stream(client, CHAT | {"stop": ["</think>"]})
    assert plain == ("<think>\nHm.</think>\n\nYes", "", [], "stop")
    assert apart == ("Yes", "Hm.", [], "stop")
    assert stopped == ("", "Hm.", [], "stop")  # stop strings are looked for in all that the model writes


FORCED = [
    ("hermes", ()), ("llama3_json", ()), ("mistral", ()), ("mistral", ("[ARGS]", "[CALL_ID]")), ("deepseek", ()),
    ("harmony", ()), ("qwen3_coder", ()), ("glm", ()), ("glm", ("</arg_value>",)), ("llama_pythonic", ()),
    ("json_list", ()), ("gemma", ()),
]  # fmt: skip
TEXT_ENDS = [list(end) for end in (b"</arg_value>\n", b"</parameter>\n")]
ENDING = {ord('"'): 20, ord("<"): 20, ord("}"): 20, ord("]"): 5, EOS: 20}


def write_by(grammar: Grammar, tokenizer: Tokenizer, seed: int) -> list[int]:
    """Tokens that a grammar allows, drawn so that they come to an end."""
    progress = GrammarCompiler(lambda: tokenizer, tokenizer.vocabulary_size).start(grammar)
    chance, tokens = random.Random(seed), list[int]()
    while not progress.ended:
        ends = (end for end in TEXT_ENDS if chance.random() < 0.1 and progress.fitting(end) == len(end))
        allowed = [int(token) for token in progress.mask().nonzero()[0]]
        weights = [ENDING.get(token, 20 if token > EOS else 1 if 32 <= token < 127 else 0.01) for token in allowed]
        drawn = next(ends, None) or chance.choices(allowed, weights)
        if drawn == [EOS]:
            break
        for token in drawn:
            progress.advance(token)
        tokens += drawn
        assert len(tokens) < 4000
    return tokens


@pytest.mark.parametrize(("form", "without"), FORCED)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
async def test_forced_calls_are_written_in_the_model_s_form_and_read_again(form, without, choice):
    fenced = "```json" if form == "deepseek" and choice == "required" else ""
    tokenizer = build_form_tokenizer(form, without=without, more=f"{{# {fenced} #}}")
    closed = {"additionalProperties": False}
    schemas = {
        "search": SCHEMAS["search"] | {"required": ["limit"]} | closed,
        "write_file": SCHEMAS["write_file"] | closed,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in schemas]
    body = CHAT | {"tools": tools, "tool_choice": choice}
    control = answer_with([EOS])
    async with client_of(app_over(control, tokenizer=tokenizer)) as client:
        await client.chat.completions.create(**body)
        grammar = control.submits[0].grammar
        assert grammar is not None
        for seed in range(3):
            tokens = write_by(grammar, tokenizer, seed)
            control.steps = [tokens]
            content, _, calls, finish = await read_stream(client, body)
            written = tokenizer.decode(tokens, skip_special=False)
            assert (content, finish) == ("", "tool_calls"), written
            for name, arguments, _ in calls:
                assert name == "search" or choice == "required"
                assert set(json.loads(arguments)) <= set(schemas[name]["properties"]), written
                assert name != "search" or "limit" in json.loads(arguments)
    opening = SHOWN[form].partition("{")[0] if form not in ("llama_pythonic", "gemma") else "<tool_call>"
    start = {"llama3_json": '{"name"', "deepseek": CALL_BEGIN, "harmony": "<|channel|>commentary to=functions."}
    assert start.get(form, opening.split("<function")[0]) in written


@pytest.mark.parametrize("form", ["hermes", "json_list", "mistral", "deepseek", "qwen3_coder", "glm"])
async def test_a_strict_tool_binds_what_begins_as_a_call_in_the_form(form):
    """The recorded answer is one that the grammar allows; a call of a tool that was not offered is none."""
    days: Any = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    strict: Any = {"name": "get_weather", "strict": True, "parameters": days | {"additionalProperties": False}}
    tools = [{"type": "function", "function": strict}, *TOOLS[1:]]
    tokenizer = build_form_tokenizer(form, more="{# ```json #}")
    control = answer_with(list(b"ok"))
    async with client_of(app_over(control, tokenizer=tokenizer)) as client:
        await client.chat.completions.create(**CHAT | {"tools": tools})
    grammar = control.submits[0].grammar
    assert grammar is not None
    progress = GrammarCompiler(lambda: tokenizer, tokenizer.vocabulary_size).start(grammar)
    for text, allowed in STRICT[form].items():
        tokens = tokenizer.encode(text, special=True)
        assert (progress.fitting(tokens) == len(tokens)) == allowed, text


STRICT = {
    "hermes": {'Hm <b>. <tool_call>\n{"name": "get_weather", "arguments": {"days": 2}}\n</tool_call> so': True,
               '<tool_call>\n{"name": "get_weather", "arguments": {"days": "': False},
    "json_list": {'Hm. <TOOLCALL>[{"name": "get_weather", "arguments": {"days": 2}}, {"name": "now", ': True,
                  '<TOOLCALL>[{"name": "get_weather", "arguments": {"days": "': False},
    "mistral": {'Hm.[TOOL_CALLS]get_weather[ARGS]{"days": 2}[TOOL_CALLS]now[ARGS]{} so': True,
                "[TOOL_CALLS]get_weather[ARGS]{\"days\": \"": False},
    "deepseek": {f"Hm.{CALLS_BEGIN}{CALL_BEGIN}function{SEP}get_weather\n```json\n{{\"days\": 2}}\n```": True,
                 f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}fly": False},
    "qwen3_coder": {"<tool_call>\n<function=get_weather>\n<parameter=city>\nÅ\n</parameter>\n<parameter=days>\n2": True,
                    "<tool_call>\n<function=get_weather>\n<parameter=days>\n\"": False},
    "glm": {"Hm.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Å</arg_value>\n<arg_key>days": True,
            "<tool_call>get_weather\n<arg_key>town": False},
}  # fmt: skip


async def test_what_a_form_cannot_be_held_to_is_told():
    strict = [{"type": "function", "function": {"name": "search", "parameters": SCHEMAS["search"], "strict": True}}]
    warnings = {}
    for form in FORMS:
        control = answer_with(list(b"ok"))
        async with client_of(app_over(control, tokenizer=build_form_tokenizer(form))) as client:
            answer = await client.chat.completions.create(**CHAT | {"tools": strict})
        warnings[form] = getattr(answer, "warnings", [])
        assert bool(warnings[form]) == (control.submits[0].grammar is None)
    assert {form for form, texts in warnings.items() if texts} == {"llama3_json", "llama_pythonic", "gemma", "harmony"}
    assert "tool 'search': 'strict' is not kept" in warnings["harmony"][0]


EFFORTS = [
    ("Reasoning: {{ reasoning_effort }}<|channel|><|message|>", "xhigh", "Reasoning: high"),
    ("Reasoning: {{ reasoning_effort }}<|channel|><|message|>", "none", "Reasoning: low"),
    ("Reasoning: {{ reasoning_effort }}", "xhigh", "Reasoning: xhigh"),
    ("{% if enable_thinking %}on{% else %}off{% endif %}", "high", "on"),
    ("{% if enable_thinking %}on{% else %}off{% endif %}", "none", "off"),
    ("{% if thinking is defined and thinking %}on{% else %}off{% endif %}", "low", "on"),
    ("{% if thinking is defined and thinking %}on{% else %}off{% endif %}", "none", "off"),
    ("{% set m = {} %}{{ m.thinking is defined }} {{ thinking }}", "high", "False "),
]


@pytest.mark.parametrize(("source", "effort", "shown"), EFFORTS)
def test_an_effort_is_told_in_the_template_s_own_words(source, effort, shown):
    template = ChatTemplate(source, bos_token="", eos_token="")
    keywords = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    assert template.render([], add_generation_prompt=True, keywords=keywords).startswith(shown)


def test_what_a_request_tells_the_template_itself_stands():
    template = ChatTemplate("{{ enable_thinking }} {{ reasoning_effort }}", bos_token="", eos_token="")
    keywords = {"reasoning_effort": "high", "enable_thinking": False}
    assert template.render([], add_generation_prompt=True, keywords=keywords) == "False high"


OWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}{# [TOOL_CALLS] {{ tools }} #}"


async def test_a_chat_brings_its_own_template_where_the_operator_allows_it():
    control = answer_with(list(b"[TOOL_CALLS]now{}"))
    body = CHAT | {"extra_body": {"chat_template": OWN}}
    async with client_of(app_over(control, allow_chat_templates=True)) as client:
        _, _, calls, _ = await read_stream(client, body)
        broken = CHAT | {"extra_body": {"chat_template": "{% for %}"}}
        with pytest.raises(openai.BadRequestError, match="chat template"):
            await client.chat.completions.create(**broken)
        escape = CHAT | {"extra_body": {"chat_template": "{{ ''.__class__.__mro__ }}"}}
        with pytest.raises(openai.BadRequestError, match="unsafe"):
            await client.chat.completions.create(**escape)
    assert TOKENIZER.decode(control.submits[0].prompt) == "[x]"
    assert [name for name, _, _ in calls] == ["now"]
    async with client_of(app_over(control)) as client:
        with pytest.raises(openai.BadRequestError, match=r"api\.allow_chat_templates") as refused:
            await client.chat.completions.create(**body)
    assert refused.value.param == "chat_template"

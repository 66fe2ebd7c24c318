"""Answers as models of each form write them, after the public descriptions of the forms, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adapters.output_form import write_deepseek_control

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "search": {"type": "object", "properties": {"filters": {"type": "object"}, "limit": {"type": "number"}}},
    "now": {"type": "object", "properties": {}},
}


class Recorded(NamedTuple):
    """An output in a form, and its text, its thoughts and its calls."""

    form: str
    output: str
    text: str
    thought: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    opened: bool = False  # the prompt has opened a thought


OSLO = ("get_weather", {"city": "Tromsø 🌧", "days": 2})
NESTED = ("search", {"filters": {"a": [1, {"b": '}"]'}]}, "limit": 0.5})
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = map(
    write_deepseek_control, ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")
)
OSLO_JSON = '{"city": "Tromsø 🌧", "days": 2}'
NESTED_JSON = '{"filters": {"a": [1, {"b": "}\\"]"}]}, "limit": 0.5}'
CODE = "if a < b and c > d:\n    print('</function>')\n"

RECORDED = [
    Recorded(
        "hermes",
        f'<think>\nÜber {{"x"}}?\n</think>\n\nI look.\n<tool_call>\n'
        f'{{"name": "get_weather", "arguments": {OSLO_JSON}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "search", "arguments": {NESTED_JSON}}}\n</tool_call>',
        "I look.",
        'Über {"x"}?',
        [OSLO, NESTED],
    ),
    Recorded("hermes", "I see.\n</think>\n\nIt <is> fine: a </think> b", "It <is> fine: a </think> b", "I see.",
             opened=True),
    Recorded("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call> <tool_call', (
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call> <tool_call')),
    Recorded("llama3_json", f'{{"name": "get_weather", "parameters": {OSLO_JSON}}}', "", "", [OSLO]),
    Recorded(
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {OSLO_JSON}}}; '
        f'{{"name": "search", "parameters": {NESTED_JSON}}}',
        "", "", [OSLO, NESTED],
    ),
    Recorded("llama3_json", '{"answer": {"name": "now"}} is JSON', '{"answer": {"name": "now"}} is JSON'),
    Recorded("llama3_json", 'So: {"name": "now", "parameters": {}}', 'So: {"name": "now", "parameters": {}}'),
    Recorded(
        "llama_pythonic",
        "[get_weather(city='Tromsø 🌧', days=2), search(filters={'a': [1, {'b': '}\"]'}]}, limit=0.5), now()]",
        "", "", [OSLO, NESTED, ("now", {})],
    ),
    Recorded(
        "llama_pythonic",
        '<|python_start|>[get_weather(city="a, b)", units=null, days=-1)]<|python_end|>',
        "", "", [("get_weather", {"city": "a, b)", "units": None, "days": -1})],
    ),
    Recorded("llama_pythonic", "[1, 2] and [get_weather(x)]", "[1, 2] and [get_weather(x)]"),
    Recorded("llama_pythonic", "[get_weather(city=open('x'))] no", "[get_weather(city=open('x'))] no"),
    Recorded(
        "llama_pythonic",
        "<think>Hm.</think>Ok<|tool_call_start|>[get_weather(city='Tromsø 🌧', days=2), now()]<|tool_call_end|>So",
        "OkSo", "Hm.", [OSLO, ("now", {})],
    ),
    Recorded(
        "json_list",
        f'<think>Hm.</think>Ok\n<TOOLCALL>[{{"name": "get_weather", "arguments": {OSLO_JSON}}}, '
        f'{{"name": "search", "arguments": {NESTED_JSON}}}]</TOOLCALL>',
        "Ok", "Hm.", [OSLO, NESTED],
    ),
    Recorded("json_list", f'<|tool_call|> [{{"arguments": {OSLO_JSON}, "name": "get_weather"}}]', "", "", [OSLO]),
    Recorded("json_list", '<tool_calls>[1, {"a": 2}] <TOOL', '<tool_calls>[1, {"a": 2}] <TOOL'),
    Recorded(
        "mistral",
        f'Moment…[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO_JSON}}}, '
        f'{{"name": "search", "arguments": {NESTED_JSON}}}]',
        "Moment…", "", [OSLO, NESTED],
    ),
    Recorded(
        "mistral",
        f"[THINK]Hm, [x]?[/THINK]Ja.[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{OSLO_JSON}[TOOL_CALLS]search[ARGS]"
        f"{NESTED_JSON}[TOOL_CALLS]now{{}}",
        "Ja.", "Hm, [x]?", [OSLO, NESTED, ("now", {})],
    ),
    Recorded("mistral", "[TOOL_CALLS] is [TOOL_CALLS]what? {}", "[TOOL_CALLS] is [TOOL_CALLS]what? {}"),
    Recorded(
        "qwen3_coder",
        "I write.\n<tool_call>\n<function=write_file>\n<parameter=path>\n/tmp/é.py\n</parameter>\n<parameter=text>\n"
        f"{CODE}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n<parameter=filters>\n"
        '{"a": [1, {"b": "}\\"]"}]}\n</parameter>\n<parameter=limit>\n0.5\n</parameter>\n</function>\n</tool_call>\nok',
        "I write.ok", "", [("write_file", {"path": "/tmp/é.py", "text": CODE}), NESTED],  # noqa: S108
    ),
    Recorded("qwen3_coder", "<tool_call>\n<function=now>\n</function>", "", "", [("now", {})]),
    Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=write_file>\n<parameter=path> x </parameter> oops</function> <function=",
        "<tool_call>\n<function=write_file>\n<parameter=path> x </parameter> oops</function> <function=",
    ),
    Recorded(
        "glm",
        "<think>Hm 雨.</think>\nOk\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Tromsø 🌧</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>search<arg_key>filters</arg_key>"
        '<arg_value>{"a": [1, {"b": "}\\"]"}]}</arg_value><arg_key>limit</arg_key><arg_value>0.5</arg_value>'
        "</tool_call><tool_call>now</tool_call>",
        "Ok", "Hm 雨.", [OSLO, NESTED, ("now", {})],
    ),
    Recorded("glm", "<tool_call>get_weather is <b>one</b>", "<tool_call>get_weather is <b>one</b>"),
    Recorded(
        "gemma",
        "<|channel>thought\nHm <|x.\n<channel|>"
        'Ok<|tool_call>call:get_weather{city:<|"|>Tromsø 🌧<|"|>,days:2}<tool_call|>'
        '<|tool_call>call:search{filters:{<|"|>a<|"|>:[1,{b:<|"|>}"]<|"|>}]},limit:0.5}<tool_call|><|tool_call>call:now{}',
        "Ok", "Hm <|x.", [OSLO, NESTED, ("now", {})],
    ),
    Recorded("gemma", "<|tool_call>call:now {a: b c} <|tool_call>", "<|tool_call>call:now {a: b c} <|tool_call>"),
    Recorded("gemma", '<|tool_call>call:now{"a": 1}', '<|tool_call>call:now{"a": 1}'),
    Recorded(
        "deepseek",
        f"Gut.</think>Da.{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEP}{OSLO_JSON}{CALL_END}{CALL_BEGIN}search{SEP}"
        f"{NESTED_JSON}{CALL_END}{CALLS_END}",
        "Da.", "Gut.", [OSLO, NESTED], opened=True,
    ),
    Recorded(
        "deepseek",
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}get_weather\n```json\n{OSLO_JSON}\n```{CALL_END}\n{CALL_BEGIN}function"
        f"{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        "", "", [OSLO, ("now", {})],
    ),
    Recorded("deepseek", f"a {CALL_BEGIN}function{SEP}now b", f"a {CALL_BEGIN}function{SEP}now b"),
    Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Need 天気.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{OSLO_JSON}<|call|>",
        "I look.", "Need 天気.", [OSLO],
    ),
    Recorded(
        "harmony",
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant to=functions.search<|channel|>commentary json"
        f"<|message|>{NESTED_JSON} \n<|end|><|start|>assistant to=now<|channel|>commentary<|message|><|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done <|x|> é<|return|>",
        "Done <|x|> é", "a < b", [NESTED, ("now", {})],
    ),
    Recorded(
        "harmony",
        "<|channel|>analysis to=browser.open<|message|>{}<|end|>So",
        "<|channel|>analysis to=browser.open<|message|>{}So",
    ),
    Recorded("harmony", "to be or not", "to be or not"),
]  # fmt: skip


class TemplateOutput(NamedTuple):
    """An output as the makers' own chat templates write an assistant's message into a history. `templates`: by their
    names in llama.cpp's models/templates, rendered with one thought, one text and these calls."""

    templates: Sequence[str]
    recorded: Recorded


def _load_template_outputs() -> list[TemplateOutput]:
    rows = json.loads(Path(__file__).with_name("template_outputs.json").read_text(encoding="utf-8"))
    return [
        TemplateOutput(
            row["templates"], Recorded(**{**row["output"], "calls": list(map(tuple, row["output"]["calls"]))})
        )
        for row in rows
    ]


TEMPLATE_OUTPUTS = _load_template_outputs()

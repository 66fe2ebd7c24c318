"""The grammar of answers with tool calls, in Hermes' form: exact JSON, as the schemas want it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.daemon.api.conversation import Tool
from orchestrator.daemon.api.tools.syntaxes import CLOSE, OPEN

# As Python's json.dumps writes it, which is what models are trained on; it also cannot go on for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
ANSWER_RULE = "answer"
"""The rule of an answer that is no call."""

Schema = dict[str, Any]


def build_forced_calls_grammar(tools: Sequence[Tool], schemas: Mapping[str, Schema], *, many: bool) -> str:
    """Return a Lark grammar of one call of one of the tools; with `many` of one or more, a line apart. Arguments keep
    to `schemas`, by the tools' names."""
    start = "start: call" + (' ("\\n" call)*' if many else "")
    return "\n".join([start, f'call: "{OPEN}\\n" body', *_bodies(tools, schemas)])


def free_calls(tools: Sequence[Tool], schemas: Mapping[str, Schema], *, many: bool) -> str:
    """Return a Lark grammar of text in which whatever begins as a call is one; without `many` the answer ends behind
    it. Arguments of tools that have one of the `schemas` follow it, those of others are any object."""
    start = "start: call* TEXT" if many else "start: call | TEXT"
    # Lazy: the first opening tag is one, and no text.
    rules = ["TEXT: /(.|\\n)*/", f'before[lazy]: TEXT "{OPEN}"', 'call: before "\\n" body']
    return "\n".join([start, *rules, *_bodies(tools, schemas)])


def build_calls_or_json_grammar(
    tools: Sequence[Tool], schemas: Mapping[str, Schema], schema: Schema, *, many: bool
) -> str:
    """Return a Lark grammar of an answer that is either calls or JSON of this schema. Arguments are as in
    `free_calls`."""
    calls = 'call ("\\n" call)*' if many else "call"
    answer = json.dumps(schema | {"x-guidance": _STYLE})
    rules = [f"start: {calls} | {ANSWER_RULE}", f"{ANSWER_RULE}: %json {answer}", f'call: "{OPEN}\\n" body']
    return "\n".join([*rules, *_bodies(tools, schemas)])


def name_tool(text: str, rule: str) -> str:
    """Return the tool whose arguments are this rule of a grammar of ours; "" where it is another rule."""
    index = rule.removeprefix("arguments_")
    head = re.search(rf"^call_{re.escape(index)}: (\".*\") {re.escape(rule)} ", text, re.MULTILINE)
    return "" if head is None else str(json.loads(json.loads(head[1]) + "{}}")["name"])


def _bodies(tools: Sequence[Tool], schemas: Mapping[str, Schema]) -> list[str]:
    """Return the rules of what stands between the opening tag's line and the end of the closing tag."""
    rules = [f'body: ({" | ".join(f"call_{index}" for index in range(len(tools)))}) "\\n{CLOSE}"']
    for index, tool in enumerate(tools):
        function = tool.function
        head = json.dumps(f'{{"name": "{function.name}", "arguments": ')
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
        schema = schemas.get(function.name, _ANY_OBJECT) | {"x-guidance": _STYLE}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return rules

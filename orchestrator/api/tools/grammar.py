"""The grammar of answers with tool calls, in Hermes' form: exact JSON, as the schemas want it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from orchestrator.api.tools.calls import CLOSE, OPEN
from orchestrator.api.tools.wire import Tool

# As Python's json.dumps writes it, which is what models are trained on; it also cannot go on for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}
ANSWER_RULE = "answer"
"""The rule of an answer that is no call."""


def build_forced_calls_grammar(tools: Sequence[Tool], *, many: bool) -> str:
    """Return a Lark grammar of one call of one of the tools; with `many` of one or more, a line apart."""
    start = "start: call" + (' ("\\n" call)*' if many else "")
    return "\n".join([start, f'call: "{OPEN}\\n" body', *_bodies(tools, {tool.function.name for tool in tools})])


def free_calls(tools: Sequence[Tool], *, many: bool) -> str:
    """Return a Lark grammar of text in which whatever begins as a call is one; without `many` the answer ends behind
    it. Arguments of tools that are `strict` follow their schemas, those of others are any object."""
    start = "start: call* TEXT" if many else "start: call | TEXT"
    strict = {tool.function.name for tool in tools if tool.function.strict}
    # Lazy: the first opening tag is one, and no text.
    rules = ["TEXT: /(.|\\n)*/", f'before[lazy]: TEXT "{OPEN}"', 'call: before "\\n" body']
    return "\n".join([start, *rules, *_bodies(tools, strict)])


def build_calls_or_json_grammar(tools: Sequence[Tool], schema: str, *, many: bool) -> str:
    """Return a Lark grammar of an answer that is either calls or JSON of this schema, given as text. Arguments are as
    in `free_calls`."""
    calls = 'call ("\\n" call)*' if many else "call"
    strict = {tool.function.name for tool in tools if tool.function.strict}
    answer = json.dumps(json.loads(schema) | {"x-guidance": _STYLE})
    rules = [f"start: {calls} | {ANSWER_RULE}", f"{ANSWER_RULE}: %json {answer}", f'call: "{OPEN}\\n" body']
    return "\n".join([*rules, *_bodies(tools, strict)])


def name_tool(text: str, rule: str) -> str:
    """Return the tool whose arguments are this rule of a grammar of ours; "" where it is another rule."""
    index = rule.removeprefix("arguments_")
    head = re.search(rf"^call_{re.escape(index)}: (\".*\") {re.escape(rule)} ", text, re.MULTILINE)
    return "" if head is None else str(json.loads(json.loads(head[1]) + "{}}")["name"])


def _bodies(tools: Sequence[Tool], strict: set[str]) -> list[str]:
    """Return the rules of what stands between the opening tag's line and the end of the closing tag."""
    rules = [f'body: ({" | ".join(f"call_{index}" for index in range(len(tools)))}) "\\n{CLOSE}"']
    for index, tool in enumerate(tools):
        function = tool.function
        head = json.dumps(f'{{"name": "{function.name}", "arguments": ')
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
        schema = (function.schema_of_arguments if function.name in strict else _ANY_OBJECT) | {"x-guidance": _STYLE}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return rules

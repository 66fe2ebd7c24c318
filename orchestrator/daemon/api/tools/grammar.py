"""The grammar of answers with tool calls, in the model's own form: arguments as the schemas want them.

A form whose calls no grammar can describe has none here: Llama's Python calls, and tagged arguments that are neither
plain text nor JSON. Its calls are forced in Hermes' form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from adapters.output_form import LISTS
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.conversation import Tool
from orchestrator.daemon.api.tools.harmony import CHANNEL, CONSTRAIN, MESSAGE
from orchestrator.daemon.api.tools.syntaxes import CLOSE, DEEPSEEK_CONTROLS, OPEN

# As Python's json.dumps writes it, which is what models are trained on; it also cannot go on for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
ANSWER_RULE = "answer"
_PLAIN_KEYS: Final = frozenset({"type", "title", "description", "default", "examples", "deprecated"})
"""Keys beside which a text may be any."""
_OBJECT_KEYS: Final = _PLAIN_KEYS | {"properties", "required", "additionalProperties", "$schema"}

Schema = dict[str, Any]


class Tags(NamedTuple):
    """How an argument is written: around its key, and `end` behind a text, or up to a `gap` before it another value."""

    before: str
    behind_key: str
    end: str
    gap: str = ""


@dataclass(frozen=True, slots=True)
class CallWriter:
    """How a grammar writes calls. `opener`: what begins them, and nothing else in an answer; "" where text may begin so
    too. `head`: from there to the arguments of a function of this name; `tail`: behind them. `inner`: between two calls
    behind one opener, and `closing` behind the last; with None each has its own opener, with `outer` between them.
    `tags`: of arguments that are no JSON."""

    opener: str
    head: Callable[[str], str]
    tail: str
    opening: str = ""
    inner: str | None = None
    closing: str = ""
    outer: str = "\n"
    tags: Tags | None = None


_BEGIN, _CALL, _SEPARATOR, _CALL_END, _END = DEEPSEEK_CONTROLS
_HERMES = CallWriter(OPEN, lambda name: f'\n{{"name": "{name}", "arguments": ', f"}}\n{CLOSE}")
_WRITERS: Final[Mapping[str, CallWriter]] = {
    "hermes": _HERMES,
    "llama3_json": CallWriter("", lambda name: f'{{"name": "{name}", "parameters": ', "}", inner="; "),
    "mistral": CallWriter(
        "[TOOL_CALLS]", lambda name: f'{{"name": "{name}", "arguments": ', "}", opening="[", inner=", ", closing="]"
    ),
    "mistral named": CallWriter("[TOOL_CALLS]", lambda name: f"{name}[ARGS]", "", outer=""),
    "deepseek": CallWriter(_BEGIN, lambda name: f"{_CALL}{name}{_SEPARATOR}", _CALL_END, inner="", closing=_END),
    "deepseek fenced": CallWriter(
        _BEGIN,
        lambda name: f"{_CALL}function{_SEPARATOR}{name}\n```json\n",
        f"\n```{_CALL_END}",
        inner="\n",
        closing=_END,
    ),
    # Behind a call the model ends its answer: there is never a second one.
    "harmony": CallWriter(
        "", lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}", "", outer=""
    ),
    "qwen3_coder": CallWriter(
        OPEN,
        lambda name: f"\n<function={name}>\n",
        f"</function>\n{CLOSE}",
        tags=Tags("<parameter=", ">\n", "</parameter>\n", gap="\n"),
    ),
    "glm": CallWriter(
        OPEN, lambda name: f"{name}\n", CLOSE, tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    ),
}


def choose_writer(form: str, tokenizer: Tokenizer) -> CallWriter | None:
    if form == "mistral" and tokenizer.find_control("[ARGS]") is not None:
        return _WRITERS["mistral named"]
    if form == "deepseek" and tokenizer.template_shows("```json"):
        return _WRITERS["deepseek fenced"]
    if form == "json_list":
        shown = (pair for pair in LISTS.items() if tokenizer.template_shows(pair[0]))
        opener, closer = next(shown, next(iter(LISTS.items())))
        return replace(_WRITERS["mistral"], opener=opener, closing=f"]{closer}")
    return _WRITERS.get(form)


def can_write(writer: CallWriter | None, schemas: Sequence[Schema]) -> bool:
    """Whether a grammar can say how calls with arguments of these schemas are written."""
    return writer is not None and (writer.tags is None or all(map(_is_taggable, schemas)))


def _is_taggable(schema: Schema) -> bool:
    """Whether all values are any text, or JSON that can be told alone."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.keys() - _OBJECT_KEYS or not isinstance(properties, dict) or not isinstance(required, list):
        return False
    named = all(isinstance(key, str) and key in properties for key in required)
    return (
        named
        and isinstance(schema.get("additionalProperties", False), bool)
        and all(
            isinstance(value, dict) and not set("<>\n") & set(key) and (_is_any_text(value) or _is_json(value))
            for key, value in properties.items()
        )
    )


def _is_any_text(schema: Schema) -> bool:
    return schema.get("type") == "string" and not schema.keys() - _PLAIN_KEYS


def _is_json(schema: Schema) -> bool:
    """Whether no value of a schema can be a text, which would be written without its quotes."""
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds
    return isinstance(named, list) and "string" not in named and '"$ref"' not in json.dumps(schema)


class GrammarText:
    """Writes one grammar. `tokenizer`: says which marks are control tokens, which stand for themselves in a grammar."""

    def __init__(
        self, writer: CallWriter, tools: Sequence[Tool], schemas: Mapping[str, Schema], tokenizer: Tokenizer
    ) -> None:
        self._writer, self._tools, self._schemas = writer, tools, schemas
        marks = {mark: tokenizer.find_control(mark) for mark in _list_marks(writer)}
        self._controls = {mark: index for mark, index in marks.items() if index is not None}

    def write_forced(self, *, many: bool) -> str:
        """Return a Lark grammar of one call of one of the tools, or of `many`. Arguments keep to the schemas."""
        return "\n".join([f"start: {self._sections(many=many)}", *self._rules(many=many)])

    def write_free(self, *, many: bool) -> str | None:
        """Return a Lark grammar of text in which whatever begins as a call is one; without `many` the answer ends
        behind it. Arguments of tools that have one of the schemas follow it, those of others are any object. None where
        text may begin like a call."""
        opener = self._writer.opener
        if not opener:
            return None
        start = "start: opened* TEXT" if many else "start: opened | TEXT"
        # Lazy: the first opening tag is one, and no text.
        before = self._until("before", opener)
        return "\n".join([start, before, f"opened: before {self._section(many=many)}", *self._rules(many=many)])

    def write_calls_or_json(self, schema: Schema, *, many: bool) -> str:
        """Return a Lark grammar of either calls or JSON of this schema. Arguments are as in `write_free`."""
        answer = json.dumps(schema | {"x-guidance": _STYLE})
        rules = [f"start: {self._sections(many=many)} | {ANSWER_RULE}", f"{ANSWER_RULE}: %json {answer}"]
        return "\n".join([*rules, *self._rules(many=many)])

    def _sections(self, *, many: bool) -> str:
        again = many and self._writer.inner is None and self._writer is not _WRITERS["harmony"]
        return "section" + (f" ({self._literal(self._writer.outer)} section)*" if again else "")

    def _section(self, *, many: bool) -> str:
        writer = self._writer
        further = f"({self._literal(writer.inner)} call)*" if many and writer.inner is not None else ""
        parts = (self._literal(writer.opening), "call", further, self._literal(writer.closing))
        return " ".join(part for part in parts if part)

    def _rules(self, *, many: bool) -> Iterator[str]:
        """Yield the rules of calls, with a remark of each tool's name."""
        calls = " | ".join(f"call_{index}" for index in range(len(self._tools)))
        yield "TEXT: /(.|\\n)*/"
        yield f"section: {self._literal(self._writer.opener)} {self._section(many=many)}"
        yield f"call: {calls}"
        for index, tool in enumerate(self._tools):
            name = tool.function.name
            yield f"// {index} {name}"
            head, tail = self._literal(self._writer.head(name)), self._literal(self._writer.tail)
            yield f"call_{index}: {head} arguments_{index} {tail}"
            schema = self._schemas.get(name, _ANY_OBJECT)
            if self._writer.tags is None:
                yield f"arguments_{index}: %json {json.dumps(schema | {'x-guidance': _STYLE})}"
            else:
                own = self._schemas.get(name) or _keep_types(tool.function.schema_of_arguments)
                yield from self._write_tags(index, own, self._writer.tags)

    def _write_tags(self, index: int, schema: Schema, tags: Tags) -> Iterator[str]:
        required, names = schema.get("required", []), []
        for number, (key, value) in enumerate(schema.get("properties", {}).items()):
            rule = f"value_{index}_{number}"
            names.append(f"tag_{index}_{number}" + ("" if key in required else "?"))
            if _is_any_text(value):
                yield self._until(rule, tags.end)
                end = ""
            else:
                yield f"{rule}: %json {json.dumps(value | {'x-guidance': _STYLE})}"
                end = self._literal(tags.gap + tags.end)
            yield f"tag_{index}_{number}: {self._literal(f'{tags.before}{key}{tags.behind_key}')} {rule} {end}"
        yield f"arguments_{index}: {' '.join(names)}" if names else f'arguments_{index}: ""'

    def _until(self, rule: str, end: str) -> str:
        first = min((end.find(mark) for mark in self._controls if mark in end), default=-1)
        if first < 0:
            return f"{rule}[lazy]: TEXT {self._literal(end)}"
        return f"{rule}: TEXT {self._literal(end[first:])}"

    def _literal(self, text: str) -> str:
        """Return a text as a grammar has it, and its control tokens by their ids."""
        if not self._controls:
            return json.dumps(text, ensure_ascii=False) if text else ""
        parts = re.split(f"({'|'.join(map(re.escape, self._controls))})", text)
        return " ".join(
            f"<[{self._controls[part]}]>" if part in self._controls else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def _keep_types(schema: Schema) -> Schema:
    """Return the schema of a tool whose arguments are not bound: what may be there, and of which type."""
    properties = schema.get("properties", {})
    return {"properties": {key: {"type": value["type"]} for key, value in properties.items()}}


def _list_marks(writer: CallWriter) -> list[str]:
    tags = () if writer.tags is None else writer.tags
    text = "".join((writer.opener, writer.opening, writer.head(""), writer.tail, writer.closing, *tags))
    return [*dict.fromkeys([*re.findall(r"<[^<>]+>|\[[A-Z_]+\]", text)])]


def name_tool(text: str, rule: str) -> str:
    """Return the tool whose arguments are this rule of a grammar of ours, or belong to it; "" where it is another."""
    index = re.match(r"(?:arguments|value)_(\d+)", rule)
    head = index and re.search(rf"^// {index[1]} (\S+)$", text, re.MULTILINE)
    return "" if head is None else head[1]

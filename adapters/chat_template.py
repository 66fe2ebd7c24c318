"""Chat templates: the Jinja text that a model file carries, rendered in a sandbox.

A template renders message texts and control tokens into one string. A message must not smuggle in a control token. So
`guard_messages` marks text that looks like one inside messages before rendering. The tokenizer splits the rendered text
at the template's own control tokens. It encodes the rest, marks removed, as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from adapters.contract import AdapterError

# Unicode noncharacters: reserved for a program's own use, so they are not white space and no text needs them.
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

Message = Mapping[str, Any]


class TemplateError(AdapterError):
    """The chat template refused the messages (its own words are the message), or is itself broken."""


class _Raised(Exception):
    """What a template said through raise_exception."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A chat template. It is compiled at first use, so a broken one does not stop plain completions."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of tools, and of calls as `<tool_call>{...}</tool_call>` (Hermes'
        form, which Qwen and others are trained on)."""
        return re.search(r"\btools\b", self._source) is not None and "<tool_call>" in self._source

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Message] | None = None
    ) -> str:
        """Return the text that the model is given. Raises TemplateError."""
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                **self._tokens,
            )
        except _Raised as refusal:
            raise TemplateError(str(refusal)) from None
        except Exception as error:  # the template is a program from outside: it can fail in every way
            raise TemplateError(f"the model's chat template failed: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # No strftime_now, on purpose: templates that know it then leave the date out or use a fixed one, and
        # the same messages give the same tokens tomorrow.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _tojson
        return environment.from_string(self._source)


def guard_messages(messages: Sequence[Message], controls: re.Pattern[str]) -> tuple[list[Message], str]:
    """Return the messages (or tools) with a guard character between the letters of every control token, and the guard.

    The guard occurs nowhere in the messages, so removing it from the rendered text restores what was written.
    Raises TemplateError when every possible guard occurs.
    """
    taken = set(_all_text(messages))
    guard = next((mark for mark in _GUARDS if mark not in taken), None)
    if guard is None:
        raise TemplateError("the messages use every Unicode noncharacter from U+FDD0 to U+FDEF; remove one")
    mark = guard
    return [_map_strings(message, lambda text: _guard(text, controls, mark)) for message in messages], guard


def _guard(text: str, controls: re.Pattern[str], guard: str) -> str:
    return controls.sub(lambda found: guard.join(found[0]), text)


def _map_strings(value: Any, change: Any) -> Any:
    """Return nested messages with every string changed, keys too: those of a tool's parameters are its caller's."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _all_text(messages: Sequence[Message]) -> str:
    found: list[str] = []
    _map_strings(list(messages), found.append)
    return "".join(found)


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would put \u003c where the model expects "<".
    return json.dumps(value, ensure_ascii=False, indent=indent)

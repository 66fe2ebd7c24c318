"""Chat templates: the Jinja text that a model file carries, rendered in a sandbox.

A template renders message texts and control tokens into one string. A message must not smuggle in a control token. So
`guard_messages` marks text that looks like one inside messages before rendering. The tokenizer splits the rendered text
at the template's own control tokens. It encodes the rest, marks removed, as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from adapters.contract import AdapterError
from adapters.output_form import OutputForm, find_output_form, mentions_tools, translate_effort

# Unicode noncharacters: reserved for a program's own use, so they are not white space and no text needs them.
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_ESCAPED_GUARD = re.compile(r"\\\\|\\u(fd[de][0-9a-f])")
_FAILED = "the model's chat template "
_SYSTEM, _USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}

Message = Mapping[str, Any]


class TemplateError(AdapterError):
    """The chat template refused the messages (its own words are the message), or is itself broken."""


class TemplateEnded(TemplateError):
    """The chat template was ended before it was done; it may do better another time."""


class _Raised(Exception):
    """What a template said through raise_exception."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content. As in transformers it
    is a call block: what is set within is not known behind it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_say"), [], [], body).set_lineno(line)

    @staticmethod
    def _say(caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore: they lead into Python, and transformers refuses them."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _refuse_underscore(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class ChatTemplate:
    """A chat template. It is compiled at first use, so a broken one does not stop plain completions."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    @cached_property
    def output_form(self) -> OutputForm | None:
        """The form of answers that the template shows; None where it shows none that is known."""
        return find_output_form(self.source)

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of tools itself, and shows a form of calls that is known."""
        return mentions_tools(self.source) and self.output_form is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Message] | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that the model is given. `keywords`: variables that the template may know; they change none
        of the others. Raises TemplateError."""
        own = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            **self._tokens,
        }
        words = translate_effort(self.source, dict(keywords or {}), harmony=self.output_form == "harmony")
        try:
            return self._compiled.render({"documents": None, **words, **own})
        except _Raised as refusal:
            raise TemplateError(str(refusal)) from None
        except Exception as error:  # the template is a program from outside: it can fail in every way
            raise TemplateError(f"{_FAILED}failed: {str(error) or type(error).__name__}") from error

    def find_fault(self) -> str:
        """Return why the template is of no use for a plain chat, in its own words where it refuses; "" where it is.
        One that refuses the role `system` is not at fault. Raises TemplateEnded where it is not found out."""
        for messages in ([_USER], [_SYSTEM, _USER]):
            try:
                self.render(messages, add_generation_prompt=True)
            except TemplateEnded:
                raise
            except TemplateError as error:
                if messages == [_USER] or is_failure(error):
                    return str(error)
        return ""

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
        }
        environment.filters["tojson"] = _tojson
        return environment.from_string(self.source)


def is_failure(error: Exception) -> bool:
    """Whether a template was at fault that did not render, and did not refuse in words of its own."""
    return str(error).startswith(_FAILED)


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
    return controls.sub(lambda match: guard.join(match[0]), text)


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
    strings: list[str] = []
    _map_strings(list(messages), strings.append)
    return "".join(strings)


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no name that begins with an underscore, as {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put \u003c where the model expects "<". The arguments are those
    # of transformers, in its order.
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # A guard must stay one, or it would not be found when it is to be removed.
    return _ESCAPED_GUARD.sub(_restore_guard, text) if ensure_ascii else text


def _restore_guard(escaped: re.Match[str]) -> str:
    letter = chr(int(escaped[1], 16)) if escaped[1] else ""
    return letter if letter in _GUARDS else escaped[0]

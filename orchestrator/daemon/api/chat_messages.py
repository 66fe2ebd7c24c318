"""The messages of a chat, and what else of it reaches the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api.body import (
    NO_MEDIA,
    Body,
    Said,
    check_kind,
    refuse_empty,
    refuse_prompt_keys,
    show,
    tag_kind,
)
from orchestrator.daemon.api.tools.wire import ToolCall

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The names under which servers tell of a thought; templates know the first."""
_MEDIA = dict.fromkeys(("image", "input_image", "audio", "input_audio", "video", "file", "input_file"), NO_MEDIA)
# What the server itself gives to the template, or Jinja does.
_OWN_KEYWORDS = frozenset({
    *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"),
    *("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop"),
    *("self", "super", "varargs", "kwargs", "caller"),
})  # fmt: skip
_EFFORT_CHARS = 32

Effort = Annotated[str, Field(min_length=1, max_length=_EFFORT_CHARS)]
"""How much the model is to think, in the words of its template."""


class TextPart(Said):
    """Text of a content."""

    type: Literal["text"]
    text: str

    @property
    def words(self) -> str:
        return self.text


class RefusalPart(Said):
    """What the assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def words(self) -> str:
        return self.refusal


class ThinkingPart(Said):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str


Part = Annotated[
    Annotated[TextPart, Tag("kind=text")]
    | Annotated[RefusalPart, Tag("kind=refusal")]
    | Annotated[ThinkingPart, Tag("kind=thinking")],
    Discriminator(tag_kind),
    BeforeValidator(lambda part: check_kind(part, ("text", "refusal", "thinking"), "contents", "", _MEDIA)),
]
Text = Annotated[TextPart, BeforeValidator(lambda part: check_kind(part, ("text",), "contents", "", _MEDIA))]


class Message(BaseModel):
    """One chat message. `tool_calls` are the assistant's, `tool_call_id` says which of them a tool answers. Unknown
    fields (names) are handed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return what chat templates expect: content as one string, "developer" as the "system" that it replaced,
        the arguments of calls as objects, and thoughts under one name."""
        role = "system" if self.role == "developer" else self.role
        plain = {**(self.model_extra or {}), "role": role, "content": self._words}
        if thought := self._thought:
            plain["reasoning_content"] = thought
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain

    @property
    def _words(self) -> str:
        """What it says, as one text."""
        if isinstance(self.content, str):
            return self.content or self.refusal or ""
        words = (part.words for part in self.content or [] if not isinstance(part, ThinkingPart))
        return "".join(words) or self.refusal or ""

    @property
    def _thought(self) -> str:
        """What was thought before it, under whatever name it came."""
        thoughts = ((self.model_extra or {}).get(name) for name in _THOUGHTS)
        parts = self.content if isinstance(self.content, list) else []
        inside = "".join(part.thinking for part in parts if isinstance(part, ThinkingPart))
        return next((text for text in thoughts if isinstance(text, str) and text), inside)

    _nothing_that_changes_the_prompt = model_validator(mode="before")(refuse_prompt_keys)

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Message:
        if self.role != "assistant":
            refuse_empty(self.role, self.content)
            _refuse_the_assistants(self)
        elif not (self.tool_calls or self.refusal or self._thought):
            refuse_empty(self.role, self.content if self.content != [] else "")
        return self


def _refuse_the_assistants(message: Message) -> None:
    """Raise PydanticCustomError for calls and parts that only the assistant has."""
    if message.tool_calls:
        text = "'tool_calls' are the assistant's, not those of a message with the role '{role}'"
        raise PydanticCustomError("tools", text, {"role": message.role})
    parts = message.content if isinstance(message.content, list) else []
    wrong = next((part.type for part in parts if not isinstance(part, TextPart)), None)
    if wrong is not None:
        text = f"a message of the role '{message.role}' has no contents of type '{wrong}'"
        raise PydanticCustomError("invalid_combination", "{text}", {"inside": "content", "text": text})


class Prediction(Body):
    """What the client expects the answer to be. Drafts come from it; it never changes the answer."""

    type: Literal["content"]
    content: str | list[Text]

    @property
    def text(self) -> str:
        """The expected text; several parts are one text."""
        return self.content if isinstance(self.content, str) else "".join(part.words for part in self.content)


def _check_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return what a template may be told. Raises PydanticCustomError for what the server itself tells it."""
    field = "chat_template_kwargs"
    wrong = next((key for key in keywords if not key.isidentifier() or key.startswith("_")), None)
    own = next((key for key in keywords if key in _OWN_KEYWORDS), None)
    if wrong is not None:
        text = f"'{field}' has the key {show(wrong)}, which is no name of a template's variable"
        raise PydanticCustomError("invalid_combination", "{text}", {"field": field, "text": text})
    if own is not None:
        text = f"'{field}' cannot set '{own}': the server gives it to the template itself"
        raise PydanticCustomError("not_supported", "{text}", {"field": f"{field}.{own}", "text": text})
    return keywords


TemplateKeywords = Annotated[dict[str, Any], AfterValidator(_check_keywords)]
"""What a chat template is told beside messages and tools, such as `enable_thinking`. It ignores what it does
not know."""


def collect_keywords(effort: str | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a template is told of the wanted effort, and by the request itself, which wins."""
    switches: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        switches["enable_thinking"] = False
    return switches | dict(keywords)

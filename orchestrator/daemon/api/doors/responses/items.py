"""The items of a conversation, as `/v1/responses` takes them back."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from orchestrator.daemon.api.conversation import (
    NO_MEDIA,
    RefusalPart,
    Said,
    check_kind,
    refuse_empty,
    refuse_prompt_keys,
)
from orchestrator.daemon.api.doors.responses.tools import join_name

_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_MEDIA = {"input_image": NO_MEDIA, "input_file": NO_MEDIA, "input_audio": NO_MEDIA}
_BUILT_IN_CALLS = ("local_shell_call", "shell_call", "apply_patch_call")
_CALLS = ("function_call", "custom_tool_call", *_BUILT_IN_CALLS)
_OUTPUTS = tuple(f"{kind}_output" for kind in _CALLS)
_ITEMS = ("message", *_CALLS, *_OUTPUTS, "reasoning", "web_search_call")
_ITEM_WAYS_OUT = {
    "item_reference": "send the item itself, or 'previous_response_id'",
    "compaction": "it is encrypted for the server that made it; send the conversation itself",
}


class ItemText(Said):
    """Text, whoever said it."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str

    @property
    def words(self) -> str:
        return self.text


def _kind_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "kind=refusal" if kind == "refusal" else "kind=text"


Part = Annotated[
    Annotated[ItemText, Tag("kind=text")] | Annotated[RefusalPart, Tag("kind=refusal")],
    Discriminator(_kind_of_part),
    BeforeValidator(lambda part: check_kind(part, _TEXTS, "contents", "input", _MEDIA)),
]


class MessageItem(Said):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]

    _nothing_that_changes_the_prompt = model_validator(mode="before")(refuse_prompt_keys)

    @model_validator(mode="after")
    def _says_something(self) -> MessageItem:
        if self.role != "assistant":
            refuse_empty(self.role, self.content)
        return self


class CallItem(Said):
    """A call that the model made; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    @property
    def function(self) -> dict[str, str]:
        return {"name": join_name(self.namespace, self.name), "arguments": self.arguments}


class CustomCallItem(Said):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    @property
    def function(self) -> dict[str, str]:
        """What was called, and with what: its text as the one argument."""
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return {"name": join_name(self.namespace, self.name), "arguments": arguments}


class BuiltInCallItem(Said):
    """A call of a tool that the API itself names: a command (`action`), or a change of files (`operation`)."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None

    @property
    def function(self) -> dict[str, str]:
        arguments = {key: value for key, value in (self.action or self.operation or {}).items() if value is not None}
        return {"name": self.type.removesuffix("_call"), "arguments": json.dumps(arguments, ensure_ascii=False)}


class OutputItem(Said):
    """What a call brought. Outputs of shells are lists of what they wrote, which the model reads as JSON."""

    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str
    output: str | list[Part]

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = dict(data)
        if "call_id" not in fields and fields.get("type") == "local_shell_call_output" and "id" in fields:
            fields["call_id"] = fields["id"]
        output = fields.get("output")
        if fields.get("type") == "shell_call_output" and isinstance(output, list):
            fields["output"] = json.dumps(output, ensure_ascii=False)
        if fields.get("type") == "apply_patch_call_output" and output is None:
            fields["output"] = str(fields.get("status", ""))
        return fields


class ReasoningItem(Said):
    """What the model thought. What is encrypted is of another server, and left out."""

    type: Literal["reasoning"]
    summary: list[Part] = Field(default=[])
    content: list[Part] | None = None

    @property
    def words(self) -> str:
        return "".join(part.words for part in self.content or self.summary)


class SearchItem(Said):
    """A search that another server made: it tells no results, and is left out."""

    type: Literal["web_search_call"]


def _kind_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    if kind in _OUTPUTS:
        return "kind=output"
    return "kind=built_in_call" if kind in _BUILT_IN_CALLS else f"kind={kind}"


Item = Annotated[
    Annotated[MessageItem, Tag("kind=message")]
    | Annotated[CallItem, Tag("kind=function_call")]
    | Annotated[CustomCallItem, Tag("kind=custom_tool_call")]
    | Annotated[BuiltInCallItem, Tag("kind=built_in_call")]
    | Annotated[OutputItem, Tag("kind=output")]
    | Annotated[ReasoningItem, Tag("kind=reasoning")]
    | Annotated[SearchItem, Tag("kind=web_search_call")],
    Discriminator(_kind_of),
    BeforeValidator(lambda item: check_kind(item, _ITEMS, "items", "input", _ITEM_WAYS_OUT)),
]

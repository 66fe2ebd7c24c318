"""What `/v1/messages` answers, as the served OpenAPI document describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from orchestrator.daemon.api.answers import Answered


class MessageErrorFields(Answered):
    """`type` follows from the status."""

    type: str
    message: str
    details: dict[str, Any] | None = Field(default=None)
    """Of a refused `thread`: what its clients know it by."""


class MessageErrorBody(Answered):
    """Every answer of these routes that is none."""

    type: Literal["error"]
    error: MessageErrorFields
    request_id: str | None


class TextContent(Answered):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingContent(Answered):
    """What the model thought. `signature` is empty, but where the text was to be left out: it has that."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class CallContent(Answered):
    """A call that the model wants made. Arguments that are no object are told as `INVALID_JSON`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answered):
    """Tokens of the input without those that were remembered, which `cache_read_input_tokens` counts, and of the
    output."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicMessage(Answered):
    """`POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | CallContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: list[str] = Field(default=[])
    """What of the request's schemas the text is not held to."""


class AnthropicEvent(Answered):
    """The data of an event; `type` is its name too, and says which other fields there are."""

    type: str
    message: AnthropicMessage | None = None
    index: int = 0
    content_block: TextContent | ThinkingContent | CallContent | None = None
    delta: dict[str, Any] = Field(default={})
    usage: MessageUsage | None = None
    error: MessageErrorFields | None = None
    request_id: str | None = None


class TokenCount(Answered):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: int

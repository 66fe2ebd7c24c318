"""What `/v1/responses` answers, as the served OpenAPI document describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from orchestrator.daemon.api.answers import Answered, RequestMetrics

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answered):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ThoughtText(Answered):
    """Text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answered):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: _Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputThought(Answered):
    """What the model thought before it said something."""

    id: str
    type: Literal["reasoning"]
    status: _Status
    summary: list[Any]
    content: list[ThoughtText]


class OutputCall(Answered):
    """A call that the model wants made; `arguments` is JSON text, as the model wrote it."""

    id: str
    type: Literal["function_call"]
    status: _Status
    call_id: str
    name: str
    arguments: str
    namespace: str = ""
    """What the function belongs to, where the request had it in a namespace."""


class InputDetails(Answered):
    """`cached_tokens`: tokens of the input whose KV cache was there already. `cache_write_tokens` is always 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answered):
    """`reasoning_tokens`: of thoughts."""

    reasoning_tokens: int


class ResponseUsage(Answered):
    """Tokens of input and output."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class CutShort(Answered):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Answered):
    """Why a response failed on the way."""

    code: str
    message: str


class ResponseObject(Answered):
    """`POST /v1/responses`. What the request asked for is told again."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: CutShort | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputThought | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    system_fingerprint: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metrics: RequestMetrics | None = Field(default=None)
    warnings: list[str] = Field(default=[])
    """What of the request's schemas the text is not held to."""


class ResponseEvent(Answered):
    """The data of an event; `type` is its name too, and says which other fields there are."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int = 0
    content_index: int = 0
    item_id: str = ""
    item: OutputMessage | OutputThought | OutputCall | None = None
    part: OutputText | ThoughtText | None = None
    delta: str = ""
    text: str = ""
    name: str = ""
    arguments: str = ""
    logprobs: list[Any] = Field(default=[])


class InputTokens(Answered):
    """`POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Answered):
    """`DELETE /v1/responses/ID`."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]

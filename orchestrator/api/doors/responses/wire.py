"""The body of `/v1/responses`. What would change the output and is not supported is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.api.doors.parts import NO_MEDIA, Said, check_kind
from orchestrator.api.tools.wire import MAX_TOOLS, FunctionName
from orchestrator.api.wire import MAX_USER_TAG, Body, Sampled, StopText

MAX_ITEMS = 16_384
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_MEDIA = {"input_image": NO_MEDIA, "input_file": NO_MEDIA, "input_audio": NO_MEDIA}
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_ITEM_WAYS_OUT = {"item_reference": "send the item itself, or 'previous_response_id'"}
_BUILT_IN = "tools that run on a server are not served here; offer a function"
_TOOL_WAYS_OUT = {"": _BUILT_IN}


class ItemPart(Said):
    """A part of a content: text, whoever said it."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str = ""
    refusal: str = ""

    @property
    def words(self) -> str:
        """Its text."""
        return self.text or self.refusal


Part = Annotated[ItemPart, BeforeValidator(lambda part: check_kind(part, _TEXTS, "contents", "input", _MEDIA))]


class MessageItem(Said):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class CallItem(Said):
    """A call that the model made; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(Said):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class ReasoningItem(Said):
    """What the model thought. What is encrypted is of another server, and left out."""

    type: Literal["reasoning"]
    summary: list[Part] = Field(default=[])
    content: list[Part] | None = None


def _kind_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return f"kind={kind}"


Item = Annotated[
    Annotated[MessageItem, Tag("kind=message")]
    | Annotated[CallItem, Tag("kind=function_call")]
    | Annotated[OutputItem, Tag("kind=function_call_output")]
    | Annotated[ReasoningItem, Tag("kind=reasoning")],
    Discriminator(_kind_of),
    BeforeValidator(lambda item: check_kind(item, _ITEMS, "items", "input", _ITEM_WAYS_OUT)),
]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Tool = Annotated[
    FunctionTool, BeforeValidator(lambda tool: check_kind(tool, ("function",), "tools", "tools", _TOOL_WAYS_OUT))
]


class NamedFunction(Body):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """Some of the tools: only they may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)


class TextFormat(Body):
    """What the text must be. `strict` is accepted in either value: the text always keeps to the schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _a_schema_where_it_belongs(self) -> TextFormat:
        if self.type == "json_schema" and (self.schema_ is None or self.name is None):
            field = "text.format.schema" if self.schema_ is None else "text.format.name"
            raise PydanticCustomError("missing_parameter", "'{field}' is missing", {"field": field})
        return self


class TextConfig(Body):
    """How the text is to be. `verbosity` is accepted and not used: models have no such lever."""

    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """How much the model is to think, and what is told of it. Accepted and not used: thoughts are told whole."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Sampled):
    """`POST /v1/responses`. Beside OpenAI's fields it takes those of sampling that the chat route has."""

    harmless: ClassVar[frozenset[str]] = frozenset({
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream_options",
        "max_tool_calls",  # of tools that run on a server
    })  # fmt: skip
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False, None),
        "conversation": (None,),
        "prompt": (None,),
        "truncation": ("disabled", None),
        "context_management": ([], None),
        "top_logprobs": (0, None),
    }

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = None
    text: TextConfig = TextConfig()
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(default=None, ge=1)
    reasoning: Reasoning = Reasoning()
    include: list[str] = Field(default=[], max_length=16)
    metadata: dict[str, str] = Field(default={}, max_length=16)
    stop: StopText | list[StopText] | None = None
    user: str = Field(default="", max_length=MAX_USER_TAG)

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @model_validator(mode="after")
    def _something_to_answer(self) -> ResponsesRequest:
        if isinstance(self.input, list) and not self.input and self.previous_response_id is None:
            raise PydanticCustomError("missing_parameter", "'{field}' has no items", {"field": "input"})
        if len(self.items) > MAX_ITEMS:
            text = "'{field}' takes at most {most} items"
            raise PydanticCustomError("invalid_combination", text, {"field": "input", "most": MAX_ITEMS})
        unknown = [one for one in self.include if one != "reasoning.encrypted_content"]
        if unknown:
            text = (
                "'include' takes 'reasoning.encrypted_content' alone, which adds nothing: thoughts are told as they are"
            )
            raise PydanticCustomError("not_supported", "{text}", {"field": "include", "text": text})
        if isinstance(self.tool_choice, AllowedTools):
            names = {tool.name for tool in self.tools}
            if any(tool.name not in names for tool in self.tool_choice.tools):
                text = "'tool_choice' names a function that is not among the tools"
                raise PydanticCustomError("tools", text, {"field": "tool_choice"})
        return self

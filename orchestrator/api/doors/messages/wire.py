"""The bodies of `/v1/messages`. What would change the output and is not supported is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.api.doors.parts import NO_MEDIA, Said, check_kind
from orchestrator.api.tools.wire import MAX_TOOLS, FunctionName
from orchestrator.api.wire import MAX_STOPS, Body, Sampled, StopText

_MEDIA = {"image": NO_MEDIA, "document": NO_MEDIA, "": "the served model takes text and the results of tools"}
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_BUILT_IN = {"": "tools that run on a server are not served here; offer one with an 'input_schema'"}


class TextBlock(Said):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Said):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Said):
    """A thought that another server has encrypted: left out."""

    type: Literal["redacted_thinking"]


class CallBlock(Said):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Text = Annotated[TextBlock, BeforeValidator(lambda part: check_kind(part, ("text",), "contents", "messages", _MEDIA))]


class ResultBlock(Said):
    """What a call brought. `is_error` is accepted, and the model reads the text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Text] = ""


def _kind_of(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"kind={kind}"


Block = Annotated[
    Annotated[TextBlock, Tag("kind=text")]
    | Annotated[ThinkingBlock, Tag("kind=thinking")]
    | Annotated[RedactedBlock, Tag("kind=redacted_thinking")]
    | Annotated[CallBlock, Tag("kind=tool_use")]
    | Annotated[ResultBlock, Tag("kind=tool_result")],
    Discriminator(_kind_of),
    BeforeValidator(lambda block: check_kind(block, _BLOCKS, "contents", "messages", _MEDIA)),
]


class SaidMessage(Said):
    """A message. Calls and thoughts are the assistant's, results the user's."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        """Its content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> SaidMessage:
        wrong = {"user": ("tool_use", "thinking"), "assistant": ("tool_result",)}.get(self.role, _BLOCKS[1:])
        found = next((block.type for block in self.blocks if block.type in wrong), None)
        if found is not None:
            text = f"a message of the role '{self.role}' has no contents of type '{found}'"
            raise PydanticCustomError("invalid_combination", "{text}", {"field": "messages", "text": text})
        return self


class CustomTool(Said):
    """A tool that the client runs. Hints for caches and clients are left out."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


Tool = Annotated[CustomTool, BeforeValidator(lambda tool: check_kind(tool, ("custom",), "tools", "tools", _BUILT_IN))]


class ToolChoice(Body):
    """How tools are to be chosen. `name` goes with `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _a_name_where_it_belongs(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            text = "'tool_choice.name' goes with the type 'tool', which needs it"
            raise PydanticCustomError("invalid_combination", text, {"field": "tool_choice.name"})
        return self


class Metadata(Said):
    """`user_id` is the tag of a session."""

    user_id: str | None = None


class OutputFormat(Body):
    """A JSON schema that the text keeps to."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Said):
    """How the output is to be. `effort` is accepted and not used: models have no such lever."""

    format: OutputFormat | None = None
    effort: str | None = None


class Thinking(Said):
    """Accepted in each form, and not used: a model thinks as it was trained to, and its thoughts are told."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]


class Conversation(Sampled):
    """What is said to the model: the part of a body that its tokens are counted of."""

    harmless: ClassVar[frozenset[str]] = frozenset({
        "service_tier",
        "inference_geo",
        "cache_control",
        "context_management",  # servers may forget old results of tools; here they stay
        "diagnostics",
        "speed",
    })  # fmt: skip
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (None,),
        "mcp_servers": ([], None),
        "prefill": (None,),
        "compaction": (None,),
        "fallbacks": ([], None),
        "thread": (None,),
    }

    messages: list[SaidMessage] = Field(min_length=1)
    system: str | list[Text] | None = None
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _the_answer_is_the_models(self) -> Conversation:
        if self.messages[-1].role == "assistant":
            text = "the last of 'messages' is the assistant's: an answer that is begun for the model is not supported"
            raise PydanticCustomError("not_supported", "{text}", {"field": "messages", "text": text})
        return self


class MessagesRequest(Conversation):
    """`POST /v1/messages`. Beside Anthropic's fields it takes those of sampling that the chat route has."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[StopText] = Field(default=[], max_length=MAX_STOPS)
    metadata: Metadata = Metadata()


class CountTokensRequest(Conversation):
    """`POST /v1/messages/count_tokens`."""

"""The bodies of `/v1/messages`. What would change the output and is not supported is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, ModelWrapValidatorHandler, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api import conversation
from orchestrator.daemon.api.doors.signatures import read_signature
from orchestrator.daemon.api.errors import NO_THREADS
from orchestrator.daemon.api.tools.hosted import CLIENT_RUN, FORCED_HOSTED, MESSAGES_HOSTED, is_hosted
from orchestrator.daemon.api.wire import HARMLESS, MAX_STOPS, Sampled, StopText

_MEDIA = {
    "image": conversation.NO_MEDIA,
    "document": conversation.NO_MEDIA,
    "": "the served model takes text and the results of tools",
}
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_CLIENT_RUN = CLIENT_RUN | {"": "offer one with an 'input_schema'"}
_TOOLS = ("custom",)


class TextBlock(conversation.Said):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(conversation.Said):
    """What the model thought. Where its text was left out, `signature` has it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def thought(self) -> str:
        """The text, also of a thought that was left out."""
        return self.thinking or read_signature(self.signature)


class RedactedBlock(conversation.Said):
    """A thought that another server has encrypted: left out."""

    type: Literal["redacted_thinking"]


class CallBlock(conversation.Said):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Text = Annotated[
    TextBlock, BeforeValidator(lambda part: conversation.check_kind(part, ("text",), "contents", "messages", _MEDIA))
]


class ResultBlock(conversation.Said):
    """What a call brought. `is_error` is accepted, and the model reads the text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Text] = ""


Block = Annotated[
    Annotated[TextBlock, Tag("kind=text")]
    | Annotated[ThinkingBlock, Tag("kind=thinking")]
    | Annotated[RedactedBlock, Tag("kind=redacted_thinking")]
    | Annotated[CallBlock, Tag("kind=tool_use")]
    | Annotated[ResultBlock, Tag("kind=tool_result")],
    Discriminator(conversation.tag_kind),
    BeforeValidator(lambda block: conversation.check_kind(block, _BLOCKS, "contents", "messages", _MEDIA)),
]


class SaidMessage(conversation.Said):
    """A message. Calls and thoughts are the assistant's, results the user's."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    _nothing_that_changes_the_prompt = model_validator(mode="before")(conversation.refuse_prompt_keys)

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> SaidMessage:
        if self.role != "assistant":
            conversation.refuse_empty(self.role, self.content)
        wrong = {"user": ("tool_use", "thinking"), "assistant": ("tool_result",)}.get(self.role, _BLOCKS[1:])
        kind = next((block.type for block in self.blocks if block.type in wrong), None)
        if kind is not None:
            text = f"a message of the role '{self.role}' has no contents of type '{kind}'"
            raise PydanticCustomError("invalid_combination", "{text}", {"field": "messages", "text": text})
        return self


class CustomTool(conversation.Offered):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: conversation.FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "kind=hosted" if is_hosted(kind, MESSAGES_HOSTED) else "kind=custom"


def _check_tool(tool: Any) -> Any:
    if _kind_of_tool(tool) == "kind=hosted":
        return tool
    return conversation.check_kind(tool, _TOOLS, "tools", "tools", _CLIENT_RUN)


Tool = Annotated[
    Annotated[CustomTool, Tag("kind=custom")] | Annotated[conversation.HostedTool, Tag("kind=hosted")],
    Discriminator(_kind_of_tool),
    BeforeValidator(_check_tool),
]


class ToolChoice(conversation.Body):
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


class Metadata(conversation.Said):
    """`user_id` is the tag of a session."""

    user_id: str | None = None


class OutputFormat(conversation.Body):
    """A JSON schema that the text keeps to."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(conversation.Said):
    """How the output is to be. The chat template is told of `effort`."""

    format: OutputFormat | None = None
    effort: conversation.Effort | None = None


class Thinking(conversation.Said):
    """Whether the model is to think: what says so to the chat template. A template without such a switch, and
    `adaptive`, leave it to the model. How long it thinks is not bounded: `budget_tokens` is accepted and not used.
    `display`: with `omitted` a thought's block has no text, and its signature carries it. Nothing is summarised."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class Conversation(Sampled):
    """What is said to the model: the part of a body that its tokens are counted of."""

    harmless: ClassVar[frozenset[str]] = HARMLESS | {
        "context_management",  # servers may forget old results of tools; here they stay
        "diagnostics",
        "speed",
    }

    messages: list[SaidMessage] = Field(min_length=1)
    system: str | list[Text] | None = None
    tools: list[Tool] = Field(default=[], max_length=conversation.MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    chat_template_kwargs: conversation.TemplateKeywords = Field(default={})

    @property
    def functions(self) -> list[CustomTool]:
        """The tools that the client runs; those that run on a server are left out."""
        return [tool for tool in self.tools if isinstance(tool, CustomTool)]

    @property
    def unused(self) -> tuple[str, ...]:
        budget = ("thinking.budget_tokens",) if self.thinking.budget_tokens is not None else ()
        return (*super().unused, *budget)

    @model_validator(mode="wrap")
    @classmethod
    def _no_thread(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Clients that are told so in these words send the whole conversation instead."""
        if isinstance(data, dict) and data.get("thread") is not None:
            text = "'thread' is not supported: conversations are not kept here, so send all messages"
            raise PydanticCustomError(NO_THREADS, "{text}", {"field": "thread", "text": text})
        return build(data)

    @model_validator(mode="after")
    def _one_format(self) -> Conversation:
        if self.output_format is not None and self.output_config.format is not None:
            text = "'output_format' is the older name of 'output_config.format': send one of them"
            raise PydanticCustomError("invalid_combination", "{text}", {"field": "output_format", "text": text})
        return self

    @model_validator(mode="after")
    def _no_hosted_tool_is_forced(self) -> Conversation:
        hosted = {tool.name or tool.type for tool in self.tools if isinstance(tool, conversation.HostedTool)}
        if self.tool_choice.name in hosted or (self.tool_choice.type == "any" and hosted and not self.functions):
            raise PydanticCustomError("not_supported", FORCED_HOSTED, {"field": "tool_choice"})
        return self

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

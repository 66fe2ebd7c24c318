"""The body of `/v1/responses`. What would change the output and is not supported is refused by its name."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api.conversation import MAX_TOOLS, Body, Effort, Said, TemplateKeywords
from orchestrator.daemon.api.doors.responses.items import Item, MessageItem
from orchestrator.daemon.api.doors.responses.tools import (
    AllowedTools,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    find_chosen,
    list_functions,
)
from orchestrator.daemon.api.tools.hosted import FORCED_HOSTED
from orchestrator.daemon.api.wire import HARMLESS, IDLE, MAX_USER_TAG, Sampled, StopText

# Bounds work beside a body's bytes (ADR 0047). Longer than any conversation.
MAX_ITEMS = 16_384
_LOGPROBS = "message.output_text.logprobs"


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


class Reasoning(Said):
    """How much the model is to think, which its chat template is told. What is to be told of it is accepted and not
    used: thoughts are told whole."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Sampled):
    """`POST /v1/responses`. Beside OpenAI's fields it takes those of sampling that the chat route has."""

    harmless: ClassVar[frozenset[str]] = HARMLESS | {"max_tool_calls"}  # of tools that run on a server
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = IDLE | {"prompt": ()}

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = None
    text: TextConfig = TextConfig()
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(default=None, ge=1)
    reasoning: Reasoning = Reasoning()
    include: list[str] = Field(default=[], max_length=16)
    metadata: dict[str, str] = Field(default={}, max_length=16)
    stop: StopText | list[StopText] | None = None
    user: str = Field(default="", max_length=MAX_USER_TAG)
    chat_template_kwargs: TemplateKeywords = Field(default={})

    @property
    def unused(self) -> tuple[str, ...]:
        return (*super().unused, *(["include"] if self.include else []))

    @property
    def functions(self) -> list[NamedTool]:
        """The functions among the tools; those that run on a server are left out."""
        return list_functions(self.tools)

    @property
    def items(self) -> list[Item]:
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
        if _LOGPROBS in self.include:
            text = "'include' cannot ask for log-probabilities: the chat route has them"
            raise PydanticCustomError("not_supported", "{text}", {"field": "include", "text": text})
        return self

    @model_validator(mode="after")
    def _a_choice_among_the_tools(self) -> ResponsesRequest:
        choice, functions = self.tool_choice, self.functions
        named = [choice] if isinstance(choice, NamedFunction) else []
        required = choice == "required"
        if isinstance(choice, AllowedTools):
            named, required = choice.tools, choice.mode == "required" and not choice.tools
        if any(find_chosen(tool, functions) is None for tool in named):
            text = "'tool_choice' names a function that is not among the tools"
            raise PydanticCustomError("tools", text, {"field": "tool_choice"})
        if required and self.tools and (not functions or choice != "required"):
            raise PydanticCustomError("not_supported", FORCED_HOSTED, {"field": "tool_choice"})
        return self


class CountInputRequest(ResponsesRequest):
    """`POST /v1/responses/input_tokens`: what would be asked, of which the tokens are counted."""

    harmless: ClassVar[frozenset[str]] = ResponsesRequest.harmless | {"personality"}

    model: str = ""
    input: str | list[Item] = Field(default=[])

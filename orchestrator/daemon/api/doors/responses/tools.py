"""The tools of `/v1/responses`, and which of them may be called. Functions of a namespace are told to the model under a
name of both, and answers take it apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api.conversation import MAX_TOOLS, Body, FunctionName, HostedTool, Offered, check_kind
from orchestrator.daemon.api.tools.hosted import CLIENT_RUN, FORCED_HOSTED, RESPONSES_HOSTED, is_hosted


class FunctionTool(Offered):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Function = Annotated[
    FunctionTool, BeforeValidator(lambda tool: check_kind(tool, ("function",), "tools", "tools", CLIENT_RUN))
]


class NamespaceTool(Offered):
    """Functions that belong together."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[Function] = Field(max_length=MAX_TOOLS)


def _kind_of(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "kind=hosted" if is_hosted(kind, RESPONSES_HOSTED) else f"kind={kind}"


def _check_tool(tool: Any) -> Any:
    if _kind_of(tool) == "kind=hosted":
        return tool
    return check_kind(tool, ("function", "namespace"), "tools", "tools", CLIENT_RUN)


Tool = Annotated[
    Annotated[FunctionTool, Tag("kind=function")]
    | Annotated[NamespaceTool, Tag("kind=namespace")]
    | Annotated[HostedTool, Tag("kind=hosted")],
    Discriminator(_kind_of),
    BeforeValidator(_check_tool),
]


class NamedFunction(Body):
    """A function by its name, and its namespace where it has one."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


def _check_forced(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if is_hosted(kind, RESPONSES_HOSTED):
        raise PydanticCustomError("not_supported", FORCED_HOSTED, {"field": "tool_choice"})
    return check_kind(choice, ("function", "allowed_tools"), "choices", "tool_choice", CLIENT_RUN)


def _leave_hosted_out(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not (isinstance(tool, dict) and is_hosted(tool.get("type"), RESPONSES_HOSTED))]


class AllowedTools(Body):
    """Some of the tools: only they may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], BeforeValidator(_leave_hosted_out), Field(max_length=MAX_TOOLS)]


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedTools, BeforeValidator(_check_forced)
]


class NamedTool(NamedTuple):
    """A function, and the namespace that it is of ("": of none)."""

    namespace: str
    tool: FunctionTool
    about: str
    """Its description, behind that of its namespace where it is the first of it."""

    @property
    def full_name(self) -> str:
        return join_name(self.namespace, self.tool.name)


def join_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def list_functions(tools: Sequence[FunctionTool | NamespaceTool | HostedTool]) -> list[NamedTool]:
    functions: list[NamedTool] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            functions.append(NamedTool("", tool, tool.description or ""))
        elif isinstance(tool, NamespaceTool):
            headings = [tool.description or "", *[""] * len(tool.tools)]
            about = (
                "\n".join(filter(None, pair))
                for pair in zip(headings, (function.description for function in tool.tools), strict=False)
            )
            functions += [
                NamedTool(tool.name, function, text) for function, text in zip(tool.tools, about, strict=True)
            ]
    return functions


def find_chosen(choice: NamedFunction, functions: Sequence[NamedTool]) -> NamedTool | None:
    """Return the function that a choice names, without a namespace the only one so called; None where there is none."""
    full = join_name(choice.namespace, choice.name)
    exact = next((function for function in functions if function.full_name == full), None)
    alike = [function for function in functions if choice.namespace is None and function.tool.name == choice.name]
    return exact if exact is not None or len(alike) != 1 else alike[0]

"""Items to the messages of a chat, and a body to the request of a chat. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.api.doors.parts import collect_sampling
from orchestrator.api.doors.responses.wire import (
    AllowedTools,
    CallItem,
    Item,
    ItemPart,
    MessageItem,
    NamedFunction,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
)
from orchestrator.api.errors import parse_fields
from orchestrator.api.question import rename_parameters
from orchestrator.api.wire import ChatRequest
from orchestrator.errors import RequestError

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What this route calls parameters of a chat."""


def build_chat(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """Return the chat that a body asks for, with these items as its conversation. Raises RequestError."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    messages += build_messages(items)
    tools, tool_choice = _choose_tools(body)
    fields = {
        **collect_sampling(body),
        "messages": messages,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(body),
        "stop": body.stop,
        "user": body.user,
    }
    try:
        found: ChatRequest = parse_fields(ChatRequest, fields)
    except RequestError as error:
        raise rename_parameters(error, NAMES) from None
    return found


def build_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items as messages. A thought, a text and calls that follow one another are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item:
            case ReasoningItem():
                messages.append({"role": "assistant", "content": None, "reasoning_content": _join_thought(item)})
            case MessageItem(role="assistant"):
                if last is not None and last["content"] is None and "tool_calls" not in last:
                    last["content"] = _content(item.content)
                else:
                    messages.append({"role": "assistant", "content": _content(item.content)})
            case MessageItem():
                messages.append({"role": item.role, "content": _content(item.content)})
            case CallItem():
                if last is None:
                    messages.append(last := {"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case OutputItem():
                output = _content(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return messages


def _content(content: str | list[ItemPart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.words} for part in content]


def _join_thought(item: ReasoningItem) -> str:
    return "".join(part.words for part in item.content or item.summary)


def _choose_tools(body: ResponsesRequest) -> tuple[list[dict[str, Any]], Any]:
    tools, choice = body.tools, body.tool_choice
    told: Any = choice
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        tools, told = [tool for tool in tools if tool.name in allowed], choice.mode
    elif isinstance(choice, NamedFunction):
        told = {"type": "function", "function": {"name": choice.name}}
    functions = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in tools]
    return functions, told


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    asked = body.text.format
    if asked.type != "json_schema":
        return {"type": asked.type}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}

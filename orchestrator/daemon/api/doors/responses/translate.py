"""Items to the messages of a chat, and a body to the request of a chat. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.daemon.api.doors.parts import collect_sampling, parse_chat
from orchestrator.daemon.api.doors.responses.items import (
    BuiltInCallItem,
    CallItem,
    CustomCallItem,
    Item,
    MessageItem,
    OutputItem,
    Part,
    ReasoningItem,
)
from orchestrator.daemon.api.doors.responses.tools import AllowedTools, NamedFunction, NamedTool, find_chosen
from orchestrator.daemon.api.doors.responses.wire import ResponsesRequest
from orchestrator.daemon.api.wire import ChatRequest

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


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
        "reasoning_effort": body.reasoning.effort,
        "verbosity": body.text.verbosity,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return parse_chat(fields, NAMES)


def build_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items as messages. A thought, a text and calls that follow one another are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item:
            case ReasoningItem():
                if item.words:  # one that is only encrypted says nothing
                    messages.append({"role": "assistant", "content": None, "reasoning_content": item.words})
            case MessageItem(role="assistant"):
                if last is not None and last["content"] is None and "tool_calls" not in last:
                    last["content"] = _content(item.content)
                else:
                    messages.append({"role": "assistant", "content": _content(item.content)})
            case MessageItem():
                messages.append({"role": item.role, "content": _content(item.content)})
            case CallItem() | CustomCallItem() | BuiltInCallItem():
                if last is None:
                    messages.append(last := {"role": "assistant", "content": None})
                call = {"id": item.call_id, "type": "function", "function": item.function}
                last.setdefault("tool_calls", []).append(call)
            case OutputItem():
                output = _content(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return messages


def _content(content: str | list[Part]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.words} for part in content]


def _choose_tools(body: ResponsesRequest) -> tuple[list[dict[str, Any]], Any]:
    tools, choice = body.functions, body.tool_choice
    mode: Any = choice
    if isinstance(choice, AllowedTools):
        allowed = {chosen.full_name for tool in choice.tools if (chosen := find_chosen(tool, tools)) is not None}
        tools, mode = [tool for tool in tools if tool.full_name in allowed], choice.mode
    elif isinstance(choice, NamedFunction) and (chosen := find_chosen(choice, tools)) is not None:
        mode = {"type": "function", "function": {"name": chosen.full_name}}
    return [_tell(tool) for tool in tools], mode


def _tell(named: NamedTool) -> dict[str, Any]:
    about = {"name": named.full_name, "description": named.about or None}
    fields = named.tool.model_dump(include={"parameters", "strict"})
    return {"type": "function", "function": about | fields}


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}

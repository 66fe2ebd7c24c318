"""Content blocks to the messages of a chat, and a body to the request of a chat. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.daemon.api.doors.messages import wire
from orchestrator.daemon.api.doors.parts import collect_sampling, parse_chat
from orchestrator.daemon.api.wire import MAX_USER_TAG, ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def build_chat(body: wire.Conversation) -> ChatRequest:
    """Return the chat that a body asks for. Raises RequestError."""
    choice = body.tool_choice
    named = {"type": "function", "function": {"name": choice.name}}
    fields = {
        **collect_sampling(body),
        "messages": build_messages(body),
        "tools": [_tool(tool) for tool in body.functions],
        "tool_choice": _CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "response_format": _format(body),
        "reasoning_effort": body.output_config.effort,
        "chat_template_kwargs": _keywords(body),
    }
    if isinstance(body, wire.MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "user": (body.metadata.user_id or "")[:MAX_USER_TAG],
        }
    return parse_chat(fields, name_parameters(body))


def name_parameters(body: wire.Conversation) -> dict[str, str]:
    """Return what this route, and a body that has an older name, call parameters of a chat."""
    older = body.output_format is not None
    thinks = {"chat_template_kwargs.enable_thinking": "thinking"} if "thinking" in body.model_fields_set else {}
    return {
        "stop": "stop_sequences",
        "response_format": "output_format" if older else "output_config.format",
        "reasoning_effort": "output_config.effort",
        **thinks,
    }


def build_messages(body: wire.Conversation) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _content(body.system)})
    for message in body.messages:
        messages += [_assistant(message)] if message.role == "assistant" else _others(message)
    return messages


def _assistant(message: wire.SaidMessage) -> dict[str, Any]:
    texts = [block for block in message.blocks if isinstance(block, wire.TextBlock)]
    thought = "".join(block.thought for block in message.blocks if isinstance(block, wire.ThinkingBlock))
    calls = [_call(block) for block in message.blocks if isinstance(block, wire.CallBlock)]
    plain: dict[str, Any] = {"role": "assistant", "content": _content(texts)}
    if thought:
        plain["reasoning_content"] = thought
    return plain | ({"tool_calls": calls} if calls else {})


def _others(message: wire.SaidMessage) -> list[dict[str, Any]]:
    """Return a message of the user's: results of tools are messages of their own, in their order."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    messages: list[dict[str, Any]] = []
    texts: list[wire.Block] = []
    for block in [*message.content, None]:
        if isinstance(block, wire.TextBlock):
            texts.append(block)
            continue
        if texts:
            messages.append({"role": message.role, "content": _content(texts)})
            texts = []
        if isinstance(block, wire.ResultBlock):
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content)})
    return messages or [{"role": message.role, "content": ""}]


def _content(content: str | Sequence[wire.Block]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": block.text} for block in content if isinstance(block, wire.TextBlock)]


def _call(block: wire.CallBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: Any) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": about | {"strict": tool.strict}}


def _format(body: wire.Conversation) -> dict[str, Any] | None:
    wanted = body.output_config.format or body.output_format
    return (
        None if wanted is None else {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema_}}
    )


def _keywords(body: wire.Conversation) -> dict[str, Any]:
    thinks = (
        {"enabled": True, "disabled": False}.get(body.thinking.type) if "thinking" in body.model_fields_set else None
    )
    return ({} if thinks is None else {"enable_thinking": thinks}) | body.chat_template_kwargs

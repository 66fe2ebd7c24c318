"""Calls as the `tool_calls` of chunks and messages have them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from orchestrator.daemon.api.tools.calls import CallArguments, CallBegins, Part, Text

_CALL_ID_BYTES = 12


def render_parts(parts: Sequence[Part], request_id: str) -> tuple[str | dict[str, Any], ...]:
    """Return text and calls in their order, calls as a chunk's `tool_calls` has them. The ids of calls follow from the
    choice's own `request_id`: an answer that is told again has the same ones."""
    return tuple(part.text if isinstance(part, Text) else _delta(part, request_id) for part in parts)


def _delta(part: CallBegins | CallArguments, request_id: str) -> dict[str, Any]:
    if isinstance(part, CallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": ""}
    call_id = blake2b(f"{request_id} {part.index}".encode(), digest_size=_CALL_ID_BYTES).hexdigest()
    return {"index": part.index, "id": f"call_{call_id}", "type": "function", "function": function}


def whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that the deltas add up to, as a message has them."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls

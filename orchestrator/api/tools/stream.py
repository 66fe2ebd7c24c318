"""Tool calls in the pieces of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from orchestrator.api.streaming import Piece
from orchestrator.api.tools.calls import CallArguments, CallBegins, Text, ToolCallParser
from orchestrator.api.tools.calls import Piece as Found

_CALL_ID_BYTES = 12


async def with_calls(
    pieces: AsyncGenerator[Piece, None], parser: ToolCallParser, *, many: bool, request_id: str
) -> AsyncGenerator[Piece, None]:
    """Move the calls in the pieces' text into `calls`. Without `many` what stands behind the first call is left out.
    The ids of calls follow from the choice's own `request_id`: an answer that is told again has the same ones.
    Closing it closes `pieces`, which cancels the request."""
    async with aclosing(pieces):
        async for piece in pieces:
            found = parser.push(piece.text)
            if piece.finish:
                found += parser.finish(cut=piece.finish == "length")
            if parser.ended and not many:
                found = _first_call(found)
            finish = "tool_calls" if parser.begun and piece.finish == "stop" else piece.finish
            parts = tuple(part.text if isinstance(part, Text) else _delta(part, request_id) for part in found)
            text = "".join(part for part in parts if isinstance(part, str))
            calls = tuple(part for part in parts if not isinstance(part, str))
            if text or calls or piece.tokens or finish:
                yield replace(piece, text=text, calls=calls, finish=finish, parts=parts)


def _first_call(found: Iterable[Found]) -> list[Found]:
    """Return what comes up to the end of call 0."""
    kept: list[Found] = []
    for part in found:
        if isinstance(part, Text) and any(not isinstance(before, Text) for before in kept):
            break
        if not isinstance(part, Text) and part.index > 0:
            break
        kept.append(part)
    return kept


def _delta(part: CallBegins | CallArguments, request_id: str) -> dict[str, Any]:
    """Return a part of a call as a chunk's `tool_calls` has it."""
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

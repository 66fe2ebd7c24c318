"""What the bodies of both APIs are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request

from orchestrator.daemon.api.errors import parse_fields
from orchestrator.daemon.api.question import rename_parameters
from orchestrator.daemon.api.resume import EVENT_HEADER
from orchestrator.daemon.api.wire import ChatRequest, Sampled
from orchestrator.errors import RequestError
from orchestrator.json_lines import escape_line_ends


def collect_sampling(body: Sampled) -> dict[str, Any]:
    return {name: getattr(body, name) for name in Sampled.model_fields if name in body.model_fields_set}


def refuse_resumption(request: Request) -> None:
    """Raise RequestError for an event to go on behind: those of these routes have no names."""
    if EVENT_HEADER in request.headers:
        raise RequestError(
            f"events of this route have no ids: send the same request with its Idempotency-Key and without "
            f"{EVENT_HEADER}, and the answer comes again from its beginning",
            code="not_supported",
            param=EVENT_HEADER,
        )


def name_event(kind: str, data: bytes) -> bytes:
    return f"event: {kind}\ndata: ".encode() + escape_line_ends(data) + b"\n\n"


def parse_chat(fields: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """Return a chat of these fields. `names`: what the route calls them. Raises RequestError."""
    try:
        chat: ChatRequest = parse_fields(ChatRequest, fields)
    except RequestError as error:
        raise rename_parameters(error, names) from None
    return chat

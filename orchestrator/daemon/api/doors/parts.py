"""What the bodies of both APIs are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from orchestrator.daemon.api.question import ReadQuestion
from orchestrator.daemon.api.resume import EVENT_HEADER
from orchestrator.daemon.api.served import ServedModels
from orchestrator.daemon.api.wire import Sampled
from orchestrator.errors import RequestError
from orchestrator.json_lines import escape_line_ends


class DoorApi(Protocol):
    """What these routes need of the API."""

    @property
    def models(self) -> ServedModels: ...

    @property
    def max_parameter_bytes(self) -> int: ...

    async def answer(self, request: Request, read: ReadQuestion) -> Response: ...

    async def do_with_body(self, request: Request, work: Callable[[bytes], Response]) -> Response: ...


def collect_sampling(body: Sampled) -> dict[str, Any]:
    """Return the fields that all routes share, as far as they were sent."""
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
    """Return a server-sent event of a kind, with JSON."""
    return f"event: {kind}\ndata: ".encode() + escape_line_ends(data) + b"\n\n"

"""What the bodies of both APIs are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from fastapi import Request
from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from orchestrator.api.question import ReadQuestion
from orchestrator.api.resume import EVENT_HEADER
from orchestrator.api.served import ServedModels
from orchestrator.api.wire import Sampled
from orchestrator.errors import RequestError

NO_MEDIA = "the served model takes text only"


class Said(BaseModel):
    """A part of a conversation. Clients send back what servers said, with whatever fields those have: fields that say
    nothing to a model are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class DoorApi(Protocol):
    """What these routes need of the API."""

    @property
    def models(self) -> ServedModels: ...

    @property
    def max_parameter_bytes(self) -> int: ...

    async def answer(self, request: Request, read: ReadQuestion) -> Response: ...

    async def do_with_body(self, request: Request, work: Callable[[bytes], Response]) -> Response: ...


def check_kind(value: Any, known: Collection[str], what: str, field: str, ways_out: dict[str, str]) -> Any:
    """Return a part whose `type` is known. Raises PydanticCustomError with what is taken, and the way out."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known:
        shown = kind[:60].encode("utf-8", "backslashreplace").decode()
        way_out = next((told for prefix, told in ways_out.items() if kind.startswith(prefix)), "")
        why = f": {way_out}" if way_out else ""
        text = f"{what} of type '{shown}' are not supported{why} (taken: {', '.join(sorted(known))})"
        raise PydanticCustomError("not_supported", "{text}", {"field": field, "text": text})
    return value


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
    return f"event: {kind}\ndata: ".encode() + data + b"\n\n"

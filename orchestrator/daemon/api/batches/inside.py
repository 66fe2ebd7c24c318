"""Asks the routes of this process, as a client over HTTP would: same checks, same answers, same errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message
from structlog.contextvars import bound_contextvars

from orchestrator.daemon.api.errors import REQUEST_ID, body_of, unforeseen
from orchestrator.daemon.api.keys import OWNER
from orchestrator.daemon.api.resume import KEY_HEADER
from orchestrator.daemon.batches.lines import BatchLine
from orchestrator.daemon.batches.run import Answer
from orchestrator.errors import RequestError

Route = Callable[[Request], Awaitable[Response]]


async def ask_inside(
    route: Route, line: BatchLine, request_id: str, owner: str, begin: Callable[[], None], *, log_words: bool
) -> Answer:
    """Return what a route answers to a line of this owner's. Its key belongs to batches alone. `begin` is called when
    the body was translated and tokens are waited for."""
    raw = json.dumps(line.body).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(raw)),
        "Authorization": f"Batch {owner}",
        KEY_HEADER: f"batch-{line.key}",
        REQUEST_ID: request_id,
    }
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "server": ("batch", 0),
        "root_path": "",
        "path": line.url,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        OWNER: owner,
    }
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            begin()
            await asyncio.Event().wait()  # nobody goes away
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    with bound_contextvars(request_id=request_id):
        try:
            response = await route(Request(scope, receive))
        except RequestError as error:
            return Answer(error.status, body_of(error), request_id, error.retry_after_s)
        except Exception as error:  # a bug: as gates.RequestScope does
            failure = unforeseen(error, f"POST {line.url}", words=log_words)
            return Answer(failure.status, body_of(failure), request_id)
    return Answer(response.status_code, json.loads(bytes(response.body)), request_id)

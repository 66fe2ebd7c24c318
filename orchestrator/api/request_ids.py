"""Gives every response the header by which a client can ask about it."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.errors import REQUEST_ID, new_request_id


class RequestIds:
    """ASGI middleware: echoes X-Request-Id or makes one up; a response that already has one keeps it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault(REQUEST_ID, Headers(scope=scope).get(REQUEST_ID) or new_request_id())
            await send(message)

        await self._app(scope, receive, identified)

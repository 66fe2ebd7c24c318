"""HEAD: what GET answers, without the body. Probes of load balancers and clients ask so whether a route is there."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware that answers HEAD as GET, with the same status and headers. What would stream ends at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        over = False

        async def send_head(message: Message) -> None:
            nonlocal over
            if message["type"] == "http.response.start":
                await send(message)
            elif not over:
                over = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def receive_end() -> Message:
            return {"type": "http.disconnect"} if over else await receive()

        await self._app({**scope, "method": "GET"}, receive_end, send_head)

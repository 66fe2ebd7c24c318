"""The admin routes on the API's own port, for keys of the scope `admin`. Without keys there are none there."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.daemon.api.errors import response_of
from orchestrator.daemon.api.keys import ADMIN_PATH
from orchestrator.errors import RequestError

# ADR 0067: 1 MiB; the largest body lists names.
MOST_BODY_BYTES: Final = 1 << 20


class AdminOverTcp:
    """ASGI middleware, behind the key gate: paths under /admin go to the app that `app.state.admin` holds, if any."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admin: ASGIApp | None = None
        if scope["type"] == "http" and scope["path"].startswith(f"{ADMIN_PATH}/"):
            admin = getattr(scope["app"].state, "admin", None)
        if admin is None:
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("Content-Length", "")
        if declared.isdecimal() and int(declared) > MOST_BODY_BYTES:
            text = f"the body is larger than {MOST_BODY_BYTES} bytes"
            await response_of(RequestError(text, status=413, code="body_too_large"))(scope, receive, send)
            return
        read_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal read_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            if read_bytes > MOST_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
            return message

        await admin(scope, receive_bounded, send)

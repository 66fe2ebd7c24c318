"""What holds for every request from its first byte to its last: its id, its log lines, and that a bug is a 500."""

from __future__ import annotations

import re
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from orchestrator.daemon.api.errors import CLIENT_CLOSED, REQUEST_ID, new_request_id, response_of, unforeseen
from orchestrator.daemon.api.keys import OPEN_ROUTES
from orchestrator.telemetry import get_logger

_USABLE_ID = re.compile(r"[\x20-\x7e]{1,200}")
_FOLLOWED = "outrider.followed"  # in the scope: somebody writes this request's last line

_log = get_logger(__name__)


class RequestScope:
    """ASGI middleware. X-Request-Id is honoured (printable ASCII, up to 200 characters) or made up, bound to every
    log line of the request and echoed.

    It stands inside Starlette's own last resort, which would raise a bug again after answering it, for the server
    to log a second time. `log_words`: a bug's message is logged too; it may hold a request's text.
    """

    def __init__(self, app: ASGIApp, *, log_words: bool = False) -> None:
        self._app = app
        self._log_words = log_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else new_request_id()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                _tell(scope, message["status"])
            await send(message)

        with bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:  # a bug; once the status is out the connection can only be cut
                failure = unforeseen(error, f"{scope['method']} {scope['path']}", words=self._log_words)
                if started:
                    raise ConnectionAbortedError("the answer was cut off by a bug that is in the log") from None
                await response_of(failure, scope["path"])(scope, receive, send_with_id)


def mark_followed(scope: Scope) -> None:
    """Say that somebody else writes the request's last line."""
    scope[_FOLLOWED] = True


def _tell(scope: Scope, status: int) -> None:
    """Write the one line of a request that was refused before it was taken in."""
    if status < HTTPStatus.BAD_REQUEST or status == CLIENT_CLOSED or _FOLLOWED in scope:
        return
    if scope["path"] in OPEN_ROUTES:  # probes ask all the time, and what they are told is in the log already
        return
    write = _log.warning if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _log.info
    route = scope.get("route")  # the path itself may be anything
    write("request refused", status=status, method=scope["method"], route=getattr(route, "path", None))


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

"""What every request passes before its route: its id and log lines, who may use the API, and its span."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, cast

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from orchestrator.daemon.api.admin.over_tcp import AdminOverTcp
from orchestrator.daemon.api.audit import AuditLog
from orchestrator.daemon.api.errors import CLIENT_CLOSED, REQUEST_ID, new_request_id, response_of, unforeseen
from orchestrator.daemon.api.keys import OPEN_ROUTES, KeyGate
from orchestrator.daemon.api.settings import ApiSettings
from orchestrator.daemon.api.shares import KeyShares, ShareGate
from orchestrator.daemon.tracing.names import OPERATIONS
from orchestrator.daemon.tracing.port import RequestTrace, TracedRequest, Tracing
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.telemetry import get_logger

_SHOWN_HEADERS = ("X-Request-Id", "Retry-After")
_USABLE_ID = re.compile(r"[\x20-\x7e]{1,200}")
_FOLLOWED = "outrider.followed"  # in the scope: somebody writes this request's last line
_log = get_logger(__name__)
_ANY: Final = "*"
_CHANGES_NOTHING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
TRACEPARENT = "traceparent"
NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, auto_configure=False)
"""FastAPI's own spans and logs are off: they would have the text of exceptions, which may be of a prompt."""
_TRACE = "outrider.trace"  # in the scope


def install_gates(app: FastAPI, settings: ApiSettings, shares: KeyShares) -> None:
    """Put the gates before the routes: web pages, then keys, then shares. What is added last is asked first."""
    keys, api = settings.keys, settings.api
    app.add_middleware(HeadRequests)
    if settings.tracing is not None:
        app.add_middleware(TraceScope, tracing=settings.tracing)
    if keys is not None:
        app.add_middleware(AdminOverTcp)
        app.add_middleware(ShareGate, shares=shares)
        app.add_middleware(KeyGate, keys=keys, audit=settings.audit, metrics_open=api.metrics_without_key)
    hosts, origins = normalise(api.allowed_hosts), normalise(api.allowed_origins)
    rules = WebRules(hosts, origins, check_host=keys is None or bool(hosts))
    app.add_middleware(WebGate, rules=rules, audit=settings.audit)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=list(_SHOWN_HEADERS),
        )
    app.add_middleware(RequestScope, log_words=settings.log_words)


class RequestScope:
    """ASGI middleware around all others. X-Request-Id is honoured (printable ASCII, up to 200 characters) or made up,
    bound to every log line of the request and echoed.

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


def list_own_names() -> frozenset[str]:
    """Return the names of this machine, as the system has them; nobody is asked."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0]} - {""})


@dataclass(frozen=True, slots=True)
class WebRules:
    """Names and origins that are allowed beside our own. `check_host`: whether names are looked at."""

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    check_host: bool = True
    own_names: frozenset[str] = field(default_factory=list_own_names)

    def allows_host(self, name: str) -> bool:
        """Return whether requests may be sent to this name. Addresses are: no page's name is one."""
        if not self.check_host or name in self.own_names or _is_address(name) or name.endswith(".localhost"):
            return True
        return any(_matches(name, allowed) for allowed in self.hosts)

    def allows_origin(self, origin: str, host: str) -> bool:
        """Return whether a page of this origin may ask. `host`: what it sent the request to, with its port; the pages
        that the daemon itself serves have that as origin."""
        if origin in self.origins or _ANY in self.origins:
            return True
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


class WebGate:
    """ASGI middleware that answers 403 to web pages which were not allowed: a browser on this machine reaches the
    daemon, and runs whatever a page says.

    A page of another site can send requests here in two ways. It sends them across sites, and then its browser says its
    Origin. Or its own name is made to resolve to our address (DNS rebinding), and then the name is in the Host header.
    """

    def __init__(self, app: ASGIApp, rules: WebRules, audit: AuditLog) -> None:
        self._app = app
        self._rules = rules
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._check(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await response_of(refusal, scope["path"])(scope, receive, send)

    def _check(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        host = headers.get("Host", "").strip().lower()
        if host and not self._rules.allows_host(strip_port(host)):
            text = "this name is not one of the daemon's: use its address, or list the name in api.allowed_hosts"
            return self._refuse(scope, "host", text)
        origins = [origin.strip().lower() for origin in headers.getlist("Origin")]
        across = headers.get("Sec-Fetch-Site", "") == "cross-site" and scope["method"] not in _CHANGES_NOTHING
        strange = any(not self._rules.allows_origin(origin, host) for origin in origins)
        if strange or (across and not origins):
            text = "pages of this origin may not use the daemon; list it in api.allowed_origins where they should"
            return self._refuse(scope, "origin", text)
        return None

    def _refuse(self, scope: Scope, what: str, message: str) -> RequestError:
        self._audit.refuse(scope, what, "", None)
        return RequestError(message, status=403, code=f"{what}_not_allowed")


def strip_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def normalise(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.strip().lower().rstrip("/") for name in names)


def _matches(name: str, allowed: str) -> bool:
    if allowed == _ANY or name == allowed:
        return True
    return allowed.startswith("*.") and name.endswith(allowed[1:])


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class TraceScope:
    """ASGI middleware that gives a request its span, to its last byte; inside the gates, so not without a key."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope.get("path", "")) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        trace = scope[_TRACE] = self._tracing.begin(operation, Headers(scope=scope))
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)

        async def send_with_context(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[TRACEPARENT] = trace.traceparent
            await send(message)

        try:
            await self._app(scope, receive, send_with_context)
        finally:
            trace.end(status)


def mark_traced(scope: Scope, submit: Submit) -> Submit:
    """Return a request as workers are to have it: with the context of its span, where it has one."""
    trace = _find_trace(scope)
    return submit if trace is None else trace.mark(submit)


def describe_traced(
    scope: Scope, model: str, submits: Sequence[Submit], *, stream: bool, again: bool
) -> RequestTrace | None:
    """Tell its span, where it has one, of a request that was taken in; return what makes its spans. `submits`: one for
    each choice; `again`: they were sent to workers before."""
    trace = _find_trace(scope)
    if trace is not None:
        trace.describe_request(TracedRequest(model, submits[0], len(submits), stream, submits[0] if again else None))
    return trace


def _find_trace(scope: Scope) -> RequestTrace | None:
    return cast(RequestTrace | None, scope.get(_TRACE))

"""The span of a request, from its head to its last byte: the context that it came with, and the one that goes back."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from fastapi.telemetry import TelemetryConfig
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.daemon.tracing.names import OPERATIONS
from orchestrator.daemon.tracing.port import RequestTrace, TracedRequest, Tracing
from orchestrator.protocol.commands import Submit

TRACEPARENT = "traceparent"
NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, auto_configure=False)
"""FastAPI's own spans and logs are off: they would have the text of exceptions, which may be of a prompt."""

_TRACE = "outrider.trace"  # in the scope


class TraceScope:
    """ASGI middleware, inside the gates: whoever has no key makes no spans."""

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

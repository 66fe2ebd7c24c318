"""Every refusal in OpenAI's error shape: {"error": {"message", "type", "param", "code"}}; or else in Anthropic's."""

from __future__ import annotations

import secrets
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from structlog.contextvars import get_contextvars

from orchestrator.errors import ContextExceeded, RequestError
from orchestrator.telemetry import get_logger, where_it_broke

_log = get_logger(__name__)

CLIENT_CLOSED = 499  # nginx's code; nobody is left to read it
REQUEST_ID = "X-Request-Id"
ANTHROPIC = "/v1/messages"
"""The route, and what is below it, whose errors are in Anthropic's shape."""
NO_THREADS = "thread_unsupported_request"
"""Anthropic's code for a conversation that the server cannot keep: its clients then send all of it."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# OpenAI's and vLLM's routes that clients may look for here.
_NOT_SERVED = {
    "/v1/embeddings": "the served model generates text; ask a server that runs an embedding model",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions, with the whole conversation in each request",
    "/v1/audio": "the served model takes and generates text only",
    "/v1/images": "the served model takes and generates text only",
    "/v1/moderations": "the served model generates text; ask a server that runs a moderation model",
    "/v1/rerank": "the served model generates text; ask a server that runs a reranking model",
    "/v1/score": "the served model generates text; ask a server that runs a reranking model",
    "/v1/fine_tuning": "models are served here, not trained",
    "/v1/messages/batches": "use /v1/batches, in OpenAI's format",
    "/v1/complete": "use /v1/messages",
    "/v1/conversations": "use 'previous_response_id' of /v1/responses",
}

# pydantic puts the alternatives of a union into an error's path; a client sent none of these names.
_ALTERNATIVES = ("list[", "function-", "constrained-", "literal[", "NamedChoice", "kind=")
# Errors of our own validators: their words are whole, and they name the field.
_OWN_KINDS = {
    *("not_supported", "unknown_field", "stop", "either", "tools", "invalid_combination", "missing_parameter"),
    NO_THREADS,
}


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def body_of(error: RequestError) -> dict[str, Any]:
    param = _make_utf8(error.param) if error.param is not None else None
    return {"error": {"message": _make_utf8(error.message), "type": error.kind, "param": param, "code": error.code}}


def anthropic_body_of(error: RequestError) -> dict[str, Any]:
    kind = _ANTHROPIC_KINDS.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    message = error.anthropic_words if isinstance(error, ContextExceeded) else error.message
    fields: dict[str, Any] = {"type": kind, "message": _make_utf8(message)}
    if error.code == NO_THREADS:
        fields["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": fields, "request_id": get_contextvars().get("request_id")}


def _make_utf8(text: str) -> str:
    # A text of JSON may hold half of a character ("\\ud800"), which UTF-8 cannot say.
    return text.encode("utf-8", "backslashreplace").decode()


def response_of(error: RequestError, path: str = "") -> JSONResponse:
    """Return the error as a response, in the shape of the API that the path is of."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    anthropic = path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")
    body = anthropic_body_of(error) if anthropic else body_of(error)
    return JSONResponse(body, status_code=error.status, headers=headers)


def parse_body(model: type[BaseModel], raw: bytes) -> Any:
    """Return a request body as its model. Raises RequestError naming the first wrong parameter."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _first(error.errors()) from None


def parse_fields(model: type[BaseModel], fields: dict[str, Any]) -> Any:
    """Return values as a model. Raises RequestError naming the first wrong parameter."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first(error.errors()) from None


def _first(details: list[ErrorDetails]) -> RequestError:
    detail = _deepest(details)
    if detail["type"] == "json_invalid":
        reason = detail.get("ctx", {}).get("error", detail["msg"])
        return RequestError(f"the body is not JSON: {reason}", code="invalid_json")
    context: dict[str, Any] = detail.get("ctx", {})
    path = [*_path(detail), *([context["inside"]] if "inside" in context else [])]
    param = context.get("field") or ".".join(path) or None
    if detail["type"] in _OWN_KINDS:
        return RequestError(detail["msg"], param=param, code=detail["type"])
    if detail["type"] == "missing":
        return RequestError(f"'{param}' is missing", param=param, code="missing_parameter")
    what = f"'{param}': " if param else "the body: "
    return RequestError(f"{what}{detail['msg'][:1].lower()}{detail['msg'][1:]}", param=param, code="invalid_value")


def _path(detail: ErrorDetails) -> list[str]:
    # Only a whole tag is an alternative: "stream" begins with "str" and is a field.
    return [str(part) for part in detail["loc"] if part != "str" and not str(part).startswith(_ALTERNATIVES)]


def _deepest(details: list[ErrorDetails]) -> ErrorDetails:
    """Return the first parameter's error, of a union's alternatives the one that got furthest into the value."""
    first = _path(details[0])
    return max((detail for detail in details if _path(detail)[: len(first)] == first), key=lambda d: len(_path(d)))


def unforeseen(error: Exception, request: str, *, words: bool = False) -> RequestError:
    """Log a bug and where it is; return what the client is told of it.

    `words`: the exceptions' messages are logged too. They may hold a request's text.
    """
    _log.error("request failed", request=request, exception=where_it_broke(error, words=words))
    return RequestError("the server failed on this request; its log says why", status=500)


def _instead(path: str) -> str:
    return next((f": {way_out}" for known, way_out in _NOT_SERVED.items() if path.startswith(known)), "")


def install_error_handlers(app: FastAPI) -> None:
    """Answer everything that goes wrong in the shape of its API; bugs are those of gates.RequestScope."""

    async def handle_request_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)  # noqa: S101  # registered for this type
        return response_of(error, request.url.path)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)  # noqa: S101  # registered for this type
        path = request.url.path
        message = {
            404: f"there is no route {request.method} {path}{_instead(path)}",
            405: f"{path} does not take {request.method}",
        }.get(error.status_code, str(error.detail))
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        response = response_of(RequestError(message, status=error.status_code, code=code), path)
        response.headers.update(error.headers or {})
        return response

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)  # noqa: S101  # registered for this type
        return response_of(_first(list(error.errors())), request.url.path)

    async def handle_disconnect(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.add_exception_handler(RequestError, handle_request_error)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)

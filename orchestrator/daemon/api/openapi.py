"""Describes requests, answers and errors in the served OpenAPI document; the routes read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from orchestrator.daemon.api.answers import Answered

_REFERENCE = "#/components/schemas/{model}"
_MODELS: dict[str, type[BaseModel]] = {}


class ErrorFields(Answered):
    """`param` is the path of the wrong parameter, where there is one; `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answered):
    """Every answer that is none."""

    error: ErrorFields


_STATUSES = {
    400: "A parameter, the prompt's length or the JSON is wrong.",
    401: "No API key, or one that is not known here.",
    403: "The API key is not for this, or a web page asked that was not allowed.",
    404: "There is no such model, file, batch or response, or nothing is kept of the Last-Event-ID.",
    408: "The body did not come in time.",
    409: "A batch reads this file, or has ended; or no replica has the bits of this system_fingerprint.",
    410: "The model was replaced since the answer began that is asked for again.",
    413: "The body is larger than limits.max_body.",
    415: "The body is declared as something else than JSON, or packed otherwise than by gzip or zstd.",
    422: "The Idempotency-Key or Last-Event-ID belongs to another request.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The worker died each time it ran this request, or a bug; the log says more.",
    503: "Starting, draining or failed; Retry-After says when to come back.",
    504: "The request's time was over before its first token.",
    507: "The disk is full; what is kept there goes on when there is room.",
}
_WITH_RETRY = (429, 503)  # HTTP's


def operation(
    request: type[BaseModel] | None,
    answer: type[BaseModel] | None,
    *,
    events: type[BaseModel] | None = None,
    statuses: tuple[int, ...] = (400, 401, 404, 413, 415, 500, 503),
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Return what a route adds to the document: its body, its answer (`events`: or the data of server-sent events),
    the statuses it may have, and what an `error` looks like."""
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": _reference(answer)}
    if events is not None:
        content["text/event-stream"] = {"schema": _event(events)}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    asks_for_key = (403,) if 401 in statuses else ()
    responses |= {status: _failure(status, error) for status in (*statuses, *asks_for_key)}
    described: dict[str, Any] = {"responses": responses, "response_model": None}
    if request is not None:
        body = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
        described["openapi_extra"] = {"requestBody": body}
    return described


def _event(data: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of one event: JSON, and in the end the text [DONE]."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(data)}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, text]}}}


def _failure(status: int, error: type[BaseModel]) -> dict[str, Any]:
    failure: dict[str, Any] = {
        "description": _STATUSES[status],
        "content": {"application/json": {"schema": _reference(error)}},
    }
    if status in _WITH_RETRY:
        failure["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "required": True}}
    if status == 401:
        failure["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}}
    return failure


def _reference(model: type[BaseModel]) -> dict[str, str]:
    known = _MODELS.setdefault(model.__name__, model)
    if known is not model:
        raise ValueError(f"two models are named {model.__name__}: in {known.__module__} and {model.__module__}")
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _add_schema(schemas: dict[str, Any], name: str, schema: dict[str, Any]) -> None:
    """Add a schema. Raises ValueError where this name is another one's already."""
    if schemas.setdefault(name, schema) != schema:
        raise ValueError(f"two schemas of the OpenAPI document are named {name}")


def describe(app: FastAPI, *, keys: bool) -> None:
    """Put the models' schemas into the app's document; `keys` says that the routes ask for one."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for model in _MODELS.values():
                schema = model.model_json_schema(ref_template=_REFERENCE)
                for name, part in {**schema.pop("$defs", {}), model.__name__: schema}.items():
                    _add_schema(schemas, name, part)
            if keys:
                components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"bearer": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents replacing it

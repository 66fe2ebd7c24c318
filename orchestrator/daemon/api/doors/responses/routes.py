"""`/v1/responses`: answered through the chat route's ways, and kept for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from orchestrator.daemon.api.body_bounds import refuse_oversized
from orchestrator.daemon.api.doors.parts import refuse_resumption
from orchestrator.daemon.api.doors.responses.answers import DeletedResponse, InputTokens, ResponseEvent, ResponseObject
from orchestrator.daemon.api.doors.responses.items import Item
from orchestrator.daemon.api.doors.responses.store import ResponseStore, StoredResponse
from orchestrator.daemon.api.doors.responses.translate import NAMES, build_chat
from orchestrator.daemon.api.doors.responses.wire import CountInputRequest, ResponsesRequest
from orchestrator.daemon.api.doors.responses.writer import Keep, ResponseWriter
from orchestrator.daemon.api.errors import parse_body
from orchestrator.daemon.api.follow import RESPONSE_PREFIX
from orchestrator.daemon.api.keys import OWNER
from orchestrator.daemon.api.openapi import operation
from orchestrator.daemon.api.question import AnswerHead, Question
from orchestrator.daemon.api.responses import json_response
from orchestrator.daemon.api.translate import prompt_of
from orchestrator.errors import RequestError

if TYPE_CHECKING:  # it imports us
    from orchestrator.daemon.api.app import ApiRoutes

ROUTE = "/v1/responses"
_STATUSES = (400, 401, 404, 410, 413, 415, 422, 429, 500, 503, 504)  # HTTP's
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_encode = msgspec.json.Encoder().encode


class ResponsesRoutes:
    def __init__(self, api: ApiRoutes, store: ResponseStore) -> None:
        self._api = api
        self._store = store

    async def create(self, request: Request) -> Response:
        """Serve `POST /v1/responses`."""
        refuse_resumption(request)
        owner = request.scope.get(OWNER, "")
        return await self._api.answer(request, lambda raw: self._read(raw, owner))

    async def count(self, request: Request) -> Response:
        """Serve `POST /v1/responses/input_tokens`."""
        owner = request.scope.get(OWNER, "")
        return await self._api.do_with_body(request, lambda raw: self._count(raw, owner))

    def _count(self, raw: bytes, owner: str) -> Response:
        model = self._api.models.choose(raw)
        tokenizer, context = model.require_ready()
        refuse_oversized(raw, tokenizer, context, self._api.max_parameter_bytes)
        body: CountInputRequest = parse_body(CountInputRequest, raw)
        self._api.models.confirm(model, body.model or None)
        chat = build_chat(body, [*self._find_items(body.previous_response_id, owner), *body.items])
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt_of(chat, tokenizer))})

    def require(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response that is kept. Raises RequestError 404."""
        response = self._store.find(owner, response_id)
        if response is None:
            raise _not_found(response_id)
        return response

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises RequestError 404."""
        if not self._store.delete(owner, response_id):
            raise _not_found(response_id)

    def _read(self, raw: bytes, owner: str) -> Question:
        body: ResponsesRequest = parse_body(ResponsesRequest, raw)
        items = [*self._find_items(body.previous_response_id, owner), *body.items]
        chat = build_chat(body, items)
        keep = self._build_keep(body, items, owner)

        def build_writer(head: AnswerHead) -> ResponseWriter:
            return ResponseWriter(head, body, chat, keep)

        return Question(chat, ROUTE, RESPONSE_PREFIX, build_writer, NAMES, resumable=False, unused=body.unused)

    def _find_items(self, previous: str | None, owner: str) -> list[Item]:
        if previous is None:
            return []
        response = self._store.find(owner, previous)
        if response is None:
            raise RequestError(
                f"no response '{previous}' is kept here: send the whole conversation as 'input' ({self._describe()})",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return _ITEMS.validate_json(response.items)

    def _describe(self) -> str:
        bounds = self._store.bounds
        if not bounds.stored_responses:
            return "none are kept: api.stored_responses is 0"
        return f"the last {bounds.stored_responses} are kept, for {bounds.stored_responses_s:g} s"

    def _build_keep(self, body: ResponsesRequest, items: Sequence[Item], owner: str) -> Keep | None:
        """Return what keeps a response; None where it is not to be kept. Raises RequestError."""
        if not self._store.bounds.stored_responses:
            if body.store:
                text = "responses are not kept here: send 'store': false, or ask the operator for api.stored_responses"
                raise RequestError(text, code="not_supported", param="store")
            return None
        if body.store is False:
            return None

        def keep(response_id: str, response: dict[str, Any]) -> None:
            conversation = [item.model_dump(exclude_none=True) for item in items]
            self._store.put(owner, response_id, _encode(response), _encode([*conversation, *response["output"]]))

        return keep


def install_responses_routes(app: FastAPI, api: ApiRoutes, store: ResponseStore) -> None:
    routes = ResponsesRoutes(api, store)
    create = operation(ResponsesRequest, ResponseObject, events=ResponseEvent, statuses=_STATUSES)
    app.post(ROUTE, **create)(routes.create)

    counts = (400, 401, 404, 413, 415, 429, 500, 503)
    app.post(f"{ROUTE}/input_tokens", **operation(CountInputRequest, InputTokens, statuses=counts))(routes.count)

    @app.post(f"{ROUTE}/compact", include_in_schema=False)
    async def compact(_: Request) -> Response:
        text = f"there is no route POST {ROUTE}/compact: conversations are not compacted here, so send a shorter one"
        raise RequestError(text, status=404, code="route_not_found")

    @app.get(f"{ROUTE}/{{response_id}}", **operation(None, ResponseObject, statuses=(400, 401, 404)))
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("", "0", "false"):
            text = "responses that are kept are not streamed: send the request without 'stream'"
            raise RequestError(text, code="not_supported", param="stream")
        response = routes.require(request.scope.get(OWNER, ""), response_id)
        return Response(response.body, media_type="application/json")

    @app.delete(f"{ROUTE}/{{response_id}}", **operation(None, DeletedResponse, statuses=(401, 404)))
    async def delete(request: Request, response_id: str) -> Response:
        routes.delete(request.scope.get(OWNER, ""), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post(f"{ROUTE}/{{response_id}}/cancel", **operation(None, None, statuses=(400, 401, 404, 429)))
    async def cancel(request: Request, response_id: str) -> Response:
        routes.require(request.scope.get(OWNER, ""), response_id)
        text = "only responses in the background could be cancelled, and none are made: close the connection instead"
        raise RequestError(text, code="not_supported", param="response_id")


def _not_found(response_id: str) -> RequestError:
    return RequestError(
        f"no response '{response_id}' is kept here, or another API key asked for it",
        status=404,
        code="response_not_found",
        param="response_id",
    )

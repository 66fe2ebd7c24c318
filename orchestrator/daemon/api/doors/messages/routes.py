"""`/v1/messages`: answered through the chat route's ways."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from orchestrator.daemon.api.body_bounds import refuse_oversized
from orchestrator.daemon.api.doors.messages import answers
from orchestrator.daemon.api.doors.messages.translate import build_chat, name_parameters
from orchestrator.daemon.api.doors.messages.wire import CountTokensRequest, MessagesRequest
from orchestrator.daemon.api.doors.messages.writer import MessageWriter
from orchestrator.daemon.api.doors.parts import refuse_resumption
from orchestrator.daemon.api.errors import ANTHROPIC, parse_body
from orchestrator.daemon.api.openapi import operation
from orchestrator.daemon.api.question import AnswerHead, Question
from orchestrator.daemon.api.responses import json_response
from orchestrator.daemon.api.translate import prompt_of
from orchestrator.errors import RequestError

if TYPE_CHECKING:  # it imports us
    from orchestrator.daemon.api.app import ApiRoutes

_VERSION_HEADER = "anthropic-version"
_FIRST_VERSION = "2023-06-01"
_VERSION = re.compile(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}")
_COUNT = f"{ANTHROPIC}/count_tokens"


def install_messages_routes(app: FastAPI, api: ApiRoutes) -> None:
    def describe(request: Any, answer: Any, statuses: tuple[int, ...], events: Any = None) -> dict[str, Any]:
        return operation(request, answer, events=events, statuses=statuses, error=answers.MessageErrorBody)

    def count(raw: bytes) -> Response:
        model = api.models.choose(raw)
        tokenizer, context = model.require_ready()
        refuse_oversized(raw, tokenizer, context, api.max_parameter_bytes)
        body: CountTokensRequest = parse_body(CountTokensRequest, raw)
        api.models.confirm(model, body.model)
        return json_response({"input_tokens": len(prompt_of(build_chat(body), tokenizer))})

    generates = (400, 401, 404, 410, 413, 415, 422, 429, 500, 503, 504)

    @app.post(ANTHROPIC, **describe(MessagesRequest, answers.AnthropicMessage, generates, answers.AnthropicEvent))
    async def messages(request: Request) -> Response:
        _check_version(request)
        refuse_resumption(request)
        return await api.answer(request, _read)

    @app.post(_COUNT, **describe(CountTokensRequest, answers.TokenCount, (400, 401, 404, 413, 415, 429, 500, 503)))
    async def count_tokens(request: Request) -> Response:
        _check_version(request)
        return await api.do_with_body(request, count)


def _read(raw: bytes) -> Question:
    body: MessagesRequest = parse_body(MessagesRequest, raw)
    chat = build_chat(body)

    def build_writer(head: AnswerHead) -> MessageWriter:
        return MessageWriter(head, chat, omits_thoughts=body.thinking.display == "omitted")

    names = name_parameters(body)
    return Question(chat, ANTHROPIC, "msg_", build_writer, names, resumable=False, clips=True, unused=body.unused)


def _check_version(request: Request) -> None:
    """Raise RequestError for a version before that of the events that are served; those since then have them too."""
    given = request.headers.get(_VERSION_HEADER, _FIRST_VERSION)
    if not _VERSION.fullmatch(given) or given < _FIRST_VERSION:
        text = f"'{_VERSION_HEADER}' is none that is served here: send {_FIRST_VERSION} or later, or leave it out"
        raise RequestError(text, code="not_supported", param=_VERSION_HEADER)

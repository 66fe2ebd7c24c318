"""The public API. Holds no model: it translates, asks control, and turns tokens into text."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from orchestrator.api import errors, translate
from orchestrator.api.follow import Follow
from orchestrator.api.metrics import Metrics
from orchestrator.api.openapi import describe, request_body
from orchestrator.api.port import TokenizerPort
from orchestrator.api.request_scope import RequestScope, followed
from orchestrator.api.responses import DONE, Envelope, EventStream, Kind, event, json_response, unless_gone
from orchestrator.api.streaming import Answer, TextAssembler, texts
from orchestrator.api.wire import ChatRequest, CompletionRequest, Generation
from orchestrator.clock import Clock
from orchestrator.cluster.port import Submit
from orchestrator.control.port import Control
from orchestrator.errors import RequestError

_NOT_READY_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds of the API. `log_words`: the log has requests' and answers' text, and what bugs say."""

    max_body_bytes: int
    log_words: bool = False


class Api:
    """The routes' shared ground."""

    def __init__(
        self,
        control: Control,
        tokenizer: Callable[[], TokenizerPort | None],
        model_name: Callable[[], str],
        settings: ApiSettings,
        clock: Clock,
    ) -> None:
        self.control = control
        self.model_name = model_name
        self.metrics = Metrics(control, clock)
        self._tokenizer = tokenizer
        self._settings = settings
        self._clock = clock

    async def completions(self, request: Request) -> Response:
        """Serve `/v1/completions`."""
        body = errors.parse(CompletionRequest, await self._read(request))
        tokenizer, context = self._loaded(body.model)
        submit = translate.completion(body, _request_id("cmpl"), tokenizer, context, _seed)
        return await self._answer("completion", request, body, submit, tokenizer)

    async def chat(self, request: Request) -> Response:
        """Serve `/v1/chat/completions`."""
        body = errors.parse(ChatRequest, await self._read(request))
        tokenizer, context = self._loaded(body.model)
        submit = translate.chat(body, _request_id("chatcmpl"), tokenizer, context, _seed)
        return await self._answer("chat", request, body, submit, tokenizer)

    def models(self) -> list[dict[str, Any]]:
        """Return the served models."""
        view = self.control.view()
        created = int(self._clock.wall_s() - view.uptime_s)
        entry: dict[str, Any] = {
            "id": self.model_name(),
            "object": "model",
            "created": created,
            "owned_by": "outrider",
        }
        if view.ready is not None:
            entry["max_model_len"] = view.ready.context_tokens
        return [entry]

    def _loaded(self, model: str) -> tuple[TokenizerPort, int]:
        """Return the tokenizer and the context length. Raises RequestError 404 or 503."""
        view = self.control.view()
        if self.model_name() and model != self.model_name():
            raise RequestError(
                f"there is no model '{model}' here; there is '{self.model_name()}'",
                status=404,
                code="model_not_found",
                param="model",
            )
        tokenizer = self._tokenizer()
        if tokenizer is None or view.ready is None:
            raise not_ready(self.control)
        return tokenizer, view.ready.context_tokens

    async def _read(self, request: Request) -> bytes:
        """Read the body, stopping at the limit. Raises RequestError 413."""
        most = self._settings.max_body_bytes
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise RequestError(f"the body is larger than {most} bytes", status=413, code="body_too_large")
        return bytes(body)

    async def _answer(
        self, kind: Kind, request: Request, body: Generation, submit: Submit, tokenizer: TokenizerPort
    ) -> Response:
        answer = Answer(started_s=self._clock.monotonic_s())
        follow = Follow(self.metrics, self._clock, keep_words=self._settings.log_words)
        followed(request.scope)
        follow.accepted(request.url.path, submit, body)
        assembler = TextAssembler(tokenizer.decoder(), body.stops)
        source = follow.deltas(submit, self.control.generate(submit))
        pieces = texts(source, assembler, frozenset(submit.stop_tokens), answer, self._clock)
        created = int(self._clock.wall_s())
        envelope = Envelope(kind, submit.request_id, created, self.model_name(), len(submit.prompt))
        with follow.to_the_headers():
            if body.stream:
                # The first piece is awaited before the headers go, so that a refusal still has its own status.
                first = await unless_gone(request.receive, anext(pieces, ""))
                if first is None:
                    await pieces.aclose()
                    return follow.gone()
                usage = body.stream_options is not None and body.stream_options.include_usage
                events = self._events(envelope, first, pieces, answer, follow, usage)
                return EventStream(events, pieces, follow.gone)
            text = await unless_gone(request.receive, _collect(pieces))
            if text is None:
                return follow.gone()
        follow.wrote(text)
        follow.ended(HTTPStatus.OK)
        return json_response(envelope.whole(text, answer))

    async def _events(
        self,
        envelope: Envelope,
        first: str,
        pieces: AsyncGenerator[str, None],
        answer: Answer,
        follow: Follow,
        usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces):
            opening = envelope.opening()
            follow.wrote(first)
            yield opening + envelope.piece(first) if first else opening
            try:
                async for piece in pieces:
                    follow.wrote(piece)
                    yield envelope.piece(piece)
            except Exception as error:  # the status is out: whatever it is, the client can only be told here
                known = error if isinstance(error, RequestError) else follow.bug(error)
                follow.ended(known.status, reason=known.code)
                yield event(errors.body_of(known)) + DONE
                return
            follow.ended(HTTPStatus.OK)
            yield envelope.ending(answer.finish) + (envelope.usage(answer) if usage else b"") + DONE


def create_app(
    control: Control,
    tokenizer: Callable[[], TokenizerPort | None],
    model_name: Callable[[], str],
    settings: ApiSettings,
    clock: Clock,
) -> FastAPI:
    """Return the app. `tokenizer` gives None, and `model_name` may give "", until the worker is ready."""
    app = FastAPI(title="Outrider", version=version("outrider"), docs_url="/docs", redoc_url=None)
    api = Api(control, tokenizer, model_name, settings, clock)
    app.state.metrics = api.metrics
    errors.install(app)
    app.add_middleware(RequestScope, log_words=settings.log_words)
    app.post("/v1/completions", openapi_extra=request_body(CompletionRequest))(api.completions)
    app.post("/v1/chat/completions", openapi_extra=request_body(ChatRequest))(api.chat)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": api.models()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != model_name():
            raise RequestError(f"there is no model '{name}' here", status=404, code="model_not_found", param="model")
        return api.models()[0]

    _probes(app, api)
    describe(app, [CompletionRequest, ChatRequest])
    return app


def _probes(app: FastAPI, api: Api) -> None:
    @app.get("/health")
    async def health() -> Response:
        view = api.control.view()
        if view.phase == "failed":
            return errors.response_of(not_ready(api.control))
        return JSONResponse({"status": "ok", "phase": view.phase, "detail": view.detail})

    @app.get("/ready")
    async def ready() -> Response:
        view = api.control.view()
        if view.phase != "ready" or api._tokenizer() is None:
            return errors.response_of(not_ready(api.control))
        return JSONResponse({"status": "ready", "model": api.model_name()})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(api.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def served_version() -> dict[str, str]:
        return {"version": version("outrider")}


def not_ready(control: Control) -> RequestError:
    """Return the 503 that says what the daemon is doing."""
    view = control.view()
    detail = f": {view.detail}" if view.detail else ""
    return RequestError(
        f"the model is {view.phase}{detail}",
        status=503,
        kind="server_error",
        code="model_not_ready",
        retry_after_s=_NOT_READY_RETRY_S,
    )


async def _collect(pieces: AsyncGenerator[str, None]) -> str:
    async with aclosing(pieces):
        return "".join([piece async for piece in pieces])


def _request_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _seed() -> int:
    return secrets.randbits(64)

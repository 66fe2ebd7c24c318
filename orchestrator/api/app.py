"""The public API. Holds no model: it translates, asks control, and turns tokens into text."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from device_profiles.units import MS_PER_S
from orchestrator.api import errors, probes, tokenize, translate
from orchestrator.api.acceptance import AcceptanceBounds
from orchestrator.api.answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, Model, ModelList
from orchestrator.api.batches.inside import ask_inside
from orchestrator.api.batches.routes import install_batch_routes
from orchestrator.api.batches.service import BatchService
from orchestrator.api.batches.store import BatchStore
from orchestrator.api.body_bounds import refuse_oversized
from orchestrator.api.choices import choices_of, cost_of, merge_pieces, pieces_of
from orchestrator.api.connections import Connections
from orchestrator.api.fingerprint import describe_source
from orchestrator.api.follow import RequestRecord, VariantReport
from orchestrator.api.grammar_checks import GrammarChecks
from orchestrator.api.keys import OWNER, KeyGate, Keys
from orchestrator.api.liveness import Liveness
from orchestrator.api.logprobs import chat_logprobs, completion_logprobs
from orchestrator.api.metrics.collector import Metrics
from orchestrator.api.metrics.cost_series import NO_PRICE, HourlyPrice
from orchestrator.api.metrics.request_timing import RequestTotals
from orchestrator.api.openapi import describe, operation
from orchestrator.api.port import TokenizerPort
from orchestrator.api.request_scope import RequestScope, mark_followed
from orchestrator.api.responses import DONE, Envelope, EventStream, Kind, event, json_response, unless_gone
from orchestrator.api.resume import EventCursor, KeptAnswers, Resumption, wants_names
from orchestrator.api.shares import BodyBudget, BodyShare, KeyShares, ShareGate
from orchestrator.api.streaming import Choice, Piece
from orchestrator.api.wire import ChatRequest, CompletionRequest, StreamOptions
from orchestrator.api.work_lanes import WorkLanes
from orchestrator.batches.lines import BatchLine
from orchestrator.batches.run import Answer
from orchestrator.clock import Clock
from orchestrator.control.canary import CanaryTrial
from orchestrator.control.port import Control
from orchestrator.errors import RequestError
from orchestrator.journal.book import AnswerBook
from orchestrator.workers.messages import Delta, Submit
from policies.serving.slo import NO_OBJECTIVES, Objectives

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds of the API: of one body, of its part beside the prompt, of its grammar, and of all bodies that are read or
    translated at a time; how long that may take; and what one key may have (0: no limit). `log_words`: the log has
    requests' and answers' text, and what bugs say. `keys`: None asks for none. `stalled_after_s`: see liveness.
    `vllm_metric_names`: see metrics. `acceptance`: the rules that requests may ask for. `objectives`: what they are to
    have. `connections`: those of the server, for the metrics. `places`: of one replica. `price`: of this machine."""

    max_body_bytes: int
    max_parameter_bytes: int = 256 * 1024
    max_grammar_bytes: int = 64 * 1024
    max_bodies_bytes: int = 64 * 1024 * 1024
    translation_timeout_s: float = 10.0
    max_requests_per_key: int = 0
    max_tokens_per_minute_per_key: int = 0
    log_words: bool = False
    keys: Keys | None = None
    stalled_after_s: float = 30.0
    vllm_metric_names: bool = False
    acceptance: AcceptanceBounds = field(default_factory=AcceptanceBounds)
    objectives: Objectives = NO_OBJECTIVES
    connections: Connections | None = None
    places: int = 1
    price: HourlyPrice = NO_PRICE


class ApiRoutes:
    """The routes' shared ground."""

    def __init__(
        self,
        control: Control,
        tokenizer: Callable[[], TokenizerPort | None],
        model_name: Callable[[], str],
        settings: ApiSettings,
        clock: Clock,
        trial: CanaryTrial | None = None,
        kept: KeptAnswers | None = None,
    ) -> None:
        self.control = control
        self._trial = trial
        self._kept = kept
        self.model_name = model_name
        self.bodies = BodyBudget(settings.max_bodies_bytes)
        self.metrics = Metrics(
            control,
            clock,
            vllm_names=settings.vllm_metric_names,
            objectives=settings.objectives,
            trial_view=trial.view if trial is not None else None,
            connections=settings.connections,
            bodies=self.bodies,
            price=settings.price,
        )
        self.liveness = Liveness(control, clock, settings.stalled_after_s)
        self.tokenizer = tokenizer
        self.shares = KeyShares(
            clock,
            most_requests=settings.max_requests_per_key,
            tokens_per_minute=settings.max_tokens_per_minute_per_key,
        )
        self._lanes = WorkLanes(settings.translation_timeout_s)
        self._grammars = GrammarChecks(settings.max_grammar_bytes, settings.translation_timeout_s)
        self._coming = 0
        self._settings = settings
        self._clock = clock

    async def completions(self, request: Request) -> Response:
        """Serve `/v1/completions`."""
        return await self._serve("completion", request, CompletionRequest, translate.completion)

    async def chat(self, request: Request) -> Response:
        """Serve `/v1/chat/completions`."""
        return await self._serve("chat", request, ChatRequest, translate.chat)

    async def answer_line(self, line: BatchLine, request_id: str, owner: str, begin: Callable[[], None]) -> Answer:
        """Answer a line of a batch of this owner's, as its route would."""
        if owner:
            try:
                self.shares.check_tokens(owner)
            except RequestError as error:
                return Answer(error.status, errors.body_of(error), request_id, error.retry_after_s)
        route = self.chat if line.url.endswith("/chat/completions") else self.completions
        return await ask_inside(route, line, request_id, owner, begin, log_words=self._settings.log_words)

    async def _serve(
        self, kind: Kind, request: Request, wire: type[_Body], translated: translate.Translate[_Body]
    ) -> Response:
        arrived_s = self._clock.monotonic_s()
        new = self._kept is None or not self._kept.knows(request.headers)  # what is kept has its room
        if new:
            self.control.check_room(self._coming)
        body, submit, tokenizer = await self._translate(kind, request, wire, translated, new=new)
        found = None if self._kept is None else self._kept.find(request.headers, body)
        if found is not None:
            return await self._answer(kind, request, body, found.submits, tokenizer, arrived_s, found)
        submit, arm = self._enter_trial(submit)
        asked = translate.choices(submit, body.n)
        found = None if self._kept is None else self._kept.open(request.headers, body, asked, submit.request_id)
        asked = asked if found is None else found.submits
        return await self._answer(kind, request, body, asked, tokenizer, arrived_s, found, arm)

    async def _translate(
        self, kind: Kind, request: Request, wire: type[_Body], translated: translate.Translate[_Body], *, new: bool
    ) -> tuple[_Body, Submit, TokenizerPort]:
        """Read a body and translate it, off the event loop. Raises RequestError."""
        bounds, owner = self._settings.acceptance, request.scope.get(OWNER, "")

        def work(raw: bytes) -> tuple[_Body, Submit, TokenizerPort]:
            served = self._find_served()
            if served is not None:
                refuse_oversized(raw, *served, self._settings.max_parameter_bytes)
            body: _Body = errors.parse_body(wire, raw)
            tokenizer, context = self.resolve_model(body.model)
            submit = translated(body, _request_id(kind), tokenizer, context, _seed, bounds)
            return body, msgspec.structs.replace(submit, owner=owner), tokenizer

        with self.bodies.hold() as share:
            raw = await self._read(request, share)
            if new:
                self.control.check_room(self._coming)
            self._coming += 1  # from here on: whoever sends a body slowly takes no place
            try:
                found = await self._lanes.do(len(raw), work, raw)
                grammar = found[1].grammar
                if grammar is not None:
                    await self._grammars.check(grammar, "tools" if _offers_tools(found[0]) else "response_format")
            finally:
                self._coming -= 1
        return found

    async def do_with_body(self, request: Request, work: Callable[[bytes], _T]) -> _T:
        """Read a body, and return what this work makes of it, off the event loop. Raises RequestError."""
        with self.bodies.hold() as share:
            raw = await self._read(request, share)
            return await self._lanes.do(len(raw), work, raw)

    def _find_served(self) -> tuple[TokenizerPort, int] | None:
        """Return the tokenizer and the context's length, once a model is there."""
        tokenizer, ready = self.tokenizer(), self.control.view().ready
        return None if tokenizer is None or ready is None else (tokenizer, ready.context_tokens)

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

    def resolve_model(self, model: str | None) -> tuple[TokenizerPort, int]:
        """Return the tokenizer and the context length; `model` None is the served one. Raises RequestError 404, 503."""
        view = self.control.view()
        if self.model_name() and model is not None and model != self.model_name():
            raise RequestError(
                f"there is no model '{model}' here; there is '{self.model_name()}'",
                status=404,
                code="model_not_found",
                param="model",
            )
        tokenizer = self.tokenizer()
        if tokenizer is None or view.ready is None:
            raise probes.not_ready(self.control)
        return tokenizer, view.ready.context_tokens

    async def _read(self, request: Request, share: BodyShare) -> bytes:
        """Read the body, stopping at the limit. Raises RequestError 413, or 415 for a body that is no JSON."""
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise RequestError(
                f"the body is declared as {kind!r}: send JSON, with 'Content-Type: application/json'",
                status=415,
                code="unsupported_media_type",
            )
        most = self._settings.max_body_bytes
        declared = request.headers.get("Content-Length", "")
        body = bytearray()
        too_large = RequestError(f"the body is larger than {most} bytes", status=413, code="body_too_large")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
            share.resize(len(body))
        return bytes(body)

    async def _answer(
        self,
        kind: Kind,
        request: Request,
        body: CompletionRequest | ChatRequest,
        asked: list[Submit],
        tokenizer: TokenizerPort,
        arrived_s: float,
        kept: Resumption | None,
        arm: VariantReport | None = None,
    ) -> Response:
        again = kept is not None and kept.again
        spend = (lambda _: None) if again else partial(self.shares.spend, asked[0].owner)
        words = self._settings.log_words
        follow = RequestRecord(self.metrics, self._clock, arrived_s, keep_words=words, arm=arm, spend=spend)
        mark_followed(request.scope)
        follow.log_accepted(request.url.path, asked[0], body, resumed=again)
        self.liveness.observe_request()
        choices = choices_of(body, asked, tokenizer, arrived_s)
        told = [self._deltas(*pair, kept, follow) for pair in zip(asked, choices, strict=True)]
        texts = [
            pieces_of(body, submit.request_id, deltas, choice, self._clock)
            for submit, deltas, choice in zip(asked, told, choices, strict=True)
        ]
        pieces = merge_pieces(texts)
        submit = asked[0]
        cursor = None if kept is None else kept.cursor(names=wants_names(request.headers))
        envelope = self._envelope(kind, body, submit, tokenizer, kept, cursor)
        with follow.to_the_headers():
            if body.stream:
                # The first piece is awaited before the headers go, so that a refusal still has its own status.
                first = await unless_gone(request.receive, anext(pieces, Piece(0, "")))
                if first is None:
                    await pieces.aclose()
                    return follow.end_disconnected()
                options = body.stream_options or StreamOptions()
                events = self._events(envelope, first, pieces, choices, follow, options)
                envelope.observe_engine(choices[0].answer.engine)
                return EventStream(events, pieces, follow.end_disconnected, envelope.headers(choices[0].answer))
            found = await unless_gone(request.receive, _collect(pieces))
            if found is None:
                return follow.end_disconnected()
        follow.record_sent(*found)
        follow.log_end(HTTPStatus.OK)
        cost = cost_of(choices)
        envelope.observe_engine(cost.engine)
        return json_response(envelope.whole(found, cost), envelope.headers(cost))

    def _deltas(
        self, submit: Submit, choice: Choice, kept: Resumption | None, follow: RequestRecord
    ) -> AsyncGenerator[Delta, None]:
        """Return a choice's tokens; those of an answer that is told again are measured already."""
        if kept is None or self._kept is None:
            return follow.deltas(submit, self.control.generate(submit))
        source = self._kept.deltas(kept, choice.index, lambda: bool(choice.answer.finish))
        return source if kept.again else follow.deltas(submit, source)

    def _enter_trial(self, submit: Submit) -> tuple[Submit, VariantReport | None]:
        """Give a request its variant, where a canary is tried; all its choices share it."""
        if self._trial is None:
            return submit, None
        trial = self._trial
        submit, entry = trial.assign_variant(submit)

        def end_trial_entry(done: RequestTotals) -> None:
            ttft_ms, tpot_ms = (None if each is None else each * MS_PER_S for each in (done.ttft_s, done.tpot_s))
            trial.end_entry(entry, ttft_ms=ttft_ms, tpot_ms=tpot_ms, acceptance=done.acceptance)

        return submit, VariantReport(entry.arm.value, end_trial_entry) if entry.counted else None

    def _envelope(
        self,
        kind: Kind,
        body: CompletionRequest | ChatRequest,
        submit: Submit,
        tokenizer: TokenizerPort,
        kept: Resumption | None,
        cursor: EventCursor | None,
    ) -> Envelope:
        rendered = chat_logprobs if kind == "chat" else completion_logprobs
        rule = submit.sampling.rule
        return Envelope(
            kind,
            submit.request_id if kept is None else kept.answer.request_id,
            int(self._clock.wall_s()) if kept is None else kept.answer.created_s,
            self.model_name(),
            len(submit.prompt),
            lambda engine: describe_source(self.control.view(), engine, rule),
            rule,
            None if body.wanted_logprobs is None else lambda tokens: rendered(tokens, tokenizer),
            cursor,
        )

    async def _events(
        self,
        envelope: Envelope,
        first: Piece,
        pieces: AsyncGenerator[Piece, None],
        choices: list[Choice],
        follow: RequestRecord,
        options: StreamOptions,
    ) -> AsyncGenerator[bytes, None]:
        always = options.include_usage and options.continuous_usage_stats

        def render_piece(piece: Piece) -> bytes:
            follow.record_sent(piece)
            envelope.observe_engine(choices[piece.index].answer.engine)
            return envelope.piece(piece, choices[piece.index].answer.tokens if always else None)

        async with aclosing(pieces):
            yield envelope.opening(len(choices), usage=always) + render_piece(first)
            try:
                async for piece in pieces:
                    yield render_piece(piece)
            except Exception as error:  # the status is out: whatever it is, the client can only be told here
                known = error if isinstance(error, RequestError) else follow.bug(error)
                follow.log_end(known.status, reason=known.code)
                yield event(errors.body_of(known)) + DONE
                return
            follow.log_end(HTTPStatus.OK)
            yield (envelope.usage(cost_of(choices)) if options.include_usage else b"") + DONE


def create_app(
    control: Control,
    tokenizer: Callable[[], TokenizerPort | None],
    model_name: Callable[[], str],
    settings: ApiSettings,
    clock: Clock,
    trial: CanaryTrial | None = None,
    book: AnswerBook | None = None,
    batches: BatchStore | None = None,
) -> FastAPI:
    """Return the app. `tokenizer` gives None, and `model_name` may give "", until the worker is ready. `trial`: of a
    canary, where there is one. `book` keeps answers that may be resumed; without one none are. `batches` keeps files
    and batches; without it their routes answer 404."""
    app = FastAPI(title="Outrider", version=version("outrider"), docs_url="/docs", redoc_url=None)
    kept = None if book is None else KeptAnswers(control, book, clock)
    api = ApiRoutes(control, tokenizer, model_name, settings, clock, trial, kept)
    app.state.kept = kept
    app.state.slo = api.metrics.slo.view
    app.state.costs = api.metrics.view_costs
    app.state.speed = api.metrics.speed.view
    app.state.on_round = [api.metrics.observe_round, api.liveness.observe_round]
    errors.install_error_handlers(app)
    if settings.keys is not None:
        app.add_middleware(ShareGate, shares=api.shares)
        app.add_middleware(KeyGate, keys=settings.keys)
    app.add_middleware(RequestScope, log_words=settings.log_words)
    generate = (400, 401, 404, 413, 415, 422, 429, 500, 503, 504)
    text = operation(CompletionRequest, Completion, events=CompletionChunk, statuses=generate)
    chat = operation(ChatRequest, ChatCompletion, events=ChatCompletionChunk, statuses=generate)
    app.post("/v1/completions", **text)(api.completions)
    app.post("/v1/chat/completions", **chat)(api.chat)

    @app.get("/v1/models", **operation(None, ModelList, statuses=(401,)))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": api.models()}

    @app.get("/v1/models/{name:path}", **operation(None, Model, statuses=(401, 404)))
    async def model(name: str) -> dict[str, Any]:
        if name != model_name():
            raise RequestError(f"there is no model '{name}' here", status=404, code="model_not_found", param="model")
        return api.models()[0]

    tokenize.install_tokenize_routes(app, api, settings.max_parameter_bytes)
    service = None
    if batches is not None:
        service = BatchService(batches, control, api.answer_line, clock, settings.places)
        api.metrics.observe_batches(service)
    app.state.batches = service
    install_batch_routes(app, service, api)
    probes.install_probe_routes(app, api)
    describe(app, keys=settings.keys is not None)
    return app


async def _collect(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


def _offers_tools(body: CompletionRequest | ChatRequest) -> bool:
    return isinstance(body, ChatRequest) and bool(body.offered)


def _request_id(kind: Kind) -> str:
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"


def _seed() -> int:
    return secrets.randbits(64)

"""The public API. Holds no model: it translates, asks control, and turns tokens into text."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
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
from orchestrator.api.access import Access, install_gates
from orchestrator.api.answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, Model, ModelList
from orchestrator.api.batches.inside import ask_inside
from orchestrator.api.batches.routes import install_batch_routes
from orchestrator.api.batches.service import BatchService
from orchestrator.api.batches.store import BatchStore
from orchestrator.api.body_bounds import refuse_oversized
from orchestrator.api.choices import choices_of, cost_of, merge_pieces, pieces_of
from orchestrator.api.connections import Connections
from orchestrator.api.docs_page import install_docs_page
from orchestrator.api.fingerprint import describe_source
from orchestrator.api.follow import RequestRecord, VariantReport
from orchestrator.api.grammar_checks import GrammarChecks
from orchestrator.api.keys import OWNER, Keys, check_owner, limits_of
from orchestrator.api.liveness import Liveness
from orchestrator.api.logprobs import chat_logprobs, completion_logprobs
from orchestrator.api.metrics.collector import Metrics
from orchestrator.api.metrics.page import MetricsPage
from orchestrator.api.metrics.request_timing import RequestTotals
from orchestrator.api.openapi import describe, operation
from orchestrator.api.port import TokenizerPort
from orchestrator.api.request_scope import RequestScope, mark_followed
from orchestrator.api.responses import DONE, Envelope, EventStream, Kind, event, json_response, unless_gone
from orchestrator.api.resume import EventCursor, KeptAnswers, Resumption, wants_names
from orchestrator.api.served import ServedModel, ServedModels, ServedTarget
from orchestrator.api.shares import BodyBudget, BodyShare, KeyShares
from orchestrator.api.streaming import Choice, Piece
from orchestrator.api.wire import ChatRequest, CompletionRequest, StreamOptions
from orchestrator.api.work_lanes import WorkLanes
from orchestrator.batches.lines import BatchLine
from orchestrator.batches.run import Answer
from orchestrator.clock import Clock
from orchestrator.control.port import Control
from orchestrator.errors import RequestError
from orchestrator.journal.book import AnswerBook
from orchestrator.workers.messages import Delta, Submit

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds of the API: of one body, of its part beside the prompt, of its grammar, and of all bodies that are read or
    translated at a time; how long that may take; and what one key may have (0: no limit). `log_words`: the log has
    requests' and answers' text, and what bugs say. `keys`: None asks for none. `access`: what else is asked of those
    who use the API. `stalled_after_s`: see liveness. `vllm_metric_names`: see metrics. `connections`: those of the
    server, for the metrics."""

    max_body_bytes: int
    max_parameter_bytes: int = 256 * 1024
    max_grammar_bytes: int = 64 * 1024
    max_bodies_bytes: int = 64 * 1024 * 1024
    translation_timeout_s: float = 10.0
    max_requests_per_key: int = 0
    max_tokens_per_minute_per_key: int = 0
    log_words: bool = False
    keys: Keys | None = None
    access: Access = field(default_factory=Access)
    stalled_after_s: float = 30.0
    vllm_metric_names: bool = False
    connections: Connections | None = None


class ApiRoutes:
    """The routes' shared ground."""

    def __init__(
        self,
        targets: Sequence[ServedTarget],
        settings: ApiSettings,
        clock: Clock,
        book: AnswerBook | None = None,
    ) -> None:
        self.bodies = BodyBudget(settings.max_bodies_bytes)
        self._settings = settings
        self._clock = clock
        self.models = ServedModels(
            [self._build_model(target, first=number == 0) for number, target in enumerate(targets)], clock
        )
        self.page = MetricsPage([one.metrics for one in self.models])
        self.kept = None if book is None else KeptAnswers(self.models.find_control, book, clock)
        self.shares = KeyShares(
            clock,
            most_requests=settings.max_requests_per_key,
            tokens_per_minute=settings.max_tokens_per_minute_per_key,
            own=limits_of(settings.keys),
        )
        self._lanes = WorkLanes(settings.translation_timeout_s)
        self._grammars = GrammarChecks(settings.max_grammar_bytes, settings.translation_timeout_s)

    def _build_model(self, target: ServedTarget, *, first: bool) -> ServedModel:
        """Return a model; connections and bodies are everybody's, and told with the first."""
        metrics = Metrics(
            target.control,
            self._clock,
            vllm_names=self._settings.vllm_metric_names,
            objectives=target.terms.objectives,
            trial_view=target.trial.view if target.trial is not None else None,
            connections=self._settings.connections if first else None,
            bodies=self.bodies if first else None,
            price=target.terms.price,
        )
        liveness = Liveness(target.control, self._clock, self._settings.stalled_after_s)
        return ServedModel(target, metrics, liveness)

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
                check_owner(self._settings.keys, owner)
                self.shares.check_tokens(owner)
            except RequestError as error:
                return Answer(error.status, errors.body_of(error), request_id, error.retry_after_s)
        route = self.chat if line.url.endswith("/chat/completions") else self.completions
        return await ask_inside(route, line, request_id, owner, begin, log_words=self._settings.log_words)

    async def _serve(
        self, kind: Kind, request: Request, wire: type[_Body], translated: translate.Translate[_Body]
    ) -> Response:
        arrived_s = self._clock.monotonic_s()
        new = self.kept is None or not self.kept.knows(request.headers)  # what is kept has its room
        if new:
            self.models.check_room()
        model, body, submit, tokenizer = await self._translate(kind, request, wire, translated, new=new)
        found = None if self.kept is None else self.kept.find(request.headers, body)
        if found is not None:
            return await self._answer(model, kind, request, body, found.submits, tokenizer, arrived_s, found)
        submit, arm = _enter_trial(model, submit)
        asked = translate.choices(submit, body.n)
        if self.kept is not None:
            found = self.kept.open(request.headers, body, asked, submit.request_id, model.name)
        asked = asked if found is None else found.submits
        return await self._answer(model, kind, request, body, asked, tokenizer, arrived_s, found, arm)

    async def _translate(
        self, kind: Kind, request: Request, wire: type[_Body], translated: translate.Translate[_Body], *, new: bool
    ) -> tuple[ServedModel, _Body, Submit, TokenizerPort]:
        """Read a body and translate it for the model that it names, off the event loop. Raises RequestError."""
        owner = request.scope.get(OWNER, "")

        def work(model: ServedModel, raw: bytes) -> tuple[_Body, Submit, TokenizerPort]:
            known = model.find_ready()
            if known is not None:
                refuse_oversized(raw, *known, self._settings.max_parameter_bytes)
            body: _Body = errors.parse_body(wire, raw)
            self.models.confirm(model, body.model)
            tokenizer, context = model.require_ready()
            submit = translated(body, _request_id(kind), tokenizer, context, _seed, model.terms.acceptance)
            return body, msgspec.structs.replace(submit, owner=owner), tokenizer

        with self.bodies.hold() as share:
            raw = await self._read(request, share)
            model = await self._choose(raw)
            if new:
                model.check_room()
            model.coming += 1  # from here on: whoever sends a body slowly takes no place
            try:
                body, submit, tokenizer = await self._lanes.do(len(raw), work, model, raw)
                if submit.grammar is not None:
                    await self._grammars.check(submit.grammar, "tools" if _offers_tools(body) else "response_format")
            finally:
                model.coming -= 1
        return model, body, submit, tokenizer

    async def _choose(self, raw: bytes) -> ServedModel:
        """Return the model that a body names. Raises RequestError 404."""
        return await self._lanes.do(len(raw), self.models.choose, raw) if self.models.several else self.models.first

    async def do_with_body(self, request: Request, work: Callable[[bytes], _T]) -> _T:
        """Read a body, and return what this work makes of it, off the event loop. Raises RequestError."""
        with self.bodies.hold() as share:
            raw = await self._read(request, share)
            return await self._lanes.do(len(raw), work, raw)

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
        model: ServedModel,
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
        name = model.name if self.models.several else ""
        follow = RequestRecord(
            model.metrics, self._clock, arrived_s, model=name, keep_words=words, arm=arm, spend=spend
        )
        mark_followed(request.scope)
        follow.log_accepted(request.url.path, asked[0], body, resumed=again)
        model.liveness.observe_request()
        choices = choices_of(body, asked, tokenizer, arrived_s)
        told = [self._deltas(model.control, *pair, kept, follow) for pair in zip(asked, choices, strict=True)]
        texts = [
            pieces_of(body, submit.request_id, deltas, choice, self._clock)
            for submit, deltas, choice in zip(asked, told, choices, strict=True)
        ]
        pieces = merge_pieces(texts)
        submit = asked[0]
        cursor = None if kept is None else kept.cursor(names=wants_names(request.headers))
        envelope = self._envelope(model, kind, body, submit, tokenizer, kept, cursor)
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
        self, control: Control, submit: Submit, choice: Choice, kept: Resumption | None, follow: RequestRecord
    ) -> AsyncGenerator[Delta, None]:
        """Return a choice's tokens; those of an answer that is told again are measured already."""
        if kept is None or self.kept is None:
            return follow.deltas(submit, control.generate(submit))
        source = self.kept.deltas(kept, choice.index, lambda: bool(choice.answer.finish))
        return source if kept.again else follow.deltas(submit, source)

    def _envelope(
        self,
        model: ServedModel,
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
            model.name,
            len(submit.prompt),
            lambda engine: describe_source(model.control.view(), engine, rule),
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
    targets: Sequence[ServedTarget],
    settings: ApiSettings,
    clock: Clock,
    *,
    book: AnswerBook | None = None,
    batches: BatchStore | None = None,
) -> FastAPI:
    """Return the app over these models, of which the first is that of requests that name none. `book` keeps answers
    that may be resumed; without one none are. `batches` keeps files and batches; without it their routes answer 404.
    `app.state` has what the daemon needs of it: `models`, `kept` and `batches`."""
    app = FastAPI(title="Outrider", version=version("outrider"), docs_url=None, redoc_url=None)
    api = ApiRoutes(targets, settings, clock, book)
    app.state.models = api.models
    app.state.kept = api.kept
    errors.install_error_handlers(app)
    install_gates(app, settings.keys, settings.access, api.shares)
    app.add_middleware(RequestScope, log_words=settings.log_words)
    generate = (400, 401, 404, 413, 415, 422, 429, 500, 503, 504)
    text = operation(CompletionRequest, Completion, events=CompletionChunk, statuses=generate)
    chat = operation(ChatRequest, ChatCompletion, events=ChatCompletionChunk, statuses=generate)
    app.post("/v1/completions", **text)(api.completions)
    app.post("/v1/chat/completions", **chat)(api.chat)

    @app.get("/v1/models", **operation(None, ModelList, statuses=(401,)))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": api.models.list_entries()}

    @app.get("/v1/models/{name:path}", **operation(None, Model, statuses=(401, 404)))
    async def model(name: str) -> dict[str, Any]:
        found = next((one for one in api.models if one.name == name), None)
        if found is None:
            raise api.models.build_unknown_error(name)
        return found.describe(clock.wall_s())

    tokenize.install_tokenize_routes(app, api, settings.max_parameter_bytes)
    service = None
    if batches is not None:
        service = BatchService(batches, api.models, api.answer_line, clock)
        api.models.first.metrics.observe_batches(service)
    app.state.batches = service
    install_batch_routes(app, service, api)
    probes.install_probe_routes(app, api)
    install_docs_page(app)
    describe(app, keys=settings.keys is not None)
    return app


async def _collect(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


def _enter_trial(model: ServedModel, submit: Submit) -> tuple[Submit, VariantReport | None]:
    """Give a request its variant, where a canary is tried; all its choices share it."""
    if model.trial is None:
        return submit, None
    trial = model.trial
    submit, entry = trial.assign_variant(submit)

    def end_trial_entry(done: RequestTotals) -> None:
        ttft_ms, tpot_ms = (None if each is None else each * MS_PER_S for each in (done.ttft_s, done.tpot_s))
        trial.end_entry(entry, ttft_ms=ttft_ms, tpot_ms=tpot_ms, acceptance=done.acceptance)

    return submit, VariantReport(entry.arm.value, end_trial_entry) if entry.counted else None


def _offers_tools(body: CompletionRequest | ChatRequest) -> bool:
    return isinstance(body, ChatRequest) and bool(body.offered)


def _request_id(kind: Kind) -> str:
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"


def _seed() -> int:
    return secrets.randbits(64)

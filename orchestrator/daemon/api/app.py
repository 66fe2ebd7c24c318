"""The public API. Holds no model: it translates, asks control, and turns tokens into text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from adapters.tokenizer import Tokenizer
from orchestrator.clock import Clock
from orchestrator.daemon.api import answers, errors, gates, probes, tokenize, translate
from orchestrator.daemon.api.answer_stream import AnswerAssembler, AnswerReader, EventStream, KeepAlive, unless_gone
from orchestrator.daemon.api.batches.inside import ask_inside
from orchestrator.daemon.api.batches.routes import install_batch_routes
from orchestrator.daemon.api.batches.service import BatchService
from orchestrator.daemon.api.batches.store import BatchStore
from orchestrator.daemon.api.body_bounds import BodyBudget
from orchestrator.daemon.api.body_work import DeadlyBodies
from orchestrator.daemon.api.docs_page import install_docs_page
from orchestrator.daemon.api.doors.messages.routes import install_messages_routes
from orchestrator.daemon.api.doors.responses.routes import install_responses_routes
from orchestrator.daemon.api.doors.responses.store import ResponseStore
from orchestrator.daemon.api.follow import RequestLives, RequestRecord, VariantReport, enter_trial
from orchestrator.daemon.api.keys import check_owner, limits_of
from orchestrator.daemon.api.load_wait import LoadWait
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.metrics.page import MetricsPage
from orchestrator.daemon.api.openapi import describe, operation
from orchestrator.daemon.api.question import (
    AnswerHead,
    AnswerWriter,
    Question,
    ReadQuestion,
    choose_group,
    describe_source,
)
from orchestrator.daemon.api.question_reader import QuestionReader
from orchestrator.daemon.api.responses import read_chat, read_completion
from orchestrator.daemon.api.resume import KeptAnswers, Resumption, wants_names
from orchestrator.daemon.api.served import Liveness, ServedModel, ServedModels, ServedTarget
from orchestrator.daemon.api.settings import ApiSettings
from orchestrator.daemon.api.shares import KeyShares
from orchestrator.daemon.api.streaming import Choice, choices_of
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest
from orchestrator.daemon.batches.lines import BatchLine
from orchestrator.daemon.batches.run import Answer
from orchestrator.daemon.control.port import Control
from orchestrator.daemon.journal.book import AnswerBook
from orchestrator.daemon.journal.standing import JournalView
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from policies.serving.overrides import EffectiveBound


class ApiRoutes:
    """The routes' shared ground."""

    def __init__(
        self,
        targets: Sequence[ServedTarget],
        settings: ApiSettings,
        clock: Clock,
        book: AnswerBook | None = None,
        sandbox: Sandbox | None = None,
        deadly: DeadlyBodies | None = None,
    ) -> None:
        self._deadly = DeadlyBodies(None, clock, 0.0) if deadly is None else deadly
        self._bodies = BodyBudget(settings.limits.max_bodies)
        self._settings = settings
        self._clock = clock
        self.models = ServedModels(
            [self._build_model(target, first=number == 0) for number, target in enumerate(targets)], clock
        )
        self.page = MetricsPage([model.metrics for model in self.models])
        self.lives = RequestLives(clock)
        self.kept = None if book is None else KeptAnswers(self.models.find_control, book, clock)
        self.shares = KeyShares(
            clock,
            most_requests=settings.limits.max_requests_per_key,
            tokens_per_minute=settings.limits.max_tokens_per_minute_per_key,
            own=limits_of(settings.keys),
        )
        self.stored = ResponseStore(settings.api, clock)
        sandbox = Sandbox() if sandbox is None else sandbox
        self._reader = QuestionReader(self.models, settings, self._bodies, sandbox, self._deadly, clock)
        self.do_with_body = self._reader.do_with_body

    def take_settings(self, settings: ApiSettings) -> None:
        """Bound what comes from now on by these. Who may use the API, and what is logged, stays as it is."""
        before = self._settings
        self._settings = replace(settings, keys=before.keys, log_words=before.log_words)
        self._reader.take_settings(self._settings)
        limits = settings.limits
        self.shares.set_limits(limits.max_requests_per_key, limits.max_tokens_per_minute_per_key)
        self.stored.set_bounds(settings.api)
        for model in self.models:
            model.liveness.stalled_after_s = settings.api.stalled_after_s

    @property
    def max_parameter_bytes(self) -> int:
        """How much a body may have beside its prompt."""
        return self._settings.limits.max_parameters

    def _build_model(self, target: ServedTarget, *, first: bool) -> ServedModel:
        """Return a model; connections and bodies are everybody's, and told with the first."""
        metrics = Metrics(
            target.control,
            self._clock,
            vllm_names=self._settings.api.vllm_metric_names,
            objectives=target.terms.objectives,
            trial_view=target.trial.view if target.trial is not None else None,
            connections=self._settings.connections if first else None,
            bodies=self._bodies if first else None,
            count_deadly=(lambda: len(self._deadly.list_quarantined())) if first else (lambda: 0),
            price=target.terms.price,
            name=target.name,
        )
        liveness = Liveness(target.control, self._clock, self._settings.api.stalled_after_s)
        return ServedModel(target, metrics, liveness)

    async def completions(self, request: Request) -> Response:
        """Serve `/v1/completions`."""
        return await self.answer(request, read_completion)

    async def chat(self, request: Request) -> Response:
        """Serve `/v1/chat/completions`."""
        return await self.answer(request, read_chat)

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

    async def answer(self, request: Request, read: ReadQuestion) -> Response:
        """Answer a request: `read` says how its body is read and its answer written. Raises RequestError."""
        if not self.models.load_for_requests:
            return await self._answer_whole(request, read, None)
        wait, api = LoadWait(), self._settings.api
        return await wait.answer(self._answer_whole(request, read, wait), api.headers_after_s, api.keep_alive_s)

    async def _answer_whole(self, request: Request, read: ReadQuestion, wait: LoadWait | None) -> Response:
        arrived_s = self._clock.monotonic_s()
        new = self.kept is None or not self.kept.knows(request.headers)  # what is kept has its room
        if new:
            self.models.check_room()
        with ExitStack() as holding:
            model, question, submits, tokenizer = await self._reader.read(request, read, wait, holding, new=new)
            body = question.body
            variant: VariantReport | None = None
            kept = None if self.kept is None else self.kept.find(request.headers, body, question.route)
            if kept is not None:
                kept.refuse_other_model(submits[0])
            else:
                request_id = submits[0].request_id
                submits, variant = enter_trial(model.trial, submits, names_rule=body.names_acceptance)
                submits = translate.choices([gates.mark_traced(request.scope, submit) for submit in submits], body.n)
                if len(submits) > 1:
                    model.check_room(len(submits))
                if body.system_fingerprint is not None:
                    rule, lora = submits[0].sampling.rule, submits[0].lora
                    group = choose_group(model.control.view(), body.system_fingerprint, rule, lora)
                    submits = [msgspec.structs.replace(submit, group=group) for submit in submits]
                if self.kept is not None:
                    names, path = question.resumable, question.route
                    kept = self.kept.open(request.headers, body, submits, request_id, model.name, path, names=names)
            submits = submits if kept is None else kept.submits
            return await self._answer(model, request, question, submits, tokenizer, arrived_s, kept, variant)

    async def _answer(
        self,
        model: ServedModel,
        request: Request,
        question: Question,
        submits: Sequence[Submit],
        tokenizer: Tokenizer,
        arrived_s: float,
        kept: Resumption | None,
        variant: VariantReport | None = None,
    ) -> Response:
        body = question.body
        again = kept is not None and kept.again
        owner = submits[0].owner
        spend = partial(self.shares.spend, owner) if owner and not again else lambda _: None
        words = self._settings.log_words
        name = model.name if self.models.several else ""
        follow = RequestRecord(
            *(model.metrics, self._clock, arrived_s),
            model=name,
            keep_words=words,
            variant=variant,
            spend=spend,
            lives=self.lives,
            trace=gates.describe_traced(request.scope, model.name, submits, stream=body.stream, again=again),
        )
        gates.mark_followed(request.scope)
        follow.log_accepted(request.url.path, submits, body, resumed=again)
        model.liveness.observe_request()
        if len(submits) > body.n:  # off the event loop: echoes of many prompts take a while
            choices = await asyncio.to_thread(choices_of, body, submits, tokenizer, arrived_s)
        else:
            choices = choices_of(body, submits, tokenizer, arrived_s)
        cursor = None if kept is None else kept.cursor(names=question.resumable and wants_names(request.headers))
        rule, lora = submits[0].sampling.rule, submits[0].lora
        head = AnswerHead(
            submits[0].request_id if kept is None else kept.answer.request_id,
            int(self._clock.wall_s()) if kept is None else kept.answer.created_s,
            model.name_with(lora),
            [submit.prompt for submit in submits[:: body.n]],
            lambda engine, group: describe_source(model.control.view(), engine, group, rule, lora),
            rule,
            tokenizer,
            cursor,
            question.warnings,
        )
        writer = question.build_writer(head)
        sources = [self._decode(model.control, *pair, kept) for pair in zip(submits, choices, strict=True)]
        assembler = AnswerAssembler(writer, choices, follow, self._clock, stream=body.stream)
        reader = AnswerReader(sources, assembler)
        with follow.to_the_headers():
            if body.stream:
                early = partial(model.control.find_speculation, submits[0])
                return await self._stream(request, reader, writer, choices[0], follow, early)
            whole = await unless_gone(request.receive, reader.read_all())
            if whole is None:
                return follow.end_disconnected()
            headers = writer.headers(choices[0].answer.speculation)
            return Response(whole, media_type="application/json", headers=headers)

    async def _stream(
        self,
        request: Request,
        reader: AnswerReader,
        writer: AnswerWriter,
        first: Choice,
        follow: RequestRecord,
        find_speculation: Callable[[], EffectiveBound | None],
    ) -> Response:
        """Return what sends an answer's chunks. A refusal that comes soon has a status of its own; one that comes when
        the headers are out is an event. Headers that go before the answer begins say what `find_speculation` returns.
        Raises RequestError."""
        api = self._settings.api
        try:
            opened = await unless_gone(request.receive, reader.wait(api.headers_after_s))
        except BaseException:
            await reader.aclose()
            raise
        if opened is None:
            await reader.aclose()
            return follow.end_disconnected()
        headers = writer.headers(first.answer.speculation if opened else find_speculation())
        keep_alive = KeepAlive(writer.ping(), api.keep_alive_s, late=not opened)
        return EventStream(reader, follow.end_disconnected, headers, keep_alive)

    def _decode(
        self, control: Control, submit: Submit, choice: Choice, kept: Resumption | None
    ) -> AsyncIterator[Delta]:
        if kept is None or self.kept is None:
            return control.generate(submit)
        return self.kept.deltas(kept, choice.index, lambda: bool(choice.answer.finish))


def create_app(
    targets: Sequence[ServedTarget],
    settings: ApiSettings,
    clock: Clock,
    *,
    book: AnswerBook | None = None,
    batches: BatchStore | None = None,
    sandbox: Sandbox | None = None,
    deadly: DeadlyBodies | None = None,
) -> FastAPI:
    """Return the app over these models, of which the first is that of requests that name none. `book` keeps answers
    that may be resumed; without one none are. `batches` keeps files and batches; without it their routes answer 404.
    `sandbox` checks grammars; without it there is one of the app's own. `deadly` notes the bodies that are read.
    `app.state` has what the daemon needs of it: `models`, `kept`, `lives`, `batches`, and `take_settings` for other
    bounds. In `admin` it takes the admin app, which keys of that scope may use here."""
    app = FastAPI(
        title="Outrider", version=version("outrider"), docs_url=None, redoc_url=None, telemetry=gates.NO_TELEMETRY
    )
    api = ApiRoutes(targets, settings, clock, book, sandbox, deadly)
    app.state.models = api.models
    app.state.page = api.page
    app.state.kept = api.kept
    app.state.take_settings = api.take_settings
    app.state.lives = api.lives
    errors.install_error_handlers(app)
    gates.install_gates(app, settings, api.shares)
    generate = (400, 401, 404, 409, 410, 413, 415, 422, 429, 500, 503, 504)
    text = operation(CompletionRequest, answers.Completion, events=answers.CompletionChunk, statuses=generate)
    chat = operation(ChatRequest, answers.ChatCompletion, events=answers.ChatCompletionChunk, statuses=generate)
    app.post("/v1/completions", **text)(api.completions)
    app.post("/v1/chat/completions", **chat)(api.chat)

    @app.get("/v1/models", **operation(None, answers.ModelList, statuses=(401,)))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": api.models.list_entries()}

    app.get("/v1/models/", include_in_schema=False)(models)

    @app.get("/v1/models/{name:path}", **operation(None, answers.Model, statuses=(401, 404)))
    async def model(name: str) -> dict[str, Any]:
        entry = next((entry for entry in api.models.list_entries() if entry["id"] == name), None)
        if entry is None:
            raise api.models.build_unknown_error(name)
        return entry

    install_responses_routes(app, api, api.stored)
    install_messages_routes(app, api)
    tokenize.install_tokenize_routes(app, api)
    service = None
    if batches is not None:
        service = BatchService(batches, api.models, api.answer_line, clock)
        api.models.first.metrics.batches = service
    app.state.batches = service
    install_batch_routes(app, service, api)
    if book is not None:
        api.models.first.metrics.journal = book.view
    probes.install_probe_routes(app, api, JournalView if book is None else book.view)
    install_docs_page(app)
    describe(app, keys=settings.keys is not None)
    return app

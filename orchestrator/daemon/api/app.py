"""The public API. Holds no model: it translates, asks control, and turns tokens into text."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response
from structlog.contextvars import get_contextvars

from orchestrator.clock import Clock
from orchestrator.daemon.api import errors, probes, tokenize, translate
from orchestrator.daemon.api.answer_stream import AnswerAssembler, AnswerReader, EventStream, KeepAlive, unless_gone
from orchestrator.daemon.api.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Model,
    ModelList,
)
from orchestrator.daemon.api.batches.inside import ask_inside
from orchestrator.daemon.api.batches.routes import install_batch_routes
from orchestrator.daemon.api.batches.service import BatchService
from orchestrator.daemon.api.batches.store import BatchStore
from orchestrator.daemon.api.body_bounds import BodyBudget, read_body, refuse_oversized
from orchestrator.daemon.api.body_work import DeadlyBodies, WorkLanes
from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.docs_page import install_docs_page
from orchestrator.daemon.api.doors.messages.routes import install_messages_routes
from orchestrator.daemon.api.doors.responses.routes import install_responses_routes
from orchestrator.daemon.api.doors.responses.store import ResponseStore, StoreBounds
from orchestrator.daemon.api.follow import RequestLives, RequestRecord, VariantReport, enter_trial
from orchestrator.daemon.api.gates import (
    NO_TELEMETRY,
    Access,
    describe_traced,
    install_gates,
    mark_followed,
    mark_traced,
)
from orchestrator.daemon.api.grammar_checks import GrammarChecks
from orchestrator.daemon.api.keys import OWNER, Keys, check_owner, limits_of
from orchestrator.daemon.api.load_wait import LoadWait, refuse_gone
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.metrics.page import MetricsPage
from orchestrator.daemon.api.openapi import describe, operation
from orchestrator.daemon.api.port import TokenizerPort
from orchestrator.daemon.api.question import (
    AnswerHead,
    AnswerWriter,
    Question,
    ReadQuestion,
    choose_group,
    describe_source,
    rename_parameters,
)
from orchestrator.daemon.api.responses import read_chat, read_completion
from orchestrator.daemon.api.resume import KeptAnswers, Resumption, wants_names
from orchestrator.daemon.api.served import Liveness, ServedModel, ServedModels, ServedTarget
from orchestrator.daemon.api.shares import KeyShares
from orchestrator.daemon.api.streaming import Choice, choices_of
from orchestrator.daemon.api.translate import write_grammar
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest, describe_refusal
from orchestrator.daemon.batches.lines import BatchLine
from orchestrator.daemon.batches.run import Answer
from orchestrator.daemon.control.port import Control
from orchestrator.daemon.journal.book import AnswerBook
from orchestrator.daemon.journal.standing import JournalView
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.daemon.tracing.port import Tracing
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from policies.serving.overrides import EffectiveBound

_T = TypeVar("_T")
# Of it: whoever waits for a body that is read alone is told so, and has time left to be read. ADR 0099. Not tuned.
_TURN_PART = 0.5
# Of the time that a body may take: whoever waits is told what took it. ADR 0099: half of
# `limits.translation_timeout_s`.
_TEMPLATE_PART = 0.5
# Left to a request whose time is over as its model is there: it is answered as one that came late.
_LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds of the API: of one body, of its part beside the prompt, of its grammar, and of all bodies that are read or
    translated at a time; how long that may take; and what one key may have (0: no limit). `log_words`: the log has
    requests' and answers' text, and what bugs say. `keys`: None asks for none. `access`: what else is asked of those
    who use the API. `stalled_after_s`: see served.Liveness. `headers_after_s`, `keep_alive_s`: see answer_stream.
    `vllm_metric_names`: see metrics. `connections`: those of the server, for the metrics.
    `stored_responses`: how many of `/v1/responses` are kept. `tracing`: None: no spans.
    `allow_chat_templates`: chats may bring one."""

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
    headers_after_s: float = 1.5
    keep_alive_s: float = 5.0
    vllm_metric_names: bool = False
    connections: Connections | None = None
    stored_responses: StoreBounds = field(default_factory=StoreBounds)
    tracing: Tracing | None = None
    allow_chat_templates: bool = False


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
        self._sandbox = Sandbox() if sandbox is None else sandbox
        self._deadly = DeadlyBodies(None, clock, 0.0) if deadly is None else deadly
        self.bodies = BodyBudget(settings.max_bodies_bytes)
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
            most_requests=settings.max_requests_per_key,
            tokens_per_minute=settings.max_tokens_per_minute_per_key,
            own=limits_of(settings.keys),
        )
        self.stored = ResponseStore(settings.stored_responses, clock)
        self._lanes = WorkLanes(settings.translation_timeout_s)
        self._grammars = GrammarChecks(settings.max_grammar_bytes, settings.translation_timeout_s, self._sandbox, clock)
        self._sandbox.template_timeout_s = settings.translation_timeout_s * _TEMPLATE_PART

    def take_settings(self, settings: ApiSettings) -> None:
        """Bound what comes from now on by these. Who may use the API, and what is logged, stays as it is."""
        before = self._settings
        self._settings = replace(settings, keys=before.keys, access=before.access, log_words=before.log_words)
        self.bodies.most = settings.max_bodies_bytes
        self.shares.set_limits(settings.max_requests_per_key, settings.max_tokens_per_minute_per_key)
        self.stored.set_bounds(settings.stored_responses)
        self._lanes.timeout_s = settings.translation_timeout_s
        self._grammars.set_bounds(settings.max_grammar_bytes, settings.translation_timeout_s)
        self._sandbox.template_timeout_s = settings.translation_timeout_s * _TEMPLATE_PART
        for model in self.models:
            model.liveness.stalled_after_s = settings.stalled_after_s

    @property
    def max_parameter_bytes(self) -> int:
        """How much a body may have beside its prompt."""
        return self._settings.max_parameter_bytes

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
            count_deadly=(lambda: len(self._deadly.list_quarantined())) if first else (lambda: 0),
            price=target.terms.price,
            name=target.name,
        )
        liveness = Liveness(target.control, self._clock, self._settings.stalled_after_s)
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
        """Answer a request, whichever API it is of: `read` says how its body is read and its answer written. Raises
        RequestError."""
        if not self.models.load_for_requests:
            return await self._answer_whole(request, read, None)
        wait, settings = LoadWait(), self._settings
        work = self._answer_whole(request, read, wait)
        return await wait.answer(work, settings.headers_after_s, settings.keep_alive_s)

    async def _answer_whole(self, request: Request, read: ReadQuestion, wait: LoadWait | None) -> Response:
        arrived_s = self._clock.monotonic_s()
        new = self.kept is None or not self.kept.knows(request.headers)  # what is kept has its room
        if new:
            self.models.check_room()
        with ExitStack() as holding:
            model, question, submits, tokenizer = await self._translate(request, read, wait, holding, new=new)
            return await self._answer_translated(request, model, question, submits, tokenizer, arrived_s)

    async def _answer_translated(
        self,
        request: Request,
        model: ServedModel,
        question: Question,
        submits: Sequence[Submit],
        tokenizer: TokenizerPort,
        arrived_s: float,
    ) -> Response:
        body = question.body
        kept = None if self.kept is None else self.kept.find(request.headers, body, question.route)
        if kept is not None:
            kept.refuse_other_model(submits[0])
            return await self._answer(model, request, question, kept.submits, tokenizer, arrived_s, kept)
        request_id = submits[0].request_id
        submits, variant = enter_trial(model.trial, submits, names_rule=body.names_acceptance)
        submits = translate.choices([mark_traced(request.scope, submit) for submit in submits], body.n)
        if len(submits) > 1:
            model.check_room(len(submits))
        if body.system_fingerprint is not None:
            rule, lora = submits[0].sampling.rule, submits[0].lora
            group = choose_group(model.control.view(), body.system_fingerprint, rule, lora)
            submits = [msgspec.structs.replace(submit, group=group) for submit in submits]
        if self.kept is not None:
            kept = self.kept.open(
                request.headers, body, submits, request_id, model.name, question.route, names=question.resumable
            )
        submits = submits if kept is None else kept.submits
        return await self._answer(model, request, question, submits, tokenizer, arrived_s, kept, variant)

    async def _translate(
        self, request: Request, read: ReadQuestion, wait: LoadWait | None, holding: ExitStack, *, new: bool
    ) -> tuple[ServedModel, Question, Sequence[Submit], TokenizerPort]:
        """Read a body and translate it for the model that it names, off the event loop. `holding` keeps that in memory,
        and `wait` is told where it is loaded first. Raises RequestError."""
        owner = request.scope.get(OWNER, "")

        def work(raw: bytes, model: ServedModel) -> tuple[Question, list[Submit], TokenizerPort]:
            known = model.find_ready()
            if known is not None:
                refuse_oversized(raw, *known, self._settings.max_parameter_bytes)
            question = read(raw)
            self.models.confirm(model, question.body.model)
            tokenizer, ready = model.require_served()
            tokenizer = self._choose_template(question.body, tokenizer)
            request_id = f"{question.id_prefix}{secrets.token_hex(12)}"
            written = write_grammar(question.body, self._settings.max_grammar_bytes, tokenizer, question.answer_param)
            try:
                terms = (model.terms.acceptance, question.clips)
                seed = partial(secrets.randbits, 64)
                translation = translate.Translation(request_id, tokenizer, ready.model.context_tokens, seed, *terms)
                submits = translation.generation(question.body, written)
            except RequestError as error:
                raise rename_parameters(error, question.names) from None
            lora = model.find_lora(question.body.model)
            if lora is None:  # it has a name by now
                raise self.models.build_unknown_error(str(question.body.model))
            made_for = {"model_digest": ready.model.digest, "vocabulary": ready.model.vocabulary_fingerprint}
            submits = [
                msgspec.structs.replace(submit, owner=owner, route=question.route, lora=lora, **made_for)
                for submit in submits
            ]
            idle = translate.list_idle(question.body, tokenizer)
            unused = [*question.unused, *(question.names.get(name, name) for name in idle)]
            warnings = (*written.warnings, *translate.describe_unused(unused))
            return replace(question, warnings=warnings), submits, tokenizer

        with self.bodies.hold() as share:
            raw = await read_body(request, share, self._settings.max_body_bytes)
            several = self.models.several
            model = await self._work_on(request, raw, self.models.choose) if several else self.models.first
            if new:
                model.check_room()
            model.coming += 1  # from here on: whoever sends a body slowly takes no place
            left_s = 0.0
            try:
                holding.enter_context(model.hold_model())
                if wait is not None and model.waits_for_load:
                    parsed = await self._work_on(request, raw, read)
                    begin = partial(wait.begin_answer, parsed) if parsed.body.stream else None
                    left_s = await self._wait_for_load(request, model, parsed.body.timeout_s, begin)
                question, submits, tokenizer = await self._work_on(request, raw, work, model)
                if submits[0].grammar is not None:  # prompts of one request share it
                    await self._grammars.check(submits[0].grammar, question.grammar_param, question.answer_param)
            finally:
                model.coming -= 1
        if left_s:
            submits = [msgspec.structs.replace(submit, timeout_s=left_s) for submit in submits]
        return model, question, submits, tokenizer

    def _choose_template(self, body: CompletionRequest | ChatRequest, tokenizer: TokenizerPort) -> TokenizerPort:
        """Return the tokenizer with the chat template that a request brings. Raises RequestError where that is not
        allowed."""
        if not isinstance(body, ChatRequest) or not body.chat_template:
            return tokenizer
        if not self._settings.allow_chat_templates:
            text = describe_refusal("chat_template")
            raise RequestError(text, param="chat_template", code="not_supported")
        return tokenizer.with_template(body.chat_template)

    async def _wait_for_load(
        self, request: Request, model: ServedModel, timeout_s: float | None, begin: Callable[[], object] | None = None
    ) -> float:
        """Have a model loaded; returns the time that is left for the request, of `timeout_s` that it asks for (0: no
        limit). `begin` is called where it is to be streamed: whoever streams looks after the client. Raises
        RequestError where the load comes to nothing, takes longer than the request may, or the client has left."""
        gate = model.gate
        if gate is None:
            return 0.0
        bounds = [bound for bound in (timeout_s or 0.0, gate.request_timeout_s) if bound]
        begun_s, bound_s = self._clock.monotonic_s(), min(bounds, default=None)
        try:
            async with asyncio.timeout(bound_s):
                if begin is not None:
                    begin()
                    await gate.wait_readable()
                elif not await unless_gone(request.receive, _then_true(gate.wait_readable())):
                    raise refuse_gone()
        except TimeoutError:
            text = "the request's time was over before its model was loaded; give it longer, or try again later"
            error = RequestError(text, status=504, kind="server_error", code="deadline_exceeded", param="timeout_s")
            raise error from None
        return 0.0 if bound_s is None else max(_LEAST_S, bound_s - (self._clock.monotonic_s() - begun_s))

    async def _work_on(self, request: Request, raw: bytes, work: Callable[..., _T], *more: object) -> _T:
        """Return what work makes of a body, off the event loop, with a note of the body meanwhile."""
        path, request_id = request.url.path, str(get_contextvars().get("request_id", ""))
        turn_until_s = self._clock.monotonic_s() + self._lanes.timeout_s * _TURN_PART

        def work_noted() -> _T:
            with self._deadly.hold(path, raw, request_id, turn_until_s - self._clock.monotonic_s()):
                return work(raw, *more)

        return await self._lanes.do(len(raw), work_noted)

    async def do_with_body(self, request: Request, work: Callable[[bytes], _T]) -> _T:
        """Read a body, and return what this work makes of it, off the event loop. Raises RequestError."""
        with self.bodies.hold() as share:
            raw = await read_body(request, share, self._settings.max_body_bytes)
            if self.models.load_for_requests and (model := self.models.choose(raw)).waits_for_load:
                model.check_room()
                with model.hold_model():
                    await self._wait_for_load(request, model, None)
            return await self._work_on(request, raw, work)

    async def _answer(
        self,
        model: ServedModel,
        request: Request,
        question: Question,
        submits: Sequence[Submit],
        tokenizer: TokenizerPort,
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
            trace=describe_traced(request.scope, model.name, submits, stream=body.stream, again=again),
        )
        mark_followed(request.scope)
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
        settings = self._settings
        try:
            opened = await unless_gone(request.receive, reader.wait(settings.headers_after_s))
        except BaseException:
            await reader.aclose()
            raise
        if opened is None:
            await reader.aclose()
            return follow.end_disconnected()
        headers = writer.headers(first.answer.speculation if opened else find_speculation())
        keep_alive = KeepAlive(writer.ping(), settings.keep_alive_s, late=not opened)
        return EventStream(reader, follow.end_disconnected, headers, keep_alive)

    def _decode(
        self, control: Control, submit: Submit, choice: Choice, kept: Resumption | None
    ) -> AsyncIterator[Delta]:
        """Return a choice's tokens, from its first on."""
        if kept is None or self.kept is None:
            return control.generate(submit)
        return self.kept.deltas(kept, choice.index, lambda: bool(choice.answer.finish))


async def _then_true(work: Awaitable[None]) -> bool:
    await work
    return True


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
    app = FastAPI(title="Outrider", version=version("outrider"), docs_url=None, redoc_url=None, telemetry=NO_TELEMETRY)
    api = ApiRoutes(targets, settings, clock, book, sandbox, deadly)
    app.state.models = api.models
    app.state.page = api.page
    app.state.kept = api.kept
    app.state.take_settings = api.take_settings
    app.state.lives = api.lives
    errors.install_error_handlers(app)
    gates = (settings.keys, settings.access, api.shares, settings.tracing)
    install_gates(app, *gates, log_words=settings.log_words)
    generate = (400, 401, 404, 409, 410, 413, 415, 422, 429, 500, 503, 504)
    text = operation(CompletionRequest, Completion, events=CompletionChunk, statuses=generate)
    chat = operation(ChatRequest, ChatCompletion, events=ChatCompletionChunk, statuses=generate)
    app.post("/v1/completions", **text)(api.completions)
    app.post("/v1/chat/completions", **chat)(api.chat)

    @app.get("/v1/models", **operation(None, ModelList, statuses=(401,)))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": api.models.list_entries()}

    app.get("/v1/models/", include_in_schema=False)(models)

    @app.get("/v1/models/{name:path}", **operation(None, Model, statuses=(401, 404)))
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
        api.models.first.metrics.batches.source = service
    app.state.batches = service
    install_batch_routes(app, service, api)
    if book is not None:
        api.models.first.metrics.journal.source = book.view
    probes.install_probe_routes(app, api, JournalView if book is None else book.view)
    install_docs_page(app)
    describe(app, keys=settings.keys is not None)
    return app

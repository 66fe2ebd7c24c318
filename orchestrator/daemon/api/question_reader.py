"""From the body of a request to what is to be decoded: read within a budget of bytes, and translated off the event loop
for the model that it names, which is loaded first where it is not in memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Request
from structlog.contextvars import get_contextvars

from adapters.tokenizer import Tokenizer
from orchestrator.clock import Clock
from orchestrator.daemon.api import translate
from orchestrator.daemon.api.answer_stream import unless_gone
from orchestrator.daemon.api.body_bounds import BodyBudget, read_body, refuse_oversized
from orchestrator.daemon.api.body_work import DeadlyBodies, WorkLanes
from orchestrator.daemon.api.grammar_checks import GrammarChecks
from orchestrator.daemon.api.keys import OWNER
from orchestrator.daemon.api.load_wait import LoadWait, refuse_gone
from orchestrator.daemon.api.question import Question, ReadQuestion, rename_parameters
from orchestrator.daemon.api.served import ServedModel, ServedModels
from orchestrator.daemon.api.settings import ApiSettings
from orchestrator.daemon.api.translate import write_grammar
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest, describe_refusal
from orchestrator.daemon.sandbox.sandbox import Sandbox
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit

_T = TypeVar("_T")
# Of it: whoever waits for a body that is read alone is told so, and has time left to be read. ADR 0099. Not tuned.
_TURN_PART = 0.5
# Of the time that a body may take: whoever waits is told what took it. ADR 0099: half of
# `limits.translation_timeout_s`.
_TEMPLATE_PART = 0.5
# Left to a request whose time is over as its model is there: it is answered as one that came late.
_LEAST_S = 0.001


class QuestionReader:
    """Reads bodies for all routes. `bodies`: the budget of those that are read at a time."""

    def __init__(
        self,
        models: ServedModels,
        settings: ApiSettings,
        bodies: BodyBudget,
        sandbox: Sandbox,
        deadly: DeadlyBodies,
        clock: Clock,
    ) -> None:
        self._models = models
        self._bodies = bodies
        self._sandbox = sandbox
        self._deadly = deadly
        self._clock = clock
        limits = settings.limits
        self._lanes = WorkLanes(limits.translation_timeout_s)
        self._grammars = GrammarChecks(limits.max_grammar, limits.translation_timeout_s, sandbox, clock)
        self.take_settings(settings)

    def take_settings(self, settings: ApiSettings) -> None:
        """Bound what is read from now on by these."""
        self._settings, limits = settings, settings.limits
        self._bodies.most = limits.max_bodies
        self._lanes.timeout_s = limits.translation_timeout_s
        self._grammars.set_bounds(limits.max_grammar, limits.translation_timeout_s)
        self._sandbox.template_timeout_s = limits.translation_timeout_s * _TEMPLATE_PART

    async def read(
        self, request: Request, parse: ReadQuestion, wait: LoadWait | None, holding: ExitStack, *, new: bool
    ) -> tuple[ServedModel, Question, Sequence[Submit], Tokenizer]:
        """Read a body by `parse` and translate it for the model that it names, off the event loop. `holding` keeps that
        in memory, and `wait` is told where it is loaded first. `new`: it needs room. Raises RequestError."""
        owner = request.scope.get(OWNER, "")

        def work(raw: bytes, model: ServedModel) -> tuple[Question, list[Submit], Tokenizer]:
            known = model.find_ready()
            if known is not None:
                refuse_oversized(raw, *known, self._settings.limits.max_parameters)
            question = parse(raw)
            self._models.confirm(model, question.body.model)
            tokenizer, ready = model.require_served()
            tokenizer = self._choose_template(question.body, tokenizer)
            request_id = f"{question.id_prefix}{secrets.token_hex(12)}"
            written = write_grammar(question.body, self._settings.limits.max_grammar, tokenizer, question.answer_param)
            try:
                terms = (model.terms.acceptance, question.clips)
                seed = partial(secrets.randbits, 64)
                translation = translate.Translation(request_id, tokenizer, ready.model.context_tokens, seed, *terms)
                submits = translation.generation(question.body, written)
            except RequestError as error:
                raise rename_parameters(error, question.names) from None
            lora = model.find_lora(question.body.model)
            if lora is None:  # it has a name by now
                raise self._models.build_unknown_error(str(question.body.model))
            made_for = {"model_digest": ready.model.digest, "vocabulary": ready.model.vocabulary_fingerprint}
            submits = [
                msgspec.structs.replace(submit, owner=owner, route=question.route, lora=lora, **made_for)
                for submit in submits
            ]
            idle = translate.list_idle(question.body, tokenizer)
            unused = [*question.unused, *(question.names.get(name, name) for name in idle)]
            warnings = (*written.warnings, *translate.describe_unused(unused))
            return replace(question, warnings=warnings), submits, tokenizer

        with self._bodies.hold() as share:
            raw = await read_body(request, share, self._settings.limits.max_body)
            several = self._models.several
            model = await self._work_on(request, raw, self._models.choose) if several else self._models.first
            if new:
                model.check_room()
            model.coming += 1  # from here on: whoever sends a body slowly takes no place
            left_s = 0.0
            try:
                holding.enter_context(model.hold_model())
                if wait is not None and model.waits_for_load:
                    parsed = await self._work_on(request, raw, parse)
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

    async def do_with_body(self, request: Request, work: Callable[[bytes], _T]) -> _T:
        """Read a body, and return what this work makes of it, off the event loop. Raises RequestError."""
        with self._bodies.hold() as share:
            raw = await read_body(request, share, self._settings.limits.max_body)
            if self._models.load_for_requests and (model := self._models.choose(raw)).waits_for_load:
                model.check_room()
                with model.hold_model():
                    await self._wait_for_load(request, model, None)
            return await self._work_on(request, raw, work)

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
            error = RequestError(text, status=504, code="deadline_exceeded", param="timeout_s")
            raise error from None
        return 0.0 if bound_s is None else max(_LEAST_S, bound_s - (self._clock.monotonic_s() - begun_s))

    def _choose_template(self, body: CompletionRequest | ChatRequest, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer with a request's own chat template. Raises RequestError where that is not allowed."""
        if not isinstance(body, ChatRequest) or not body.chat_template:
            return tokenizer
        if not self._settings.api.allow_chat_templates:
            text = describe_refusal("chat_template")
            raise RequestError(text, param="chat_template", code="not_supported")
        return tokenizer.with_template(body.chat_template)

    async def _work_on(self, request: Request, raw: bytes, work: Callable[..., _T], *more: object) -> _T:
        """Return what work makes of a body, off the event loop, with a note of the body meanwhile."""
        path, request_id = request.url.path, str(get_contextvars().get("request_id", ""))
        turn_until_s = self._clock.monotonic_s() + self._lanes.timeout_s * _TURN_PART

        def work_noted() -> _T:
            with self._deadly.hold(path, raw, request_id, turn_until_s - self._clock.monotonic_s()):
                return work(raw, *more)

        return await self._lanes.do(len(raw), work_noted)


async def _then_true(work: Awaitable[None]) -> bool:
    await work
    return True

"""Between a route and the decode loop: how a body was read, and what writes its answer. Each API has a form of both.

Whatever the form, a request goes one way: tokens, seeds, grammars, limits, keys and metrics are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from orchestrator.daemon.api.acceptance import HEADER
from orchestrator.daemon.api.event_stream import COMMENT
from orchestrator.daemon.api.fingerprint import STANDBY_HEADER, AnswerSource
from orchestrator.daemon.api.port import TokenizerPort
from orchestrator.daemon.api.resume import EventCursor
from orchestrator.daemon.api.served import ServedModels
from orchestrator.daemon.api.speculation import headers_of
from orchestrator.daemon.api.streaming import Answer, Piece
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest
from orchestrator.errors import RequestError
from policies.sampling import Rule
from policies.serving.overrides import EffectiveBound

_T = TypeVar("_T")
TellSource = Callable[[int], AnswerSource]
"""Says of a replica, by its number, what its answers tell of it."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known of an answer before its first token. `cursor` names the events, and knows which the client has;
    without one they have no names. `warnings`: what of the request's schemas the answer is not held to."""

    request_id: str
    created_s: int
    model: str
    prompts: Sequence[Sequence[int]]
    tell_source: TellSource
    rule: Rule
    tokenizer: TokenizerPort
    cursor: EventCursor | None = None
    warnings: tuple[str, ...] = ()

    @property
    def prompt(self) -> Sequence[int]:
        """The prompt, of an answer that has one only."""
        return self.prompts[0]


class AnswerWriter(ABC):
    """Writes one answer in the form of its API. `source`: the replica that says what comes now."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._warnings = {"warnings": list(head.warnings)} if head.warnings else {}
        self._engine = 0
        self._observed = False
        self.source: AnswerSource = head.tell_source(0)

    def observe_engine(self, engine: int) -> None:
        """The replica of this number says what follows."""
        self._observed = True
        if engine != self._engine:
            self._engine, self.source = engine, self._head.tell_source(engine)

    def headers(self, speculation: EffectiveBound | None) -> dict[str, str]:
        """Return what the answer's headers say of it, with the bound of its drafts (None: not known). A standby is
        named once a replica was observed."""
        standby = {STANDBY_HEADER: self.source.standby} if self._observed and self.source.standby else {}
        return {HEADER: self._head.rule, **headers_of(speculation), **standby}

    def ping(self) -> bytes:
        """Return what may stand between any two events, and says nothing."""
        return COMMENT

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], answer: Answer) -> dict[str, Any]:
        """Return the body of an answer that is not streamed, from all of its pieces and what it cost."""

    @abstractmethod
    def opening(self, choices: int) -> bytes:
        """Return the events before the first piece."""

    @abstractmethod
    def piece(self, piece: Piece, answer: Answer) -> bytes:
        """Return the events of a piece; `answer` is what its choice has cost so far."""

    @abstractmethod
    def ending(self, answer: Answer) -> bytes:
        """Return the events behind the last piece. `answer`: what all of it cost."""

    @abstractmethod
    def failure(self, error: RequestError, *, opened: bool) -> bytes:
        """Return the events of an answer that ends with an error. `opened`: others went before."""


@dataclass(frozen=True, slots=True)
class Question:
    """A body as its route read it. `body` is what the decode loop is asked; `build_writer` returns what writes the
    answer. `names`: what the route calls parameters of a chat, for its errors. `resumable`: its events have names.
    `clips`: a limit that the context has no room for is no error. `warnings`: what of the body's schemas the answer is
    not held to."""

    body: CompletionRequest | ChatRequest
    route: str
    id_prefix: str
    build_writer: Callable[[AnswerHead], AnswerWriter]
    names: Mapping[str, str] = field(default_factory=dict)
    resumable: bool = True
    clips: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def grammar_param(self) -> str:
        """The parameter that a grammar comes from, by the route's own name."""
        offers_tools = isinstance(self.body, ChatRequest) and bool(self.body.offered)
        return self.names.get("tools", "tools") if offers_tools else self.answer_param

    @property
    def answer_param(self) -> str:
        """The parameter that the schema of an answer comes from, by the route's own name."""
        return self.names.get("response_format", "response_format")


def rename_parameters(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Give an error a route's own names of parameters, and return it. Not for one that quotes a client's schema or
    tools: whoever writes that is told the route's names."""
    for ours, theirs in names.items():
        error.message = error.message.replace(f"'{ours}'", f"'{theirs}'")
        error.message = error.message.replace(f" in the {ours} ", f" in the {theirs} ")
    error.args = (error.message,)
    if error.param is not None:
        error.param = names.get(error.param, error.param)
    return error


ReadQuestion = Callable[[bytes], Question]
"""Reads a body. Raises RequestError."""


class SharedGround(Protocol):
    """What routes beside those of chats and completions need of the API."""

    @property
    def models(self) -> ServedModels: ...

    @property
    def max_parameter_bytes(self) -> int: ...

    async def answer(self, request: Request, read: ReadQuestion) -> Response: ...

    async def do_with_body(self, request: Request, work: Callable[[bytes], _T]) -> _T: ...

"""Between a route and the decode loop: how a body was read, what writes its answer, and what that says of its source.
Each API has a form of both.

Whatever the form, a request goes one way: tokens, seeds, grammars, limits, keys and metrics are the same for all.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.resume import EventCursor
from orchestrator.daemon.api.streaming import Answer, Piece
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.state import FAILED, find_group
from orchestrator.errors import RequestError, build_gone_group_error
from orchestrator.protocol.ready import Ready
from policies.sampling import Rule
from policies.serving.overrides import EffectiveBound

ACCEPTANCE_HEADER = "X-Outrider-Acceptance"
SPECULATION_HEADER = "X-Outrider-Speculation"
STANDBY_HEADER = "X-Outrider-Standby"
COMMENT: Final = b": keep-alive\n\n"
"""An event that readers of server-sent events leave out, as the standard says."""


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """Which worker said it: its `fingerprint`, and of a standby its name and bits ("standby; bits=same")."""

    fingerprint: str | None
    standby: str = ""


def describe_source(view: StateView, engine: int, group: str, rule: Rule, lora: str = "") -> AnswerSource:
    """Return what an answer says of the replica that its tokens come from, of the group of bits that they are of
    ("": that of the replica), and of its LoRA adapter."""
    replica = next((replica for replica in view.replicas if replica.engine == engine), None)
    if replica is None or replica.ready is None:
        return AnswerSource(system_fingerprint(view.ready, rule, group, lora))
    standby = f"{replica.name}; bits={'other' if replica.unlike else 'same'}" if replica.standby else ""
    return AnswerSource(system_fingerprint(replica.ready, rule, group, lora), standby)


def system_fingerprint(ready: Ready | None, rule: Rule = "coupled", group: str = "", lora: str = "") -> str | None:
    """Return "fp_" and 12 hex digits over what decides the bits of a worker's answers; None before the first is ready.

    That is the model's name, the group of equal bits (control.state.find_group; `group`, where it is another one than
    the worker's now), the LoRA adapter's name, and this program's version. The group has the bits of all adapters.

    Drafters, depths and bounds are left out: they do not change the output. Under the rules "rejection" and "tolerance"
    they do, and there the rule, the drafters and the depth count too. But the drafts themselves are not in it. With
    `exactness: kernel` the rest of the batch is not in it either.
    """
    if ready is None:
        return None
    parts: tuple[str, ...] = (ready.model.name, group or find_group(ready), version("outrider"))
    if lora:
        parts += ("adapter", lora)
    if rule in ("rejection", "tolerance"):
        parts += (rule, *ready.drafting.drafters, str(ready.drafting.max_depth))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def choose_group(view: StateView, fingerprint: str, rule: Rule, lora: str = "") -> str:
    """Return the group of bits of this `system_fingerprint`. Raises RequestError 409 where no replica has it."""
    known = [replica.ready for replica in view.replicas if replica.ready is not None and replica.phase != FAILED]
    groups = {system_fingerprint(ready, rule, lora=lora): find_group(ready) for ready in known}
    if fingerprint not in groups:
        raise build_gone_group_error([name for name in groups if name])
    return groups[fingerprint]


def describe_effective_speculation(bound: EffectiveBound | None) -> dict[str, Any] | None:
    """Return what holds as a `speculative_config`, whose word it was, and whether the operator's bounds cut it."""
    if bound is None:
        return None
    return {
        "method": "auto" if bound.most else "off",
        "num_speculative_tokens": bound.most if bound.fixed else None,
        "max_speculative_tokens": None if bound.fixed else bound.most,
        "by": bound.by.value,
        "cut": bound.cut,
    }


def _headers_of(bound: EffectiveBound | None) -> dict[str, str]:
    if bound is None:
        return {}
    name = "num_speculative_tokens" if bound.fixed else "max_speculative_tokens"
    cut = "; cut" if bound.cut else ""
    return {SPECULATION_HEADER: f"{f'{name}={bound.most}' if bound.most else 'off'}; by={bound.by.value}{cut}"}


TellSource = Callable[[int, str], AnswerSource]
"""Says of a replica, by its number, and of a group of bits what answers tell of them."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known of an answer before its first token. `cursor` names the events. `warnings`: see `Question`."""

    request_id: str
    created_s: int
    model: str
    prompts: Sequence[Sequence[int]]
    tell_source: TellSource
    rule: Rule
    tokenizer: Tokenizer
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
        self._told_by = (0, "")
        self._observed = False
        self.source: AnswerSource = head.tell_source(0, "")

    def observe_source(self, engine: int, group: str) -> None:
        """The replica of this number says what follows, and its bits are of this group."""
        self._observed = True
        if (engine, group) != self._told_by:
            self._told_by, self.source = (engine, group), self._head.tell_source(engine, group)

    def list_other_bits(self, answer: Answer) -> list[dict[str, Any]]:
        """Return from which token on an answer has which other fingerprint than before."""
        return [
            {
                "index": change.choice,
                "from_token": change.from_token,
                "system_fingerprint": self._head.tell_source(answer.engine, change.group).fingerprint,
            }
            for change in answer.other_bits
        ]

    def headers(self, speculation: EffectiveBound | None) -> dict[str, str]:
        """Return the answer's headers, with its drafts' bound (None: not known), and the standby that was observed."""
        standby = {STANDBY_HEADER: self.source.standby} if self._observed and self.source.standby else {}
        return {ACCEPTANCE_HEADER: self._head.rule, **_headers_of(speculation), **standby}

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
    `clips`: a limit that the context has no room for is no error. `unused`: fields that were taken and change nothing.
    `warnings`: of those, and of what of the body's schemas the answer is not held to."""

    body: CompletionRequest | ChatRequest
    route: str
    id_prefix: str
    build_writer: Callable[[AnswerHead], AnswerWriter]
    names: Mapping[str, str] = field(default_factory=dict)
    resumable: bool = True
    clips: bool = False
    unused: tuple[str, ...] = ()
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

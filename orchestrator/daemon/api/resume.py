"""Answers that outlive their connection: found by key or by event, decoded for whoever reads, told from any place.

A request is kept that has an Idempotency-Key, or whose client reads server-sent events with their ids. Its tokens go
through the journal to the readers, of whom there may be none for a while, or several.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers

from orchestrator.clock import Clock
from orchestrator.daemon.api.keys import read_credential
from orchestrator.daemon.api.wire import MAX_SEQUENCES, ChatRequest, CompletionRequest
from orchestrator.daemon.control.port import Control
from orchestrator.daemon.journal.book import AnswerBook, KeptAnswer, KeptChoice
from orchestrator.errors import RequestError, build_replaced_error
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from orchestrator.telemetry import get_logger

KEY_HEADER = "Idempotency-Key"
EVENT_HEADER = "Last-Event-ID"

_USABLE_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_MAX_PLACE = 20  # characters of one, with what stands behind it
_EVENT_ID = re.compile(
    rf"(?P<id>[A-Za-z0-9-]{{1,64}}):(?P<places>[0-9.,e-]{{1,{MAX_SEQUENCES * _MAX_PLACE}}})(?P<usage>\+?)"
)
_PLACE = re.compile(r"(?P<tokens>[0-9]{1,9})\.(?P<part>[0-9]{1,9}|e)")
_DIGEST_BYTES = 16

_FORMS = {"/v1/completions": CompletionRequest.__name__, "/v1/chat/completions": ChatRequest.__name__}
"""What journals call a route; one that is not here has its own name."""

OPENING, TEXT, CALLS, END = 0, 1, 2, 1 << 31
"""The parts of what a choice's client is sent at one token, in their order."""

_log = get_logger(__name__)


class Place(NamedTuple):
    """A place in a choice's events: behind so many tokens, the event OPENING, TEXT, from CALLS on a call's, or END."""

    tokens: int
    part: int


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a client lost its stream: what it has of each choice (None: nothing), and whether it has the usage."""

    request_id: str
    places: tuple[Place | None, ...]
    usage: bool


class EventCursor:
    """Names the events of one answer, and leaves out those that the client has. `names`: whether it wants names."""

    def __init__(self, request_id: str, choices: int, *, names: bool, since: ResumePoint | None = None) -> None:
        self._id = request_id
        self._names = names
        self._since = since.places if since is not None else (None,) * choices
        self._at: list[Place | None] = list(self._since)
        self._has_usage = since is not None and since.usage

    def is_new(self, index: int, tokens: int, part: int) -> bool:
        had = self._since[index]
        return had is None or (tokens, part) > had

    def name_event(self, index: int, tokens: int, part: int) -> str:
        """Return the name of an event that is sent now; "" where the client wants none."""
        if not self._names:
            return ""
        self._at[index] = Place(tokens, part)
        return self._format("")

    def name_usage(self) -> str | None:
        """Return the usage event's name; None where the client has it."""
        if self._has_usage:
            return None
        return self._format("+") if self._names else ""

    def _format(self, usage: str) -> str:
        return f"{self._id}:{','.join(map(_format_place, self._at))}{usage}"


class Resumption(NamedTuple):
    """An answer that is kept, and where in it its client is (None: nowhere yet). `again`: it was asked for before."""

    answer: KeptAnswer
    since: ResumePoint | None = None
    again: bool = True

    @property
    def submits(self) -> list[Submit]:
        return [choice.submit for choice in self.answer.choices]

    def refuse_other_model(self, now: Submit) -> None:
        """Raise RequestError where the model that `now` is translated for cannot read this answer, or go on with it."""
        before = self.submits[0]
        unread = before.vocabulary and before.vocabulary != now.vocabulary
        cut = self.answer.has_tokens and not self.answer.complete
        if unread or (cut and before.model_digest and before.model_digest != now.model_digest):
            raise build_replaced_error(begun=True)

    def cursor(self, *, names: bool) -> EventCursor:
        return EventCursor(self.answer.request_id, len(self.answer.choices), names=names, since=self.since)


class KeptAnswers:
    """The answers of an API that a book keeps. `find_control`: what decodes for a model; None where it is gone."""

    def __init__(self, find_control: Callable[[str], Control | None], book: AnswerBook, clock: Clock) -> None:
        self._find_control = find_control
        self._book = book
        self._clock = clock
        self._running: dict[int, _Decoding] = {}

    def knows(self, headers: Headers) -> bool:
        """True where a request has a key or an event of an answer that is kept. Raises RequestError."""
        return self._find_kept(headers)[0] is not None

    def find(self, headers: Headers, body: CompletionRequest | ChatRequest, route: str) -> Resumption | None:
        """Return the answer that is asked for again; None of a new one. Raises RequestError where nothing fits."""
        if KEY_HEADER not in headers and EVENT_HEADER not in headers:
            return None
        self._book.expire()
        answer, since = self._find_kept(headers)
        if answer is not None and answer.body != digest_body(body, route):
            raise RequestError(
                "the key or the event belongs to another request: send the same body again, or another key",
                status=422,
                code="idempotency_key_reused",
                param=KEY_HEADER if read_key(headers) else EVENT_HEADER,
            )
        if since is None:
            return None if answer is None else Resumption(answer, None)
        if answer is None or answer.request_id != since.request_id:
            raise RequestError(
                f"nothing is kept of {since.request_id}: send the request again without {EVENT_HEADER}",
                status=404,
                code="stream_not_found",
                param=EVENT_HEADER,
            )
        if len(since.places) != len(answer.choices):
            raise _bad_event(headers[EVENT_HEADER])
        return Resumption(answer, since)

    def _find_kept(self, headers: Headers) -> tuple[KeptAnswer | None, ResumePoint | None]:
        """Return the answer that headers name, and where in it its client is. Raises RequestError."""
        key, event = read_key(headers), headers.get(EVENT_HEADER, "")
        since = _read_event(event) if event else None
        if not key and since is None:
            return None, None
        owner = _digest(read_credential(headers))
        return self._book.find_answer(key=key, request_id=since.request_id if since else "", owner=owner), since

    def open(
        self,
        headers: Headers,
        body: CompletionRequest | ChatRequest,
        submits: Sequence[Submit],
        request_id: str,
        model: str,
        route: str,
        *,
        names: bool = True,
    ) -> Resumption | None:
        """Keep a new request's answer, if it may be asked for again; None where it may not, or there is no room.
        `names`: events of this route have names."""
        key = read_key(headers)
        if not key and not (names and body.stream and wants_names(headers)):
            return None
        owner, digest = _digest(read_credential(headers)), digest_body(body, route)
        known = self._book.find_answer(key=key, owner=owner) if key else None
        if known is not None and known.body == digest:  # its twin came while this one was being looked at
            return Resumption(known)
        created_s = int(self._clock.wall_s())
        terms = {"key": key, "owner": owner, "body": digest, "model": model}
        opened = self._book.open(request_id, submits, created_s=created_s, **terms)
        return None if opened is None else Resumption(opened, again=False)

    def deltas(self, kept: Resumption, index: int, is_over: Callable[[], bool]) -> AsyncGenerator[Delta, None]:
        """Yield a choice's tokens from its first on, as they were committed, and then as they are. They are decoded
        while somebody reads, and for a while after. `is_over`: whether the text has come to its end, and the rest is
        not wanted. Raises RequestError."""
        had = kept.since.places[index] if kept.since is not None else None
        return self._read(kept.answer, index, had.tokens if had is not None else 0, is_over)

    def go_on(self, answers: Sequence[KeptAnswer], control: Control) -> None:
        """Decode, for a while, what clients with a key waited for in the last daemon: they may come back."""
        for answer in answers:
            if answer.key and self._find_control(answer.model) is control:
                self._decode(answer).leave()

    def let_go(self) -> None:
        """Decode no more for those who are away: the daemon drains, and the next one goes on for them."""
        for decoding in list(self._running.values()):
            if not decoding.readers:
                decoding.finish()

    async def close(self) -> None:
        await asyncio.gather(*(decoding.close() for decoding in list(self._running.values())))

    async def _read(
        self, answer: KeptAnswer, index: int, split_at: int, is_over: Callable[[], bool]
    ) -> AsyncGenerator[Delta, None]:
        choice, taken = answer.choices[index], 0
        decoding = self._decode(answer)
        try:
            while True:
                delta = choice.tell(taken, split_at)
                if delta is None:
                    if (error := decoding.errors.get(index)) is not None:
                        raise error
                    await choice.wait_for_more()
                    continue
                yield delta
                taken += len(delta.tokens)
                if delta.finish:
                    return
        finally:
            if is_over():
                self._book.cut(answer, index)
                decoding.end(index)
            decoding.leave()

    def _decode(self, answer: KeptAnswer) -> _Decoding:
        decoding = self._running.get(answer.number)
        if decoding is None or (decoding.failed and not decoding.readers):
            control = self._find_control(answer.model)
            decoding = self._running[answer.number] = _Decoding(control, self._book, answer, self._forget)
        decoding.enter()
        return decoding

    def _forget(self, decoding: _Decoding) -> None:
        if self._running.get(decoding.answer.number) is decoding:
            del self._running[decoding.answer.number]


class _Decoding:
    """Decodes what is missing of an answer, a task for each choice."""

    def __init__(
        self, control: Control | None, book: AnswerBook, answer: KeptAnswer, forget: Callable[[_Decoding], None]
    ) -> None:
        self.answer = answer
        self.readers = 0
        self.errors: dict[int, Exception] = {}
        self._control = control
        self._book = book
        self._forget = forget
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        again = f"~{secrets.token_hex(4)}" if answer.started else ""
        book.mark_busy(answer)
        self._tasks = {
            index: asyncio.create_task(self._run(index, choice, again), name=f"decode {choice.submit.request_id}")
            for index, choice in enumerate(answer.choices)
            if not choice.finish
        }

    @property
    def failed(self) -> bool:
        """True when a choice ended with an error: only a new attempt gets it further."""
        return bool(self.errors)

    def enter(self) -> None:
        self.readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self, index: int) -> None:
        if index in self._tasks:
            self._tasks[index].cancel()

    def leave(self) -> None:
        """One reads no more. The last one leaves a request with a key running for a while; the rest is cancelled."""
        self.readers -= 1
        if self.readers or self._closed:
            return
        detached_s = self._book.limits.detached_s
        if self.answer.complete or self.failed or not self.answer.key or not detached_s:
            self.finish()
        else:
            self._timer = asyncio.get_running_loop().call_later(detached_s, self._give_up)

    async def close(self) -> None:
        self.finish()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _give_up(self) -> None:
        _log.info("nobody came back for an answer", id=self.answer.request_id)
        self.finish()

    def finish(self) -> None:
        """Decode no more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._forget(self)
        self._book.mark_idle(self.answer)
        if self.failed and not self.answer.has_tokens:  # it was refused: the key is free again
            self._book.forget(self.answer)

    async def _run(self, index: int, choice: KeptChoice, again: str) -> None:
        """Go on behind what was committed, as a stream of its own: a worker may still speak of the old one."""
        stream = f"{choice.submit.request_id}{again}"
        behind = {"committed": list(choice.tokens), "committed_group": choice.group}
        submit = msgspec.structs.replace(choice.submit, request_id=stream, **behind)
        try:
            if self._control is None:
                raise RequestError(f"the model '{self.answer.model}' is not here any more", status=404)
            async with aclosing(self._control.generate(submit)) as source:  # type: ignore[type-var]  # it is a generator
                async for delta in source:
                    self._book.record(self.answer, index, delta)
        except Exception as error:  # whoever reads raises it
            self.errors[index] = error
            choice.wake()
        if not self.readers and (self.failed or self.answer.complete):
            self.finish()


def read_key(headers: Headers) -> str:
    """Return the request's Idempotency-Key, "" where it has none. Raises RequestError."""
    key = headers.get(KEY_HEADER, "").strip()
    if key and not _USABLE_KEY.fullmatch(key):
        raise RequestError(
            "an Idempotency-Key is 1 to 255 printable ASCII characters without spaces",
            code="invalid_value",
            param=KEY_HEADER,
        )
    return key


def wants_names(headers: Headers) -> bool:
    """Whether events are to have ids: the client may resume, or says that it reads server-sent events. Some clients
    take every line of a stream for JSON, and get data alone."""
    return KEY_HEADER in headers or EVENT_HEADER in headers or "text/event-stream" in headers.get("Accept", "").lower()


def digest_body(body: CompletionRequest | ChatRequest, route: str) -> str:
    """Return what two requests share exactly where they ask one route for the same."""
    identity = f"{_FORMS.get(route, route)} {body.model_dump_json(exclude_defaults=True)}"
    return blake2b(identity.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=_DIGEST_BYTES).hexdigest()


def _read_event(text: str) -> ResumePoint:
    match = _EVENT_ID.fullmatch(text.strip())
    if match is None:
        raise _bad_event(text)
    places: list[Place | None] = []
    for spelled in match["places"].split(","):
        place = _PLACE.fullmatch(spelled)
        if place is None and spelled != "-":
            raise _bad_event(text)
        part = place["part"] if place is not None else ""
        places.append(None if place is None else Place(int(place["tokens"]), END if part == "e" else int(part)))
    return ResumePoint(match["id"], tuple(places), bool(match["usage"]))


def _bad_event(text: str) -> RequestError:
    return RequestError(f"{text[:80]!r} is no id of an event of this server", code="invalid_value", param=EVENT_HEADER)


def _format_place(place: Place | None) -> str:
    if place is None:
        return "-"
    return f"{place.tokens}.{'e' if place.part == END else place.part}"

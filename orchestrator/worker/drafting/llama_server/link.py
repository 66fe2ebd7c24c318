"""Drafts of a llama-server, as the target's end of a link to a draft worker has them (`remote/drafter`).

Each slot of the server drafts for one sequence at a time, in a thread: a request cannot be cut short, so a sequence has
one at a time, and what comes late may still go on behind the target's choices. After an answer the server drafts on
while the target verifies, where that takes nothing from it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from adapters.framing import ProtocolError
from device_profiles.units import MS_PER_S
from orchestrator.protocol.links.endpoint import LinkLost
from orchestrator.worker.drafting import protocol as wire
from orchestrator.worker.drafting.llama_server.client import (
    Completion,
    LlamaServerClient,
    Refused,
    SequenceTooLong,
)
from orchestrator.worker.drafting.port import NOTHING, Ask, Draft
from policies.speculation.draft_request import ServerPace, count_asked_tokens, observe_server_answer
from policies.speculation.draft_wait import RESTS_AFTER

_LEAST_CHANCE = 0.05  # a guess less likely than this is not gone on from
_IN_TIME = 0.9  # of a round the server may draft ahead: the rest is the way back
_BAD_REQUEST = 400  # of HTTP
_SHORTEST_S = 0.0001  # of a wait, which may end that much early


@dataclass(slots=True, eq=False)
class _ServedSequence:
    """A sequence, and the `line` that is drafted behind its first `base` tokens. `number` counts the Begins. `limit`:
    how many tokens were asked for last. `owed`: a request for them is to be sent, or is under way. `grown`: there is
    more than was told. `ended`: the line goes no further. `undraftable`: the server cannot take the sequence."""

    tokens: list[int]
    number: int
    base: int = 0
    line: Draft = NOTHING
    limit: int = 0
    owed: bool = False
    fetching: bool = False
    grown: bool = False
    ended: bool = False
    undraftable: bool = False

    def continue_from(self, position: int) -> Draft:
        """Return what the line says behind so many tokens; nothing where they are not what it says before."""
        decided = position - self.base
        known = list(self.line.tokens[:decided])
        return self.line.behind(decided) if decided >= 0 and known == self.tokens[self.base : position] else NOTHING

    @property
    def rest(self) -> Draft:
        """What the line says behind all tokens."""
        return self.continue_from(len(self.tokens))

    @property
    def may_grow(self) -> bool:
        """Whether the server can draft further tokens for it."""
        return not (self.undraftable or self.ended)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.ended = self.ended and bool(self.rest.tokens)


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A draft request that is not answered yet: what was asked for each sequence, and how many tokens it had. `drafts`
    are those that are there, by the sequence's number, each behind so many tokens of its sequence. `done_s`: when all
    were there, inf before that."""

    number: int
    asks: tuple[tuple[_ServedSequence, Ask, int], ...]
    came_s: float
    within_ms: float
    round_ms: float
    drafts: dict[int, tuple[int, Draft]] = field(default_factory=dict)
    done_s: float = math.inf

    @property
    def late_s(self) -> float:
        """When its time is up."""
        return self.came_s + self.within_ms / MS_PER_S

    def settle(self) -> None:
        """Take what is there: a line that goes on behind what its sequence had, or nothing where there will be none."""
        for sequence, _, position in self.asks:
            if sequence.number not in self.drafts:
                start = max(position, sequence.base)
                draft = sequence.continue_from(start)
                sequence.owed = sequence.owed and not draft.tokens and sequence.may_grow
                if not sequence.owed:
                    self.drafts[sequence.number] = (start, draft) if draft.tokens else (position, NOTHING)
        if len(self.drafts) == len(self.asks):
            self.done_s = min(self.done_s, time.monotonic())

    def find_end(self, now_s: float) -> float | None:
        """Return when there was as much as there is to be: all, or a part when its time was up; None: not yet."""
        if self.done_s <= now_s:
            return self.done_s
        return self.late_s if self.drafts and now_s >= self.late_s else None


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Tokens that are asked of the server behind a prompt."""

    sequence: _ServedSequence
    prompt: list[int]
    count: int


class ServerLink:
    """Implements remote.connection.DraftChannel. `slots`: for so many sequences the server drafts at a time.
    `runs_ahead`: it does so while the target verifies."""

    def __init__(self, name: str, client: LlamaServerClient, vocabulary: int, slots: int, *, runs_ahead: bool) -> None:
        self._name = name
        self._client = client
        self._vocabulary = vocabulary
        self._runs_ahead = runs_ahead
        self._changed = threading.Condition()
        self._sequences: dict[str, _ServedSequence] = {}
        self._slots = slots
        self._begins = self._hits = self._misses = self._threads = 0
        self._request: _OpenRequest | None = None
        self._pace = ServerPace()
        self._round_ms = self._way_ms = 0.0
        self._least_way_ms = math.inf
        self._lead = self._unasked = 0
        self._fault: Exception | None = None
        self._closed = False

    @property
    def sent_bytes(self) -> int:
        """Of bodies; headers come on top."""
        return self._client.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._client.received_bytes

    def send(self, message: wire.DraftRequest) -> None:
        with self._changed:
            for update in message.updates:
                self._update(update)
            self._lead = message.lead
            if message.asks:
                self._open(message)
            elif self._request is None:
                self._rest()
            self._changed.notify_all()

    def flush(self) -> None:
        """Nothing is left: see DraftChannel."""

    def drafts(self, timeout_s: float) -> wire.DraftResponse | wire.DraftLines | None:
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while (message := self._next_message()) is None and (now_s := time.monotonic()) < end_s:
                request = self._request
                until_s = end_s if request is None or now_s > request.late_s else min(end_s, request.late_s)
                self._changed.wait(max(_SHORTEST_S, until_s - now_s))
            return message

    def close(self) -> None:
        """See DraftChannel. What the server was asked for it drafts to its end, and the last one to hear closes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            unused = not self._threads
        if unused:
            self._client.close()

    def _update(self, update: wire.Update) -> None:
        match update:
            case wire.Begin(key, tokens, _):
                self._begins += 1
                self._sequences[key] = _ServedSequence(list(tokens), self._begins)
            case wire.Extend(key, tokens):
                if (sequence := self._sequences.get(key)) is not None:
                    sequence.extend(tokens)
            case wire.End(key, _):
                self._sequences.pop(key, None)

    def _open(self, message: wire.DraftRequest) -> None:
        asks, self._unasked = [], 0
        for ask in message.asks:
            sequence = self._sequences[ask.key]
            sequence.limit = ask.limit
            known = len(sequence.rest.tokens)
            self._hits, self._misses = self._hits + bool(known), self._misses + (not known)
            sequence.owed = known < ask.limit and sequence.may_grow
            asks.append((sequence, ask, len(sequence.tokens)))
        self._round_ms = message.asks[0].round_ms or message.asks[0].last_ms
        request = _OpenRequest(message.number, tuple(asks), time.monotonic(), message.within_ms, message.round_ms)
        request.settle()
        self._request = request
        while self._threads < min(self._slots, len(asks)):
            self._threads += 1
            threading.Thread(target=self._serve, name=f"{self._name} {self._threads}", daemon=True).start()

    def _rest(self) -> None:
        """Nobody asks in a round: where that goes on, drafts do not pay, and what is drafted ahead only takes time."""
        self._unasked += 1
        if self._unasked == RESTS_AFTER:
            for sequence in self._sequences.values():
                sequence.limit = 0

    def _next_message(self) -> wire.DraftResponse | wire.DraftLines | None:
        """Return what is to be told next. Raises LinkLost, ProtocolError."""
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise LinkLost("the connection was closed")
        request = self._request
        if request is not None and (end_s := request.find_end(time.monotonic())) is not None:
            self._request = None
            return self._answer(request, (end_s - request.came_s) * MS_PER_S)
        for sequence in self._sequences.values():
            if sequence.grown:
                sequence.grown = False
                return wire.DraftLines(sequence.number, sequence.base, wire.WireDraft.of(sequence.line))
        return None

    def _answer(self, request: _OpenRequest, took_ms: float) -> wire.DraftResponse:
        drafts, offsets = [], []
        for sequence, ask, position in request.asks:
            start, draft = request.drafts.get(sequence.number, (position, NOTHING))
            drafts.append(wire.WireDraft.of(draft.keep_likely(ask.limit, ask.least)))
            offsets.append(start - position)
        return wire.DraftResponse(
            *(request.number, drafts, took_ms, 0, self._hits, self._misses),
            offsets=offsets,
            held_ms=took_ms - self._way_ms,
        )

    def _serve(self) -> None:
        """Ask the server for what is wanted, one request after the other, until the link is over."""
        try:
            while (fetch := self._next_fetch()) is not None:
                self._carry_out(fetch)
        except (LinkLost, ProtocolError) as error:
            with self._changed:
                self._fault = self._fault or error
        with self._changed:
            self._threads -= 1
            self._changed.notify_all()
            last = self._closed and not self._threads
        if last:
            self._client.close()

    def _carry_out(self, fetch: _Fetch) -> None:
        """Take in what the server drafts. Raises LinkLost, ProtocolError."""
        try:
            completion = self._client.complete(fetch.prompt, fetch.count)
        except Refused as refused:
            if refused.status != _BAD_REQUEST and not isinstance(refused, SequenceTooLong):
                raise ProtocolError(f"it refused to draft: {refused}") from refused
            self._give_up(fetch.sequence)  # it is too long, or has a token that the server does not know
        else:
            self._take(fetch, completion)

    def _next_fetch(self) -> _Fetch | None:
        with self._changed:
            while not (self._closed or self._fault):
                for sequence in sorted(self._sequences.values(), key=lambda sequence: not sequence.owed):
                    if count := self._count_wanted(sequence):
                        # What goes on behind all tokens is kept of its line.
                        sequence.base, sequence.line = len(sequence.tokens), sequence.rest
                        sequence.fetching = True
                        return _Fetch(sequence, [*sequence.tokens, *sequence.line.tokens], count)
                self._changed.wait()
            return None

    def _count_wanted(self, sequence: _ServedSequence) -> int:
        if sequence.fetching or not sequence.may_grow:
            return 0
        rest, request = sequence.rest, self._request
        if sequence.owed and request is not None:
            missing = sequence.limit - len(rest.tokens)
            return count_asked_tokens(self._pace, missing, max(1.0, request.within_ms), request.round_ms)
        missing = 1 + 2 * sequence.limit + self._lead - len(rest.tokens)
        likely = math.prod(rest.confidences) >= _LEAST_CHANCE
        if not (self._runs_ahead and sequence.limit and missing > 0 and likely and self._round_ms):
            return 0
        return count_asked_tokens(self._pace, missing, _IN_TIME * self._round_ms, 0.0)

    def _take(self, fetch: _Fetch, completion: Completion) -> None:
        """Raises ProtocolError."""
        sequence, tokens = fetch.sequence, completion.tokens
        if not all(0 <= token < self._vocabulary for token in tokens):
            raise ProtocolError(f"a token is outside its vocabulary of {self._vocabulary}")
        with self._changed:
            self._way_ms, self._least_way_ms = completion.way_ms, min(self._least_way_ms, completion.way_ms)
            self._pace = observe_server_answer(
                *(self._pace, completion.confidences, completion.took_ms, completion.evaluated),
                queue_ms=self._way_ms - self._least_way_ms,
            )
            sequence.line = replace(
                sequence.line,
                tokens=(*sequence.line.tokens, *tokens),
                confidences=(*sequence.line.confidences, *completion.confidences),
                drafter=self._name,
            )
            sequence.ended = len(tokens) < fetch.count
            sequence.fetching, sequence.grown = False, True
            self._settle()

    def _give_up(self, sequence: _ServedSequence) -> None:
        """The server cannot take a sequence, which it says by drafting nothing."""
        with self._changed:
            sequence.undraftable, sequence.fetching, sequence.grown = True, False, True
            self._settle()

    def _settle(self) -> None:
        if self._request is not None:
            self._request.settle()
        self._changed.notify_all()

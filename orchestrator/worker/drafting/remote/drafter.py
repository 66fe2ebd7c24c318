"""A drafter in another process, seen from the target's worker.

Nothing that happens to that process can do more than leave a round without drafts. No call waits longer than a draft is
worth (`policies/speculation/draft_wait`), and every answer is checked. The memory of running sequences is enough to
tell them to a new process. History is the truth; the other side is a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import msgspec

from adapters.framing import ProtocolError
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DrafterState, DraftLink, RemoteState
from orchestrator.protocol.links.endpoint import LinkLost
from orchestrator.worker.drafting import protocol as wire
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Ask, Draft, DraftHints, WorkBeside
from orchestrator.worker.drafting.remote.connection import Connection, ConnectionThread, DraftChannel
from orchestrator.worker.drafting.remote.sequence import RemoteSequence, RoundTrip
from policies.sampling import Sampling
from policies.speculation import draft_wait
from policies.speculation.chain import estimate_accepted_tokens
from policies.speculation.draft_wait import RESTS_AFTER, DraftWait

_MOST_MESSAGES = 1024  # that are read at once: a drafter that says more than it is heard keeps up nobody
_RESTING = "resting"
_MOST_SURE = 255  # of a byte (drafting.protocol)
# Of the time that a round waits, the other side may draft: the rest is the way back. ADR 0017. Not tuned: the link's
# round trip is taken off besides (ADR 0079).
_IN_TIME = 0.9
_WAKES_WITHIN = 24
"""Rounds from a first ask on, within which the other side has a draft, if it is ever to have one in time: it begins
with nothing. Not tuned."""
_KNOWN_WITHIN = 8
"""Rounds that nobody is asked in while none without drafts is known, which takes four (speculation.cost_model): beside
cheaper drafts none may come. Not tuned."""


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """`max_wait_ms` bounds what a round waits for drafts. A process that has not answered for `answer_timeout_s` is
    given up as hung. One that hangs is tried again, and one that talks nonsense or cannot draft for this target after
    `retry_s`. None: it is ended and started anew, and another endpoint will be named."""

    max_wait_ms: float = 100.0
    answer_timeout_s: float = 20.0
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    number: int
    sent_s: float
    waited_until_s: float
    asks: tuple[tuple[RemoteSequence, int, int], ...]  # the sequence, how many tokens it had, the limit
    usual: bool  # the other side had read all prompts
    wait_ms: float  # what the round waits for it at most


@dataclass(slots=True)
class _Counts:
    asks: int = 0
    in_time: int = 0
    late: int = 0
    wait_ms: float = 0.0
    connections: int = 0
    memory_bytes: int = 0
    peak_rss_bytes: int = 0
    ahead: list[int] = field(default_factory=lambda: [0, 0])  # hits and misses of earlier connections
    ahead_now: tuple[int, int] = (0, 0)
    bytes_before: tuple[int, int] = (0, 0)  # sent and received over earlier connections

    def bytes_with(self, link: DraftChannel | None) -> tuple[int, int]:
        sent, received = self.bytes_before
        return (sent, received) if link is None else (sent + link.sent_bytes, received + link.received_bytes)

    def ahead_of(self, index: int) -> int:
        return self.ahead[index] + self.ahead_now[index]


class RemoteDrafter:
    """Implements drafting.port.Drafter. `greet` makes a connection to an endpoint, in a thread: see
    connection.Connect. `report` hears of every change of the connection, from any thread."""

    def __init__(
        self,
        name: str,
        *,
        greet: Callable[[Any], Connection],
        limits: RemoteLimits,
        clock: Clock,
        report: Callable[[DraftLink], None],
    ) -> None:
        self.name = name
        self._greet = greet
        self._draft_vocabulary = self._most_sequences = 0
        self._limits = limits
        self._clock = clock
        self._tell = report
        self._state, self._reason = "starting", "it is not connected yet"
        self._described = DrafterState(name, "model")
        self._apart = self._runs_ahead = self._may_share = False
        self._beside = WorkBeside()
        self._unasked = RESTS_AFTER
        self._waking = 0
        self._unknown = 0
        self._connector = ConnectionThread(name, self._report, limits.retry_s)
        self._link: DraftChannel | None = None
        self._sequences: dict[str, RemoteSequence] = {}
        self._begun: dict[int, RemoteSequence] = {}  # by the number that its Begin has on this connection
        self._begins = 0
        self._updates: list[wire.Update] = []
        self._pending: _PendingRequest | None = None
        self._number = 0
        self._pace = DraftWait()
        self._round_trip = RoundTrip()
        self._waits = False
        self._lead = 0
        self._counts = _Counts()

    def attach(self, endpoint: Any) -> None:
        """Draft by the process at this endpoint, one that `greet` takes, from now on. Thread-safe."""
        self._connector.aim(partial(self._greet, endpoint))
        if self._state == _RESTING:
            self._state, self._reason = "starting", "it is not connected yet"

    def let_rest(self, reason: str) -> None:
        """Draft nothing until the next `attach`, and connect to nothing."""
        self._connector.aim(None)
        self._close_link()
        self._state, self._reason = _RESTING, reason

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        sequence = self._sequences[key] = RemoteSequence(key, list(tokens), sampling)
        if self._link is not None:
            self._updates.append(self._begin(sequence))

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        sequence.tokens.extend(tokens)
        self._judge(sequence)
        self._note(wire.Extend(key, list(tokens)))

    def end(self, key: str, *, keep: bool) -> None:
        if self._sequences.pop(key, None) is not None:
            self._note(wire.End(key, keep))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Waits no longer than `policies.speculation.draft_wait` allows; what is not there then is not
        drafted."""
        try:
            self._take_new_link()
            if self._link is not None:
                self._unknown += any(ask.round_ms <= 0.0 for ask in asks)
                served = set(islice(self._sequences, self._most_sequences or None))
                self._exchange(self._link, [ask for ask in asks if ask.key in served and self._may_ask(ask)])
        except LinkLost as error:
            self._drop("lost", str(error))
        except ProtocolError as error:
            self._drop("garbage", str(error))
        return [self._offer(ask) for ask in asks]

    def _may_ask(self, ask: Ask) -> bool:
        """Return whether drafts are wanted. While no round without any is known, nobody could tell what they take from
        the target."""
        known = ask.round_ms > 0.0 or not self._may_share or self._unknown > _KNOWN_WITHIN
        return ask.fixed or (known and not ask.cheap_only)

    def describe_beside(self) -> WorkBeside:
        return self._beside

    def memory_bytes(self) -> int:
        """What the other process said last."""
        return self._counts.memory_bytes

    def close(self) -> None:
        self._connector.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    def states(self) -> list[DrafterState]:
        """What the other process said of itself last, and how it does from here: a link that was made
        meanwhile is taken, whether or not there was anything to ask it for."""
        self._take_new_link()
        counts = self._counts
        remote = RemoteState(
            asks=counts.asks,
            in_time=counts.in_time,
            late=counts.late,
            wait_ms=counts.wait_ms,
            answer_ms=self._pace.answer_ms,
            connections=counts.connections,
            runs_ahead=self._runs_ahead,
            ahead_hits=counts.ahead_of(0),
            ahead_misses=counts.ahead_of(1),
            peak_rss_bytes=counts.peak_rss_bytes,
            rtt_ms=self._round_trip.best_ms,
            lead_tokens=self._lead,
            sent_bytes=counts.bytes_with(self._link)[0],
            received_bytes=counts.bytes_with(self._link)[1],
        )
        changes = {"name": self.name, "state": self._state, "reason": self._reason, "remote": remote}
        counted = {"rounds": counts.in_time, "draft_ms": counts.wait_ms, "memory_bytes": counts.memory_bytes}
        return [msgspec.structs.replace(self._described, **changes, **counted)]

    def _note(self, update: wire.Update) -> None:
        if self._link is not None:  # a new link is told everything anyway
            self._updates.append(update)

    def _begin(self, sequence: RemoteSequence) -> wire.Begin:
        self._begins += 1
        running = self._sequences
        self._begun = {number: known for number, known in self._begun.items() if running.get(known.key) is known}
        self._begun[self._begins] = sequence
        return wire.Begin(sequence.key, list(sequence.tokens), sequence.sampling)

    def _exchange(self, link: DraftChannel, asks: list[Ask]) -> None:
        """Say what happened, ask for drafts where none are awaited, and take in what comes in time."""
        if asks and self._unasked >= RESTS_AFTER:
            self._waking = _WAKES_WITHIN
        self._unasked = 0 if asks else self._unasked + 1
        self._converse(link, asks)
        if asks and self._waking:
            drafted = any(self._sequences[ask.key].rest(1).tokens for ask in asks)
            self._waking = 0 if drafted else self._waking - 1
        reads = bool(asks) and (self._waking > 0 or not all(self._sequences[ask.key].met for ask in asks))
        works = self._pending is not None or (self._runs_ahead and self._unasked < RESTS_AFTER)
        if self._link is link:
            self._beside = WorkBeside(self._may_share and works, reads)

    def _converse(self, link: DraftChannel, asks: list[Ask]) -> None:
        self._take(link, 0.0)
        now_s = self._clock.monotonic_s()
        if self._pending is not None and now_s - self._pending.sent_s > self._limits.answer_timeout_s:
            self._drop("hung", f"no answer for {self._limits.answer_timeout_s:g} s")
            return
        updates, self._updates = self._updates, []
        if self._pending is not None or not asks:
            if updates:
                link.send(wire.DraftRequest(self._number, updates, []))
            link.flush()
            return
        self._pace = draft_wait.count_draft_request(self._pace)
        round_ms = asks[0].round_ms or asks[0].last_ms  # the last round is a guess, until more is known
        token_ms, row_ms = asks[0].token_ms, asks[0].row_ms
        sequences = [self._sequences[ask.key] for ask in asks]
        reading = not all(sequence.met for sequence in sequences)
        drafted = all(sequence.rest(1).tokens for sequence in sequences)
        wait_ms = 0.0
        if not (reading or drafted):
            wait_ms = draft_wait.patience_ms(self._pace, token_ms, row_ms, self._limits.max_wait_ms)
        self._lead = draft_wait.count_lead_tokens(self._round_trip.best_ms, round_ms, self._pace.accepted)
        if wait_ms == 0.0 and not (reading or self._apart):
            link.send(
                wire.DraftRequest(self._number, updates, [])
            )  # what is not waited for would be drafted at the target's cost
            return
        self._number += 1
        self._counts.asks += 1
        sent = tuple((sequence, len(sequence.tokens), ask.limit) for sequence, ask in zip(sequences, asks, strict=True))
        waits_until_s = now_s + wait_ms / MS_PER_S
        self._pending = _PendingRequest(self._number, now_s, waits_until_s, sent, not reading, wait_ms)
        price_ms = token_ms if wait_ms else 0.0
        within_ms = max(0.0, (_IN_TIME * wait_ms or round_ms) - self._round_trip.best_ms)
        link.send(wire.DraftRequest(self._number, updates, asks, within_ms, price_ms, now_s, self._lead))
        self._wait(link, self._pending, token_ms, row_ms)
        self._counts.wait_ms += (self._clock.monotonic_s() - now_s) * MS_PER_S

    def _wait(self, link: DraftChannel, request: _PendingRequest, token_ms: float, row_ms: float) -> None:
        """Wait for an answer as long as its round does; not on for what is left to gain where lines that were under way
        serve the round. Raises LinkLost, ProtocolError."""
        self._waits = request.wait_ms > 0.0
        try:
            self._take(link, 0.0)
            while self._pending is request:
                passed_ms = (self._clock.monotonic_s() - request.sent_s) * MS_PER_S
                rests = [sequence.rest(limit) for sequence, _, limit in request.asks]
                served = [estimate_accepted_tokens(rest.confidences) for rest in rests]
                if min(served, default=0.0) > 0.0:
                    left_ms = draft_wait.gain_ms(self._pace, token_ms, row_ms, sum(served) / len(served))
                    if passed_ms + left_ms < self._pace.answer_ms:
                        break
                if passed_ms >= request.wait_ms:
                    break
                self._take(link, (request.wait_ms - passed_ms) / MS_PER_S)
        finally:
            self._waits = False

    def _take(self, link: DraftChannel, timeout_s: float) -> None:
        """Take in all that has come: an answer, and what was drafted ahead; wait so long for the first of it. Raises
        LinkLost, ProtocolError."""
        for _ in range(_MOST_MESSAGES):
            message = link.drafts(timeout_s)
            if message is None:
                return
            if isinstance(message, wire.DraftLines):
                self._take_lines(message)
            else:
                self._take_answer(message)
            timeout_s = 0.0

    def _take_lines(self, lines: wire.DraftLines) -> None:
        sequence = self._begun.get(lines.sequence)
        if sequence is None or self._sequences.get(sequence.key) is not sequence:
            return  # it has ended
        if not 0 <= lines.base <= len(sequence.tokens):
            raise ProtocolError(f"drafts go on behind {lines.base} tokens of {len(sequence.tokens)}")
        line = self._check_line(lines.line)
        branches = {(branch.accepted, branch.token): self._join(line, branch) for branch in lines.branches}
        sequence.take_lines(lines.base, line, branches)

    def _join(self, line: Draft, branch: wire.WireBranch) -> Draft:
        begin = line.truncate(branch.accepted)
        if not 0 <= branch.accepted == len(begin.tokens):
            raise ProtocolError(f"a branch leaves a line of {len(line.tokens)} tokens behind {branch.accepted}")
        if not 0 <= branch.sureness <= _MOST_SURE:
            raise ProtocolError("a chance is no probability")
        first = self._check_line(wire.WireDraft((branch.token,), bytes((branch.sureness,))))
        rest = self._check_line(branch.draft)
        confidences = (*begin.confidences, *first.confidences, *rest.confidences)
        return Draft((*begin.tokens, *first.tokens, *rest.tokens), confidences, self.name)

    def _check_line(self, guess: wire.WireDraft) -> Draft:
        return wire.check_guess(guess, wire.MOST_AHEAD, self._draft_vocabulary, self.name)

    def _take_answer(self, answer: wire.DraftResponse) -> None:
        request, self._pending = self._pending, None
        if request is None or answer.number != request.number:
            raise ProtocolError(f"an answer to request {answer.number} came, which nobody waits for")
        drafts = self._drafts(request, answer)
        now_s = self._clock.monotonic_s()
        waited = self._waits and now_s <= request.waited_until_s
        if request.usual:
            self._pace = draft_wait.observe_draft_answer(
                self._pace, self._answer_ms(request, answer, now_s, waited=waited)
            )
        counts = self._counts
        counts.in_time += waited
        counts.late += not waited
        counts.memory_bytes, counts.peak_rss_bytes = answer.memory_bytes, answer.peak_rss_bytes
        counts.ahead_now = (answer.ahead_hits, answer.ahead_misses)
        offsets = answer.offsets or [0] * len(drafts)
        for (sequence, base, _), draft, offset in zip(request.asks, drafts, offsets, strict=True):
            sequence.base, sequence.guess, sequence.open = base + offset, draft, True
            sequence.met = sequence.met or bool(draft.tokens)
            self._judge(sequence)

    def _answer_ms(self, request: _PendingRequest, answer: wire.DraftResponse, now_s: float, *, waited: bool) -> float:
        """Return what it took to the answer; one that nobody waited for may have lain there for a while."""
        took_ms = (now_s - request.sent_s) * MS_PER_S
        if waited:
            self._round_trip.observe_trip(took_ms - answer.held_ms)
            return took_ms
        return min(took_ms, answer.took_ms + self._round_trip.best_ms)

    def _drafts(self, request: _PendingRequest, answer: wire.DraftResponse) -> list[Draft]:
        """Return what an answer brings. Raises ProtocolError where it cannot be one."""
        if len(answer.drafts) != len(request.asks):
            raise ProtocolError(f"{len(answer.drafts)} drafts came for {len(request.asks)} sequences")
        if answer.offsets and len(answer.offsets) != len(request.asks):
            raise ProtocolError(f"{len(answer.offsets)} offsets came for {len(request.asks)} sequences")
        for (sequence, base, _), offset in zip(request.asks, answer.offsets, strict=False):
            if not 0 <= offset <= len(sequence.tokens) - base:
                raise ProtocolError(f"a draft is {offset} tokens behind what was asked for")
        return [
            wire.check_guess(guess, limit, self._draft_vocabulary, self.name)
            for (_, _, limit), guess in zip(request.asks, answer.drafts, strict=True)
        ]

    def _judge(self, sequence: RemoteSequence) -> None:
        right = sequence.verdict()
        if right is not None:
            self._pace = draft_wait.observe_accepted_tokens(self._pace, right)

    def _offer(self, ask: Ask) -> Draft:
        sequence = self._sequences.get(ask.key)
        return NOTHING if sequence is None else sequence.rest(ask.limit)

    def _take_new_link(self) -> None:
        made = self._connector.take()
        if made is None:
            return
        if self._link is not None:
            self._counts.bytes_before = self._counts.bytes_with(self._link)
            self._link.close()
        self._link, welcome = made.link, made.welcome
        self._round_trip = RoundTrip()
        self._round_trip.observe_trip(made.greeting_ms)
        self._pending = None
        self._state, self._reason = "ok", ""
        self._described, self._apart, self._runs_ahead = welcome.drafter, welcome.apart, welcome.runs_ahead
        self._may_share = made.may_share
        self._draft_vocabulary, self._most_sequences = welcome.vocabulary_size, welcome.most_sequences
        self._counts.connections += 1
        self._counts.ahead = [self._counts.ahead_of(0), self._counts.ahead_of(1)]
        self._counts.ahead_now = (0, 0)
        for sequence in self._sequences.values():
            sequence.met = False
        self._begun, self._begins = {}, 0
        for sequence in self._sequences.values():
            sequence.drop_lines()
        self._updates = [self._begin(sequence) for sequence in self._sequences.values()]

    def _drop(self, state: Literal["lost", "hung", "garbage"], reason: str) -> None:
        """Go on without the link; one that was merely lost is made again."""
        self._close_link()
        self._report(DraftLink(self.name, state, reason))
        if state == "lost":
            self._connector.again()
        elif self._limits.retry_s is not None:
            self._connector.again(self._limits.retry_s if state == "garbage" else 0.0)

    def _close_link(self) -> None:
        if self._link is not None:
            self._counts.bytes_before = self._counts.bytes_with(self._link)
            self._link.close()
            self._link = None
        self._pending = None
        self._beside = WorkBeside()
        self._updates = []

    def _report(self, link: DraftLink) -> None:
        if link.state != "connected":  # it is "ok" when the loop takes the link
            if self._state == _RESTING or (link.state, link.reason) == (self._state, self._reason):
                return  # it tries on, and nothing has changed
            self._state, self._reason = link.state, link.reason
        self._tell(link)

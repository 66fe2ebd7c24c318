"""The answers that a client may resume: what was asked, and the tokens that were committed to it so far.

History is the truth: with these a stream goes on anywhere, also in the next daemon, and an answer is told again from
any place in it. Whoever decodes records what was committed, before anybody is sent it.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.config.model import JournalSection
from orchestrator.daemon.journal.records import CUT, HEAD_BYTES, Committed, CommittedTokens, Opened, Record, encode_body
from orchestrator.daemon.journal.segments import SegmentFiles
from orchestrator.daemon.journal.standing import JournalView, choose_bodies, list_problems
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, RequestStats
from policies.sampling.logprobs import TokenScore
from policies.serving.overrides import EffectiveBound

_TOKEN_BYTES = 40  # of a token in memory
_ENTRY_BYTES = 2048  # of a request in memory, without its tokens
_SCORE_BYTES = 400  # of a token's log-probabilities
_SAY_FULL_EVERY_S = 60.0  # in the log. Not tuned.
# To allocate what is missing, and to take in again what did not fit. ADR 0106.
_TRY_EVERY_S = 5.0
# Nobody looks every second, so the machine or this process stood still. ADR 0106.
_ASLEEP_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KeptChoice:
    """One choice of an answer. `bounds`: how many tokens it had behind each commit, so that it is told again in the
    same pieces. `finish` is "" until it has ended; `ends_bare`: its end came without a token."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    logprobs: list[TokenScore] | None = None
    prompt_logprobs: list[TokenScore] | None = None
    finish: str = ""
    ends_bare: bool = False
    stats: RequestStats | None = None
    speculation: EffectiveBound | None = None
    engine: int = 0
    groups: list[tuple[int, str]] = field(default_factory=list)
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def add(self, part: CommittedTokens) -> None:
        """Take in what was committed."""
        self.tokens += part.tokens
        if part.bounds:
            self.bounds += part.bounds
        elif part.tokens:
            self.bounds.append(len(self.tokens))
        if part.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += part.logprobs
        self.prompt_logprobs = part.prompt_logprobs or self.prompt_logprobs
        self.groups += part.groups
        self.stats, self.speculation = part.stats or self.stats, part.speculation or self.speculation
        if part.finish:
            self.finish, self.ends_bare = part.finish, part.bare or not part.tokens
        self.wake()

    def to_committed(self, number: int, index: int) -> CommittedTokens:
        """Return all that is known of it."""
        details = (self.stats, self.logprobs, self.prompt_logprobs, self.speculation)
        ends = (self.bounds, self.ends_bare, self.groups)
        return CommittedTokens(number, index, self.tokens, self.finish, *details, *ends)

    def tell(self, taken: int, split_at: int) -> Delta | None:
        """Return what follows behind `taken` tokens, up to the next bound or `split_at`; None where nothing does yet.
        The last has the finish."""
        index = bisect_right(self.bounds, taken)
        end = self.bounds[index] if index < len(self.bounds) else taken
        if taken < split_at < end:
            end = split_at
        last = bool(self.finish) and end == len(self.tokens)
        if end == taken and not last:
            return None
        ends = last and (end == taken or not self.ends_bare)
        finish = ("stop" if self.finish == CUT else self.finish) if ends else ""
        scores = None if self.logprobs is None else self.logprobs[taken:end]
        first = self.prompt_logprobs if taken == 0 else None
        tokens = self.tokens[taken:end]
        group = next((group for token, group in self.groups if taken <= token < end), "")
        return Delta("", tokens, finish, self.stats, scores, first, self.engine, self.speculation, group)

    @property
    def group(self) -> str:
        """The group of bits that its last tokens are of; "" where it has none."""
        return self.groups[-1][1] if self.groups else ""

    async def wait_for_more(self) -> None:
        """Wait until something is added, or `wake` is called."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def wake(self) -> None:
        """Let whoever waits look again."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(slots=True, eq=False)
class KeptAnswer:
    """One request and its choices. `number` names it in the journal. `idle_s`: since when nobody reads or decodes it,
    by the clock; None while somebody does. `started`: somebody did. `model`: whose answer it is, "" where nobody
    said."""

    number: int
    request_id: str
    key: str
    owner: str
    body: str
    created_s: int
    choices: list[KeptChoice]
    idle_s: float | None = None
    started: bool = False
    model: str = ""

    @property
    def complete(self) -> bool:
        """True when every choice has ended."""
        return all(choice.finish for choice in self.choices)

    @property
    def has_tokens(self) -> bool:
        """True when anything was committed."""
        return any(choice.tokens or choice.finish for choice in self.choices)

    def measure_bytes(self) -> int:
        """Return about what it takes in memory."""
        # Choices of one prompt share it, unless another daemon wrote them.
        prompts = sum({id(choice.submit.prompt): len(choice.submit.prompt) for choice in self.choices}.values())
        tokens = sum(len(choice.tokens) for choice in self.choices)
        scores = sum(len(choice.logprobs or ()) + len(choice.prompt_logprobs or ()) for choice in self.choices)
        return _ENTRY_BYTES + _TOKEN_BYTES * (prompts + tokens) + _SCORE_BYTES * scores

    def to_record(self) -> Opened:
        """Return all that is known of it."""
        submits = [choice.submit for choice in self.choices]
        parts = [choice.to_committed(self.number, index) for index, choice in enumerate(self.choices) if choice.bounds]
        fields = (self.number, self.request_id, self.key, self.owner, self.body, self.created_s, submits, parts)
        return Opened(*fields, model=self.model)


class AnswerBook:
    """All answers that are kept. Belongs to the event loop. Without a `directory` nothing is written."""

    def __init__(self, limits: JournalSection, clock: Clock, directory: Path | None = None) -> None:
        self.limits = limits
        self._clock = clock
        self._files = None if directory is None else SegmentFiles(directory, limits.reserve)
        self._answers: dict[int, KeptAnswer] = {}  # oldest first
        self._ids: dict[str, KeptAnswer] = {}
        self._keys: dict[tuple[str, str], KeptAnswer] = {}
        self._pending: list[CommittedTokens] = []
        self._next = 1
        self._bytes = 0
        self._left_out: set[int] = set()  # what the segment of now has not, as it did not fit
        self._begun_s = self._synced_s = self._looked_s = self._tried_s = clock.monotonic_s()
        self._refused_s = self._said_full_s = -inf

    def __len__(self) -> int:
        return len(self._answers)

    def view(self) -> JournalView:
        """Return how it stands, and what it cannot keep."""
        now_s, files = self._clock.monotonic_s(), self._files
        left_out = self._count_left_out()
        refuses = now_s - self._refused_s <= _SAY_FULL_EVERY_S
        sizes = (0, 0) if files is None else (files.reserve_bytes, files.allocated_bytes)
        reasons = ("", "") if files is None else (files.problem, files.short)
        problems = list_problems(*reasons, left_out, sizes, refuses=refuses)
        return JournalView(len(self._answers), left_out, self._bytes, *sizes, problems)

    def reserve(self) -> None:
        """Allocate the space of the files, before anybody needs it."""
        if self._files is not None:
            self._files.reserve()

    def recover(self) -> list[KeptAnswer]:
        """Take in what the last daemon left; returns the answers that were being written then, oldest first."""
        if self._files is None:
            return []
        now_s = self._clock.monotonic_s()
        for record in self._files.replay():
            if isinstance(record, Opened):
                known = self._answers.get(record.number)
                if known is not None:  # written again: what follows says all of it
                    self._forget(known)
                self._enter(_answer_of(record, idle_s=now_s))
            for part in record.parts:
                answer = self._answers.get(part.number)
                if answer is not None and part.choice < len(answer.choices):
                    answer.choices[part.choice].add(part)
        self._next = max(self._answers, default=0) + 1
        self._bytes = sum(answer.measure_bytes() for answer in self._answers.values())
        self.reserve()
        self._begin_segment()
        return [answer for answer in self._answers.values() if not answer.complete]

    def find_answer(self, *, key: str = "", request_id: str = "", owner: str) -> KeptAnswer | None:
        """Return the answer with this key or this id, of the one who asked for it."""
        answer = self._keys.get((owner, key)) if key else self._ids.get(request_id)
        return answer if answer is not None and answer.owner == owner else None

    def open(
        self,
        request_id: str,
        submits: Sequence[Submit],
        *,
        key: str,
        owner: str,
        body: str,
        created_s: int,
        model: str = "",
    ) -> KeptAnswer | None:
        """Keep a new answer from now on; None where there is no room for it."""
        self.expire()
        choices = [KeptChoice(submit) for submit in submits]
        now_s = self._clock.monotonic_s()
        answer = KeptAnswer(self._next, request_id, key, owner, body, created_s, choices, idle_s=now_s, model=model)
        if not self._make_room(answer.measure_bytes()):
            return None
        self._next += 1
        self._enter(answer)
        self._bytes += answer.measure_bytes()
        self._append([answer.to_record()])
        return answer

    def record(self, answer: KeptAnswer, index: int, delta: Delta) -> None:
        """Take in what was committed to a choice. It is written before whoever waits for it looks again, with all else
        that is recorded in this turn of the event loop: one write a round."""
        details = (delta.stats if delta.finish else None, delta.logprobs, delta.prompt_logprobs, delta.speculation)
        groups = [(len(answer.choices[index].tokens), delta.group)] if delta.group else []
        part = CommittedTokens(answer.number, index, delta.tokens, delta.finish, *details, groups=groups)
        if answer.number in self._answers:
            scores = len(delta.logprobs or ()) + len(delta.prompt_logprobs or ())
            self._bytes += _TOKEN_BYTES * len(delta.tokens) + _SCORE_BYTES * scores
            if answer.number not in self._left_out:
                self._write_soon(part)
        choice = answer.choices[index]
        choice.stats, choice.engine = delta.stats or choice.stats, delta.engine
        choice.add(part)

    def _write_soon(self, part: CommittedTokens) -> None:
        if self._files is not None:
            if not self._pending:
                asyncio.get_running_loop().call_soon(self.flush)
            self._pending.append(part)

    def flush(self) -> None:
        """Write all that was recorded since the last time."""
        if self._pending:
            parts, self._pending = self._pending, []
            self._append([Committed(parts)])

    def cut(self, answer: KeptAnswer, index: int) -> None:
        """The choice's text has come to its end: no more tokens of it are wanted."""
        choice = answer.choices[index]
        if not choice.finish:
            part = CommittedTokens(answer.number, index, [], CUT)
            self._write_soon(part)
            choice.add(part)

    def forget(self, answer: KeptAnswer) -> None:
        """Keep an answer no longer."""
        if self._answers.get(answer.number) is answer:
            self._forget(answer)
            self._bytes -= answer.measure_bytes()

    def mark_busy(self, answer: KeptAnswer) -> None:
        """Somebody reads or decodes it."""
        answer.idle_s, answer.started = None, True

    def mark_idle(self, answer: KeptAnswer) -> None:
        """Nobody reads or decodes it: it is kept for a while yet."""
        answer.idle_s = self._clock.monotonic_s()

    def expire(self) -> None:
        """Forget what was kept for long enough. Time in which this process stood still counts for nobody: no client
        could come back then."""
        now_s = self._clock.monotonic_s()
        asleep_s, self._looked_s = now_s - self._looked_s, now_s
        idle = [(answer, answer.idle_s) for answer in self._answers.values() if answer.idle_s is not None]
        for answer, since_s in idle:
            if asleep_s > _ASLEEP_S:
                answer.idle_s = min(now_s, since_s + asleep_s)
            elif since_s < now_s - self.limits.ended_s:
                self.forget(answer)

    async def tend(self) -> None:
        """Do what is due from time to time, at least every few seconds: forget, allocate and write anew where that
        failed, force the file to the disk."""
        self.expire()
        files, now_s = self._files, self._clock.monotonic_s()
        if files is None:
            return
        if files.short and now_s - self._tried_s >= _TRY_EVERY_S:
            self._tried_s = now_s
            files.reserve()
        age_s = now_s - self._begun_s
        aged = files.written_bytes > HEAD_BYTES and age_s > max(1.0, self.limits.ended_s)
        if files.problem or aged or (self._left_out and age_s >= _TRY_EVERY_S):
            self._begin_segment()
        if self.limits.sync_s and now_s - self._synced_s >= self.limits.sync_s:
            self._synced_s = now_s
            if (error := await asyncio.to_thread(files.sync)) is not None:
                files.give_up(error)

    def close(self) -> None:
        """Write no more; what may still be resumed stays for the next daemon."""
        self.flush()
        self.expire()
        if self._files is not None:
            self._files.close(keep=bool(self._answers))

    def _append(self, records: Sequence[Record]) -> None:
        if self._files is not None and not self._files.append(records):
            self._begin_segment()  # with all of them

    def _begin_segment(self) -> None:
        """Write all that is kept into a new segment, and clear the other. Where the disk is full, what fits."""
        files = self._files
        if files is None:
            return
        self._begun_s = self._clock.monotonic_s()
        self._pending.clear()  # it is in what is kept, and would be there twice
        answers = list(self._answers.values())
        bodies = [encode_body(answer.to_record()) for answer in answers]
        left_out: list[int] = []

        def choose(room_bytes: int) -> list[bytes]:
            """Ended answers give way first, the oldest of them before the others; then the newest running ones."""
            wanted = sorted(
                range(len(answers)), key=lambda at: (answers[at].complete, -at if answers[at].complete else at)
            )
            kept = choose_bodies(bodies, wanted, room_bytes)
            left_out.extend(answers[at].number for at in range(len(answers)) if at not in kept)
            return [bodies[at] for at in sorted(kept)]

        files.begin(bodies, choose, sync=bool(self.limits.sync_s))
        before, self._left_out = self._count_left_out(), set() if files.problem else set(left_out)
        if not before and self._count_left_out():
            _log.error("running answers do not fit into journal.reserve while the disk is full")

    def _count_left_out(self) -> int:
        """Return how many running answers the segment of now has not."""
        answers = [self._answers[number] for number in self._left_out if number in self._answers]
        return sum(not answer.complete for answer in answers)

    def _make_room(self, size: int) -> bool:
        """Forget idle answers, oldest first, until so much fits; False where it does not."""
        while self._bytes + size > self.limits.memory:
            idle = next((answer for answer in self._answers.values() if answer.idle_s is not None), None)
            if idle is None:
                now_s = self._refused_s = self._clock.monotonic_s()
                if now_s - self._said_full_s > _SAY_FULL_EVERY_S:
                    self._said_full_s = now_s
                    _log.warning("a new answer could not be resumed: journal.memory is full of running ones")
                return False
            self.forget(idle)
        return True

    def _enter(self, answer: KeptAnswer) -> None:
        self._answers[answer.number] = answer
        self._ids[answer.request_id] = answer
        if answer.key:
            self._keys[answer.owner, answer.key] = answer

    def _forget(self, answer: KeptAnswer) -> None:
        del self._answers[answer.number]
        if self._ids.get(answer.request_id) is answer:
            del self._ids[answer.request_id]
        if self._keys.get((answer.owner, answer.key)) is answer:
            del self._keys[answer.owner, answer.key]


def _answer_of(record: Opened, idle_s: float) -> KeptAnswer:
    choices = [KeptChoice(submit) for submit in record.submits]
    fields = (record.number, record.request_id, record.key, record.owner, record.body, record.created_s, choices)
    return KeptAnswer(*fields, idle_s=idle_s, started=True, model=record.model)

"""Tokens to text: incremental decoding, calls and stop strings in it, and what one answer cost."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orchestrator.clock import Clock
from orchestrator.daemon.api.logprobs import Echo, ScoredToken
from orchestrator.daemon.api.port import StreamDecoder
from orchestrator.daemon.api.stops import StopSearch
from orchestrator.daemon.api.tools.calls import CallBegins, Text, ToolCallParser, join_pieces
from orchestrator.daemon.api.tools.calls import Piece as Found
from orchestrator.daemon.api.tools.deltas import render_parts
from orchestrator.protocol.messages import DEADLINE, Delta, RequestStats, TokenScore
from policies.serving.overrides import EffectiveBound

UNFINISHED_CALL = "unfinished_call"
"""The `stop_reason` of an answer that the model itself ended within a call."""


class TextAssembler:
    """Pushes tokens through a decoder, finds calls in their text, and cuts what is outside of calls before the first
    stop string (see StopSearch).

    What it finds does not depend on how the text was split into tokens. The text of the first `quiet_tokens` tokens
    ends no answer, but a stop string may begin there. A stop string does not reach over a call. `parser`: what
    finds calls, where tools were offered. `decoded` and `given` count characters: of all tokens so far, and of what
    was given out or is markup.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        stops: Sequence[str],
        quiet_tokens: int = 0,
        parser: ToolCallParser | None = None,
    ) -> None:
        self._decoder = decoder
        self._search = StopSearch(stops)
        self._quiet_tokens = quiet_tokens
        self._parser = parser
        self.stopped = False
        self.calls = 0
        self.decoded = 0
        self.given = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._search.found

    @property
    def unfinished(self) -> bool:
        """Whether the answer was ended within a call."""
        return self._parser is not None and self._parser.unfinished

    def push(self, ids: Sequence[int]) -> list[Found]:
        """Return what these tokens make certain. After a stop it is always empty."""
        found: list[Found] = []
        for token in ids:
            if not self.stopped:
                text = self._decoder.push([token])
                quiet, self._quiet_tokens = self._quiet_tokens > 0, max(0, self._quiet_tokens - 1)
                found += self._take(text, quiet=quiet)
        return join_pieces(found)

    def finish(self, *, cut: bool = False) -> list[Found]:
        """Return what is left at the end. `cut`: it was not the model that ended the answer."""
        if self.stopped:
            return []
        found = self._take(self._decoder.flush(), quiet=self._quiet_tokens > 0)
        if self._parser is not None and not self.stopped:
            found += self._cut_at_stop(self._parser.finish(cut=cut))
        if not self.stopped:
            found += self._flush()
        return join_pieces(found)

    def _take(self, text: str, *, quiet: bool) -> list[Found]:
        place = self.decoded
        self.decoded += len(text)
        if quiet:
            self._search.quiet_end = self.decoded
        found = self._cut_at_stop([Text(text, place)] if self._parser is None else self._parser.push(text))
        if not self.stopped:
            pending = 0 if self._parser is None else self._parser.pending
            self.given = self.decoded - pending - self._search.held
            self.stopped = self._parser is not None and self._parser.over
        return found

    def _cut_at_stop(self, pieces: Sequence[Found]) -> list[Found]:
        found: list[Found] = []
        for piece in pieces:
            if not isinstance(piece, Text):
                found += self._flush()
                found.append(piece)
                self.calls += isinstance(piece, CallBegins)
                continue
            if text := self._search.push(piece.text, piece.start):
                found.append(Text(text))
            if self._search.found is not None:
                self.stopped, self.given = True, self._search.cut_at
                break
        return found

    def _flush(self) -> list[Found]:
        text = self._search.flush()
        return [Text(text)] if text else []


@dataclass(slots=True)
class Answer:
    """One answer while it grows. Times are seconds of the clock; `tokens` counts up to the end or the stop;
    `speculation` holds for it (of several: for the first). `engine`: the replica that said its last token."""

    started_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    finish: str = ""
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    speculation: EffectiveBound | None = None
    engine: int = 0

    def note(self, now_s: float, tokens: int) -> None:
        """Tokens came."""
        if self.tokens == 0:
            self.first_s = now_s
        self.last_s = now_s
        self.tokens += tokens

    @classmethod
    def combine_answers(cls, answers: Sequence[Answer], *, one_prompt: bool = True) -> Answer:
        """Return what the choices of one request cost together. `one_prompt`: they have the same, or each its own."""
        begun = [answer for answer in answers if answer.tokens] or answers[:1]
        return cls(
            started_s=answers[0].started_s,
            first_s=min(answer.first_s for answer in begun),
            last_s=max(answer.last_s for answer in begun),
            tokens=sum(answer.tokens for answer in answers),
            finish=answers[0].finish,
            stats=_sum_stats([answer.stats for answer in answers if answer.stats is not None], one_prompt=one_prompt),
            speculation=answers[0].speculation,
            engine=answers[0].engine,
        )


def _sum_stats(stats: Sequence[RequestStats], *, one_prompt: bool) -> RequestStats | None:
    """Add up what the choices did. Of one prompt what none of them had to compute was there before.
    They waited side by side. Who drafted for which of them is not told here."""
    if not stats:
        return None
    counts = [name for name in RequestStats.__struct_fields__ if name != "drafters"]
    summed = RequestStats(**{name: sum(getattr(each, name) for each in stats) for name in counts})
    if one_prompt:
        reused = min(each.reused for each in stats)
        summed = msgspec.structs.replace(summed, prompt_tokens=stats[0].prompt_tokens, reused=reused)
    return msgspec.structs.replace(
        summed,
        queue_ms=max(each.queue_ms for each in stats),
        prefill_ms=max(each.prefill_ms for each in stats),
        tolerance_delta=max(each.tolerance_delta for each in stats),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one choice that is certain, the scored tokens that it completes, and with the last why it ended.

    `stop_reason` is vLLM's: the stop string, the token of `stop_token_ids`, or "deadline". `calls`: what of tool
    calls was in the text, as a chunk's `tool_calls` has it. `at`: how many of the choice's tokens were looked at.
    `parts`: text and calls in the order in which they stand, where calls were looked for.
    """

    index: int
    text: str
    tokens: tuple[ScoredToken, ...] = ()
    finish: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    stop_reason: str | int | None = None
    at: int = 0
    parts: tuple[str | dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer while it grows. `hidden`: stop tokens, whose text is not shown where they end it.
    `named`: those of them that the request named, with what is told as the `stop_reason`. `ends`: those that are the
    model's own end. `request_id`: what the ids of its calls follow from; None where no tools were offered. `prompt`:
    the number of the prompt that it answers."""

    index: int
    assembler: TextAssembler
    hidden: frozenset[int]
    answer: Answer
    echo: Echo | None = None
    named: Mapping[int, int | str] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    request_id: str | None = None
    prompt: int = 0


async def texts(deltas: AsyncIterator[Delta], choice: Choice, clock: Clock) -> AsyncGenerator[Piece, None]:
    """Yield pieces until the end, which is a piece with `finish`; fills the choice's answer. Closing it closes
    `deltas`, which cancels the request."""
    assembler, answer, echo = choice.assembler, choice.answer, choice.echo
    held, at = _HeldTokens(0 if echo is None else len(echo.text)), 0
    async with aclosing(deltas) as source:  # type: ignore[type-var]  # generate() is an async generator
        async for delta in source:
            now_s = clock.monotonic_s()
            answer.speculation = delta.speculation or answer.speculation
            answer.engine = delta.engine
            if echo is not None:
                yield Piece(choice.index, echo.text, echo.attach_scores(delta.prompt_logprobs))
                echo = None
            shown, last = list(delta.tokens), None
            at += len(shown)
            if delta.finish == "stop" and shown and shown[-1] in choice.hidden:
                last = shown.pop()
            found, used = _push(assembler, held, shown, delta)
            if last is not None and choice.echo is not None and delta.logprobs is not None:
                # Whoever scores a text counts its tokens from both ends: the one that ends the answer is there, too.
                held.add(last, assembler.decoded, delta.logprobs[-1])
            answer.note(now_s, used)
            if delta.finish and not assembler.stopped:
                cut = delta.finish != "stop" or (last is not None and last not in choice.ends)
                found = join_pieces([*found, *assembler.finish(cut=cut)])
            answer.stats = delta.stats
            answer.finish, answer.stop_reason = _end(delta.finish, last, choice)
            tokens = held.release(assembler, last=bool(delta.finish))
            piece = _piece(choice, found, tokens, at)
            if piece.text or piece.calls or tokens or answer.finish:
                yield piece
            if answer.finish:
                return


def _end(finish: str, last: int | None, choice: Choice) -> tuple[str, str | int | None]:
    """Return why a choice has ended, as it is told ("" where it has not), with its `stop_reason`. `last`: the stop
    token that ended it."""
    assembler = choice.assembler
    reason = choice.named.get(last) if last is not None else None
    if assembler.stopped:
        finish, reason = "stop", assembler.stopped_by
    elif finish == DEADLINE:  # OpenAI has no word for it: the answer is cut, as by max_tokens
        finish, reason = "length", DEADLINE
    elif finish == "stop" and assembler.unfinished:  # clients run the calls of an answer that is not cut
        finish, reason = "length", UNFINISHED_CALL if reason is None else reason
    return ("tool_calls" if finish == "stop" and assembler.calls else finish), reason


def _piece(choice: Choice, found: Sequence[Found], tokens: tuple[ScoredToken, ...], at: int) -> Piece:
    parts = render_parts(found, choice.request_id or "")
    text = "".join(part for part in parts if isinstance(part, str))
    calls = tuple(part for part in parts if not isinstance(part, str))
    return Piece(
        choice.index,
        text,
        tokens,
        choice.answer.finish,
        calls,
        choice.answer.stop_reason,
        at,
        None if choice.request_id is None else parts,
    )


def _push(assembler: TextAssembler, held: _HeldTokens, shown: list[int], delta: Delta) -> tuple[list[Found], int]:
    """Push tokens one by one, so that those behind a stop string are not counted; (what was found, tokens used)."""
    found: list[Found] = []
    for index, token in enumerate(shown):
        if delta.logprobs is not None:
            held.add(token, assembler.decoded, delta.logprobs[index])
        found += assembler.push([token])
        if assembler.stopped:
            return found, index + 1
    return found, len(delta.tokens)


class _HeldTokens:
    """Scored tokens whose text is not given out yet. `before`: characters that stand before the answer."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._held: deque[ScoredToken] = deque()

    def add(self, token: int, start: int, score: TokenScore) -> None:
        self._held.append(ScoredToken(token, self._before + start, score))

    def release(self, assembler: TextAssembler, *, last: bool) -> tuple[ScoredToken, ...]:
        """Return the tokens that begin in what was given out; at an end that is no stop string, all."""
        everything = last and not assembler.stopped
        released: list[ScoredToken] = []
        while self._held and (everything or self._held[0].start < self._before + assembler.given):
            released.append(self._held.popleft())
        return tuple(released)

"""Tokens to text: incremental decoding, stop strings, and what one answer cost."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from orchestrator.api.logprobs import Echo, ScoredToken
from orchestrator.api.port import StreamDecoder
from orchestrator.clock import Clock
from orchestrator.workers.messages import DEADLINE, Delta, RequestStats, TokenScore
from policies.serving.overrides import EffectiveBound


class TextAssembler:
    """Pushes tokens through a decoder and cuts the text before the first stop string.

    The first is the one that is complete first (the longest of those that end together). The choice does not depend on
    how the text was split into tokens. Text that could still become a stop string is held back, so nothing that was
    given out is ever retracted. The text of the first `quiet_tokens` tokens is not searched. `decoded` and `given`
    count characters: of all tokens so far, and of what was given out. `over` is shown every text that is given out, and
    may say that the answer ends behind it.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        stops: Sequence[str],
        quiet_tokens: int = 0,
        over: Callable[[str], bool] | None = None,
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._quiet_tokens = quiet_tokens
        self._over = over
        self._held = ""
        self.stopped = False
        self.stopped_by: str | None = None
        self.decoded = 0
        self.given = 0

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain. After a stop it is always empty."""
        if self.stopped:
            return ""
        quiet, loud = ids[: self._quiet_tokens], ids[self._quiet_tokens :]
        self._quiet_tokens -= len(quiet)
        unsearched = self._decoder.push(quiet) if quiet else ""
        self.decoded += len(unsearched)
        self.given += len(unsearched)
        text = unsearched + self._take(self._decoder.push(loud), last=False)
        self.stopped = self.stopped or (self._over is not None and self._over(text))
        return text

    def finish(self) -> str:
        """Return what is left at the end."""
        return "" if self.stopped else self._take(self._decoder.flush(), last=True)

    def _take(self, text: str, *, last: bool) -> str:
        self.decoded += len(text)
        certain = self._cut_at_stop(self._held + text, last=last)
        self.given += len(certain)
        return certain

    def _cut_at_stop(self, text: str, *, last: bool) -> str:
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            end, start = min(found)
            self.stopped_by = text[start:end]
            return text[:start]
        keep = 0 if last else self._unsure(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _unsure(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


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
    def combine_answers(cls, answers: Sequence[Answer]) -> Answer:
        """Return what the choices of one request cost together."""
        begun = [answer for answer in answers if answer.tokens] or answers[:1]
        return cls(
            started_s=answers[0].started_s,
            first_s=min(answer.first_s for answer in begun),
            last_s=max(answer.last_s for answer in begun),
            tokens=sum(answer.tokens for answer in answers),
            finish=answers[0].finish,
            stats=_sum_stats([answer.stats for answer in answers if answer.stats is not None]),
            speculation=answers[0].speculation,
            engine=answers[0].engine,
        )


def _sum_stats(stats: Sequence[RequestStats]) -> RequestStats | None:
    """Add up what the choices did. They have one prompt: what none of them had to compute was there before.
    They waited side by side. Who drafted for which of them is not told here."""
    if not stats:
        return None
    counts = [name for name in RequestStats.__struct_fields__ if name != "drafters"]
    return msgspec.structs.replace(
        RequestStats(**{name: sum(getattr(each, name) for each in stats) for name in counts}),
        prompt_tokens=stats[0].prompt_tokens,
        reused=min(each.reused for each in stats),
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
    """One choice of an answer while it grows. `hidden`: stop tokens, whose text is not shown where they end it;
    `named`: those of them that the request named."""

    index: int
    assembler: TextAssembler
    hidden: frozenset[int]
    answer: Answer
    echo: Echo | None = None
    named: frozenset[int] = frozenset()


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
            shown = list(delta.tokens)
            at += len(shown)
            if delta.finish == "stop" and shown and shown[-1] in choice.hidden:
                last = shown.pop()
                answer.stop_reason = last if last in choice.named else None
            text, used = _push(assembler, held, shown, delta)
            answer.note(now_s, used)
            answer.finish, answer.stats = delta.finish, delta.stats
            if delta.finish == DEADLINE:  # OpenAI has no word for it: the answer is cut, as by max_tokens
                answer.finish, answer.stop_reason = "length", DEADLINE
            if delta.finish and not assembler.stopped:
                text += assembler.finish()
            if assembler.stopped:
                answer.finish, answer.stop_reason = "stop", assembler.stopped_by
            tokens = held.release(assembler, last=bool(delta.finish))
            if text or tokens or answer.finish:
                yield Piece(choice.index, text, tokens, answer.finish, stop_reason=answer.stop_reason, at=at)
            if answer.finish:
                return


def _push(assembler: TextAssembler, held: _HeldTokens, shown: list[int], delta: Delta) -> tuple[str, int]:
    """Push tokens one by one, so that those behind a stop string are not counted; (text, tokens used)."""
    text = ""
    for index, token in enumerate(shown):
        if delta.logprobs is not None:
            held.add(token, assembler.decoded, delta.logprobs[index])
        text += assembler.push([token])
        if assembler.stopped:
            return text, index + 1
    return text, len(delta.tokens)


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

"""Tokens to text: incremental decoding, stop strings, and what one answer cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from orchestrator.api.port import StreamDecoder
from orchestrator.clock import Clock
from orchestrator.cluster.port import DEADLINE, Delta, RequestStats


class TextAssembler:
    """Pushes tokens through a decoder and cuts the text before the first stop string.

    The first is the one that is complete first (the longest of those that end together): which one that is
    does not depend on how the text was split into tokens. Text that could still become a stop string is held
    back, so nothing that was given out is ever retracted.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain. After a stop it is always empty."""
        return "" if self.stopped else self._take(self._decoder.push(ids), last=False)

    def finish(self) -> str:
        """Return what is left at the end."""
        return "" if self.stopped else self._take(self._decoder.flush(), last=True)

    def _take(self, text: str, *, last: bool) -> str:
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, start = min(found)
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
    """One answer while it grows. Times are seconds of the clock; `tokens` counts up to the end or the stop."""

    started_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    finish: str = ""
    stop_reason: str | None = None
    stats: RequestStats | None = None
    gaps_s: list[float] = field(default_factory=list)

    def note(self, now_s: float, tokens: int) -> None:
        """Tokens came. Gaps are kept between deltas, as clients see them."""
        if self.tokens == 0:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.tokens += tokens


async def texts(
    deltas: AsyncIterator[Delta],
    assembler: TextAssembler,
    hidden: frozenset[int],
    answer: Answer,
    clock: Clock,
) -> AsyncGenerator[str, None]:
    """Yield pieces of text until the end; fills `answer`. Closing it closes `deltas`, which cancels the request.

    `hidden`: stop tokens, whose text is not shown where they end the answer.
    """
    async with aclosing(deltas) as source:  # type: ignore[type-var]  # generate() is an async generator
        async for delta in source:
            now_s = clock.monotonic_s()
            shown = list(delta.tokens)
            if delta.finish == "stop" and shown and shown[-1] in hidden:
                shown.pop()
            piece, used = _push(assembler, shown, len(delta.tokens))
            answer.note(now_s, used)
            answer.finish, answer.stats = delta.finish, delta.stats
            if delta.finish == DEADLINE:  # OpenAI has no word for it: the answer is cut, as by max_tokens
                answer.finish, answer.stop_reason = "length", DEADLINE
            if delta.finish and not assembler.stopped:
                piece += assembler.finish()
            if assembler.stopped:
                answer.finish = "stop"
            if piece:
                yield piece
            if assembler.stopped or delta.finish:
                return


def _push(assembler: TextAssembler, shown: list[int], total: int) -> tuple[str, int]:
    """Push tokens one by one, so that those behind a stop string are not counted; (text, tokens used)."""
    piece = ""
    for index, token in enumerate(shown):
        piece += assembler.push([token])
        if assembler.stopped:
            return piece, index + 1
    return piece, total

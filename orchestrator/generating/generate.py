"""The target answers: many conversations at a time through the decode loop, stored as they end.

A run that is stopped loses the conversations that are under way, and nothing else.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np

from adapters.tokenizer import Tokenizer
from orchestrator.generating.data import DataError, Shards, Text
from orchestrator.generating.prompts import Wish, Wishes, wish
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from policies.sampling.logprobs import TokenScore

TEXTS_PER_FILE = 64  # what a crash may lose. Not tuned.
_TEXTS_AT_HAND = 400  # of the target's own, to ask about. Not tuned.
_LEAST_WORDS = 40  # a shorter text has nothing to ask about. Not tuned.


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around a user's words in a chat, as token ids."""

    before: list[int]
    behind: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frame:
        """Find it by rendering two chats that differ in those words only. Raises DataError without a template."""
        if not tokenizer.has_chat_template:
            raise DataError("the target has no chat template: prompts cannot be put to it")
        digit, letter = (tokenizer.encode_chat([{"role": "user", "content": word}]) for word in ("7", "x"))
        return cls(_common(digit, letter), _common(digit[::-1], letter[::-1])[::-1])


def _common(left: list[int], right: list[int]) -> list[int]:
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]


@dataclass(frozen=True, slots=True)
class Settings:
    """How much, and how. `tokens` counts labelled ones over all runs; `seconds` bounds this run, 0 does not."""

    tokens: int
    seconds: float = 0.0
    concurrency: int = 16
    max_tokens: int = 192
    top: int = 8
    seed: int = 0


@dataclass(slots=True)
class _Open:
    wish: Wish
    prompt: list[int]
    asks: bool  # the text is the user's
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)


class Generator:
    """Feeds a loop with conversations and stores what comes out."""

    def __init__(
        self, loop: DecodeLoop, tokenizer: Tokenizer, shards: Shards, settings: Settings, wishes: Wishes = wish
    ) -> None:
        self._loop, self._tokenizer, self._shards, self._settings = loop, tokenizer, shards, settings
        self._wishes = wishes
        self._frame = Frame.of(tokenizer)
        self._stops = sorted(tokenizer.eos_ids)
        self._open: dict[str, _Open] = {}
        self._done: list[Text] = []
        self._at_hand: deque[str] = deque(maxlen=_TEXTS_AT_HAND)
        self.labelled = self._next = 0
        for text in shards.texts():
            self.labelled += len(text.top_ids)
            self._next = max(self._next, text.number + 1)
            self._remember(text.tokens[text.head :].tolist())

    def run(self, tell: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """Generate until there is enough, the time is over, or `stopped`; `tell` hears the labelled tokens so far."""
        ends = time.monotonic() + self._settings.seconds if self._settings.seconds else float("inf")
        while self.labelled < self._settings.tokens and time.monotonic() < ends and not stopped():
            while len(self._open) < self._settings.concurrency:
                self._begin()
            for delta in self._loop.run_round_strictly().deltas:
                self._take(delta)
            if len(self._done) >= TEXTS_PER_FILE:
                self._store()
            tell(self.labelled)
        self._store()

    def _begin(self) -> None:
        wish = self._wishes(self._next, self._settings.seed, self._at_hand)
        self._next += 1
        if wish.kind == "own":
            self._submit(_Open(wish, self._frame.before, asks=True), Sampling(1.0, top_p=0.95, seed=wish.number))
        else:
            self._answer(wish, self._tokenizer.encode(wish.text, special=False))

    def _answer(self, wish: Wish, words: list[int]) -> None:
        prompt = [*self._frame.before, *words, *self._frame.behind]
        self._submit(_Open(wish, prompt, asks=False), Sampling(wish.temperature, seed=wish.number))

    def _submit(self, text: _Open, sampling: Sampling) -> None:
        key = f"{text.wish.number}{'-asks' if text.asks else ''}"
        self._open[key] = text
        refused = self._loop.submit(
            Submit(
                key,
                text.prompt,
                self._settings.max_tokens,
                sampling,
                stop_tokens=self._stops,
                logprobs=self._settings.top,
            )
        )
        if refused is not None:
            raise DataError(f"the target refused a prompt: {refused.message}")

    def _take(self, delta: Delta) -> None:
        text = self._open[delta.request_id]
        text.tokens += delta.tokens
        text.scores += delta.logprobs or []
        if not delta.finish:
            return
        del self._open[delta.request_id]
        self._done.append(_build_text(text))
        self.labelled += len(text.tokens)
        if not text.asks:
            self._remember(text.tokens)
        elif delta.finish == "stop" and len(text.tokens) > 1:
            self._answer(text.wish, text.tokens[:-1])

    def _remember(self, tokens: list[int]) -> None:
        words = self._tokenizer.decode([token for token in tokens if token not in self._stops]).strip()
        if words.count(" ") >= _LEAST_WORDS:
            self._at_hand.append(words)

    def _store(self) -> None:
        if self._done:
            self._shards.add(self._done)
            self._done = []


def _build_text(text: _Open) -> Text:
    tops = [score.top for score in text.scores]
    return Text(
        text.wish.number,
        np.array([*text.prompt, *text.tokens], np.int32),
        len(text.prompt),
        np.array([[token for token, _ in top] for top in tops], np.int32),
        np.array([[log for _, log in top] for top in tops], np.float16),
    )


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether an interrupt (Ctrl-C) or SIGTERM came; a second one ends the process."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

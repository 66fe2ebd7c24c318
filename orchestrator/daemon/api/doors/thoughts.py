"""Tells a model's thoughts from its answer: `<think>...</think>` before the text, as Qwen and DeepSeek write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.daemon.api.port import TokenizerPort
from orchestrator.daemon.api.stops import measure_begun

OPEN = "<think>"
CLOSE = "</think>"
_TAIL_TOKENS = 16


class Said(NamedTuple):
    """Text of a thought, or of the answer."""

    thought: bool
    text: str


class ThoughtSplitter:
    """Splits text as it comes. `opened`: the prompt has begun the thought. White space around a thought is dropped. A
    text that begins otherwise is kept to the letter."""

    def __init__(self, *, opened: bool = False) -> None:
        self._held = ""
        self._step = self._in_thought if opened else self._at_start
        self._said_thought = False

    def push(self, text: str, *, last: bool = False) -> list[Said]:
        """Return what this text makes certain; with `last` all that is left."""
        self._held += text
        shares: list[Said] = []
        while True:
            step = self._step
            shares += step(last)
            if self._step == step:
                return shares

    def _at_start(self, last: bool) -> list[Said]:
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._held, self._step = begin[len(OPEN) :], self._in_thought
        elif last or (begin and not OPEN.startswith(begin)):
            self._step = self._in_text
        return []

    def _in_thought(self, last: bool) -> list[Said]:
        if not self._said_thought:
            self._held = self._held.lstrip()
        place = self._held.find(CLOSE)
        if place >= 0:
            text, self._held = self._held[:place].rstrip(), self._held[place + len(CLOSE) :]
            self._step = self._behind_thought
        elif last:
            text, self._held = self._held, ""
        else:
            sure = self._held[: len(self._held) - measure_begun(self._held, (CLOSE,))].rstrip()
            text, self._held = sure, self._held[len(sure) :]
        self._said_thought = self._said_thought or bool(text)
        return [Said(True, text)] if text else []

    def _behind_thought(self, last: bool) -> list[Said]:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._in_text
        return []

    def _in_text(self, last: bool) -> list[Said]:
        text, self._held = self._held, ""
        return [Said(False, text)] if text else []


def opens_thought(prompt: Sequence[int], tokenizer: TokenizerPort) -> bool:
    """Return whether a prompt ends with the opening tag of a thought, as some chat templates do."""
    tail = tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special=False)
    return tail.rstrip().endswith(OPEN)

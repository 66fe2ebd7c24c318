"""Thoughts before an answer: text between two tags at its beginning, of which the prompt may have opened the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.tools.calls import Part, Text, Thought, join_pieces, measure_begun

# Of a prompt in which a template may have opened a thought. Longer than any such opening.
_TAIL_TOKENS = 16


class ThoughtSplitter:
    """Splits text as it comes. `tags`: what opens and closes a thought; `opened`: the prompt has begun the thought.
    White space around a thought is dropped. A text that begins otherwise is kept to the letter."""

    def __init__(self, tags: tuple[str, str], *, opened: bool = False) -> None:
        self._open, self._close = tags
        self._held = ""
        self._step = self._in_thought if opened else self._at_start
        self._thought_began = False

    def push(self, parts: Iterable[Part], *, last: bool = False) -> list[Part]:
        """Return what these parts of an answer make certain; with `last` all that is left."""
        split: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                self._held += part.text
                split += self._steps(last=False)
            else:  # nothing of what is held goes on behind it
                split += [*self._steps(last=True), part]
        return join_pieces([*split, *(self._steps(last=True) if last else [])])

    def _steps(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            step = self._step
            parts += step(last)
            if self._step == step:
                return parts

    def _at_start(self, last: bool) -> list[Part]:
        begin = self._held.lstrip()
        if begin.startswith(self._open):
            self._held, self._step = begin[len(self._open) :], self._in_thought
        elif last or (begin and not self._open.startswith(begin)):
            self._step = self._in_text
        return []

    def _in_thought(self, last: bool) -> list[Part]:
        if not self._thought_began:
            self._held = self._held.lstrip()
        place = self._held.find(self._close)
        if place >= 0:
            text, self._held = self._held[:place].rstrip(), self._held[place + len(self._close) :]
            self._step = self._behind_thought
        elif last:
            text, self._held = self._held, ""
        else:
            sure = self._held[: len(self._held) - measure_begun(self._held, (self._close,))].rstrip()
            text, self._held = sure, self._held[len(sure) :]
        self._thought_began = self._thought_began or bool(text)
        return [Thought(text)] if text else []

    def _behind_thought(self, last: bool) -> list[Part]:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._in_text
        return []

    def _in_text(self, last: bool) -> list[Part]:
        text, self._held = self._held, ""
        return [Text(text)] if text else []


def opens_thought(prompt: Sequence[int], tokenizer: Tokenizer, tag: str) -> bool:
    """Return whether a prompt ends with the opening tag of a thought, as some chat templates do."""
    if not prompt:
        return False
    tail = tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special=False)
    return tail.rstrip().endswith(tag)

"""Answers in gpt-oss' form, after OpenAI's description of harmony: messages with a header each, on three channels.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: what is on the channel
`analysis` is a thought; a message `to=functions.NAME` is a call; all else is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from orchestrator.daemon.api.tools import calls
from orchestrator.daemon.api.tools.syntaxes import JsonDepth

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_TAKEN_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_ENDS: Final = (*_TAKEN_ENDS, START, CHANNEL)
CONTROLS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, "<|end|>", "<|call|>", "<|return|>")
_OPENINGS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
# Of a header: a role, a recipient of 129 characters and a channel are far shorter.
_MOST_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


class HarmonyParser(calls.OutputParser):
    """Splits an answer that goes on behind `<|start|>assistant`. A call to a function that was not offered, or without
    an object of arguments, stays text, with its header."""

    def __init__(self, names: Collection[str], *, forced: bool = False, single: bool = False) -> None:
        super().__init__(names, self._in_header, forced=forced, single=single)
        self._header = 0  # characters of the header in front of a call that is not certain yet; they are held
        self._name = ""
        self._kind: type[calls.Text] | type[calls.Thought] = calls.Text

    def _give(self, size: int) -> Iterator[calls.Part]:
        start, text = self._at, self._take(size)
        if text and not (self._forced and self._kind is calls.Text):
            yield self._kind(text, start)

    def _in_header(self, last: bool) -> Iterator[calls.Part]:
        """Before a message's text. Without a header it is text."""
        beginning = self._held.lstrip(" ")
        place = self._held.find(MESSAGE)
        is_header = any(beginning.startswith(opening) or opening.startswith(beginning) for opening in _OPENINGS)
        if not is_header or (place if place >= 0 else len(self._held)) > _MOST_HEADER:
            self._kind, self._step = calls.Text, self._in_body
        elif place >= 0:
            self._read_header(self._held[:place], place + len(MESSAGE))
        elif last and self._cut and (CHANNEL in self._held or START in self._held):
            self.unfinished = _RECIPIENT.search(self._held) is not None
            self._take(len(self._held))
        elif last:
            self._kind = calls.Text
            yield from self._give(len(self._held))

    def _read_header(self, header: str, size: int) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None:
            self._kind, self._header = calls.Text, size
            self._name = recipient[1].removeprefix(_FUNCTIONS)
            self._step = self._before_arguments if self._name in self._names else self._in_body
            return
        self._kind = calls.Thought if channel is not None and channel[1] == "analysis" else calls.Text
        self._take(size)
        self._step = self._in_body

    def _before_arguments(self, last: bool) -> Iterator[calls.Part]:
        """Behind the header of a call: it is not certain yet that it has an object of arguments."""
        rest = self._held[self._header :].lstrip()
        empty = any(rest.startswith(end) for end in _ENDS)
        if rest.startswith("{") or empty or (last and not rest and not self._cut):
            self._take(len(self._held) - len(rest))
            self._header = 0
            yield calls.CallBegins(self.calls, self._name)
            self.calls += 1
            self._depth, self._step = JsonDepth(), self._in_arguments
            if not rest.startswith("{"):
                yield calls.CallArguments(self.calls - 1, "{}")
                self._end_arguments()
        elif last and self._cut and not rest:
            self.unfinished = True
            self._take(len(self._held))
        elif last or not any(end.startswith(rest) for end in _ENDS):
            self._step = self._in_body

    def _end_arguments(self) -> None:
        self.ended += 1
        self._step = self._drop_rest if self._single else self._behind_arguments

    def _behind_arguments(self, last: bool) -> Iterator[calls.Part]:
        """Drop what else stands in a call's message."""
        yield from ()
        place, end = _find_end(self._held)
        if end:
            self._take(place + (len(end) if end in _TAKEN_ENDS else 0))
            self._step = self._in_header
        else:
            self._take(len(self._held) - (0 if last else calls.measure_begun(self._held, _ENDS)))

    def _in_body(self, last: bool) -> Iterator[calls.Part]:
        begin, self._header = self._header, 0  # a header that stays text has ends of its own in it
        if begin:
            yield from self._give(begin)
        place, end = _find_end(self._held)
        if end:
            yield from self._give(place)
            self._take(len(end) if end in _TAKEN_ENDS else 0)
            self._step = self._in_header
        else:
            yield from self._give(len(self._held) - (0 if last else calls.measure_begun(self._held, _ENDS)))


def _find_end(text: str) -> tuple[int, str]:
    """Return where a message ends, and by what; (-1, "") while it goes on."""
    places = [(place, end) for end in _ENDS if (place := text.find(end)) >= 0]
    return min(places, default=(-1, ""))

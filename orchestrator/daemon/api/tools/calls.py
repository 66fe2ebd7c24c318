"""Finds tool calls in an answer's text as it comes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Hermes'
form. What the text is split into does not change what is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_TEXT = r'"(?:[^"\\]|\\.)*"'
# A call written in this order can be passed on while it comes.
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_TEXT})\s*,\s*"arguments"\s*:\s*(?=\{{)')
_SPECIAL = re.compile(r'["{}\[\]]')
_INSIDE_TEXT = re.compile(r'"|\\.', re.DOTALL)
_SURELY_OPEN = len("<tool")  # of the opening tag: shorter, it may as well be text
# Characters of white space before a call that are held back: a text may end in white space for ever. ADR 0100.
_MOST_GAP = 64


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside of calls. `start`: the place of its first character in the answer."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Call `index` is one of `name`; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


Part = Text | CallBegins | CallArguments


class _Depth:
    """Follows JSON text to where a value closes. It knows strings and brackets, and looks at nothing between them."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_text = False

    def until(self, text: str, start: int, depth: int) -> tuple[int, bool]:
        """Read `text` from `start` up to behind the bracket that closes down to `depth`; (place, whether it came).

        Where it did not, reading goes on at the place returned: a backslash at the end is not read yet.
        """
        place = start
        while (match := (_INSIDE_TEXT if self._in_text else _SPECIAL).search(text, place)) is not None:
            place = match.end()
            mark = match[0]
            if mark == '"':
                self._in_text = not self._in_text
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= depth:
                    return place, True
        return len(text) - text.endswith("\\") if len(text) > place else place, False


class ToolCallParser:
    """Splits an answer into text and calls. White space around calls is dropped; what looks like a call and is none
    (no JSON object, a name that was not offered) stays text, to the letter.

    `forced`: there is nothing but calls, so nothing is text. `single`: what stands behind the first call is dropped.
    `unfinished`: the answer was ended within a call.
    """

    def __init__(self, names: Collection[str], *, forced: bool = False, single: bool = False) -> None:
        self._names = frozenset(names)
        self._forced = forced
        self._single = single
        self._cut = False
        self._held = ""
        self._at = 0  # the place of `held` in the answer
        self._read = 0  # of `held`, where the object is being followed
        self._gap = ""  # white space in front of a call that is not certain yet
        self._step = self._in_text
        self._depth = _Depth()
        self._behind_call = False
        self.calls = 0
        self.ended = 0
        self.unfinished = False

    @property
    def over(self) -> bool:
        """Whether nothing more is looked for."""
        return self._single and self.ended > 0

    @property
    def pending(self) -> int:
        """How many characters are held back: it is not certain yet what they are."""
        before = len(self._gap) + len(OPEN) if self._step == self._in_head else 0
        return before + len(self._held)

    def push(self, text: str) -> list[Part]:
        """Return what this text makes certain."""
        self._held += text
        return join_pieces(self._steps(last=False))

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return what is left at the end of the answer. Arguments that were cut off stay cut off. `cut`: the answer was
        ended within its text, so a call that had begun is left out instead of given back."""
        self._cut = cut
        return join_pieces(self._steps(last=True))

    def _steps(self, *, last: bool) -> Iterator[Part]:
        """Run steps until one needs more text."""
        while True:
            step = self._step
            yield from step(last)
            if self._step == step:
                return

    def _take(self, size: int) -> str:
        """Take so many characters off what is held."""
        taken, self._held = self._held[:size], self._held[size:]
        self._at += size
        return taken

    def _in_text(self, last: bool) -> Iterator[Part]:
        place = self._held.find(OPEN)
        if place >= 0:
            text = self._take(max(len(self._held[:place].rstrip()), place - _MOST_GAP))
            yield from self._text(text, self._at - len(text))
            self._gap = self._take(place - len(text))
            self._take(len(OPEN))
            self._read, self._depth = 0, _Depth()
            self._step = self._in_head
            return
        text = self._take(len(self._held) if last else _sure(self._held))
        if self._cut and (size := measure_begun(text, (OPEN,))) >= (1 if self._forced else _SURELY_OPEN):
            self.unfinished = True
            yield from self._text(text[: len(text) - size].rstrip(), self._at - len(text))
        else:
            yield from self._text(text, self._at - len(text))

    def _text(self, text: str, start: int) -> Iterator[Part]:
        """Give out text that begins at this place of the answer."""
        if self._behind_call:
            start, text = start + len(text) - len(text.lstrip()), text.lstrip()
        if text and not self._forced:
            self._behind_call = False
            yield Text(text, start)

    def _in_head(self, last: bool) -> Iterator[Part]:
        """Between the opening tag and the arguments: it is not certain yet that this is a call."""
        written = self._held.lstrip()
        head = _HEAD.match(self._held)
        if head is not None:
            name = _load_json(head[1])
            if name not in self._names:
                yield from self._no_call()
                return
            yield CallBegins(self.calls, name)
            self._take(head.end())
            self._depth = _Depth(1)
            self._step = self._in_arguments
            self.calls += 1
            return
        if written and not written.startswith("{"):
            yield from self._no_call()
            return
        self._read, closed = self._depth.until(self._held, self._read, 0)
        if closed:
            yield from self._whole()
        elif last and self._cut:
            self.unfinished = True
            self._take(len(self._held))
        elif last:
            yield from self._no_call()

    def _whole(self) -> Iterator[Part]:
        """Take a call that is not written in the usual order."""
        name, arguments = _call(_load_json(self._held[: self._read]))
        if name not in self._names or arguments is None:
            yield from self._no_call()
            return
        yield CallBegins(self.calls, name)
        yield CallArguments(self.calls, arguments)
        self.calls += 1
        self._take(self._read)
        self._end_call()

    def _in_arguments(self, last: bool) -> Iterator[Part]:
        place, closed = self._depth.until(self._held, 0, 1)
        if last and not closed:
            self.unfinished = True
            place = len(self._held)
        if place:
            yield CallArguments(self.calls - 1, self._take(place))
        if closed:
            self._read = 0
            self._step = self._behind_arguments

    def _behind_arguments(self, last: bool) -> Iterator[Part]:
        """Skip what else the call's object holds."""
        yield from ()
        place, closed = self._depth.until(self._held, 0, 0)
        self._take(place)
        if closed or last:
            self._end_call()

    def _end_call(self) -> None:
        self.ended += 1
        self._behind_call = True
        self._gap = ""
        self._step = self._behind_all if self._single else self._before_close

    def _behind_all(self, last: bool) -> Iterator[Part]:
        """Drop what stands behind the only call."""
        yield from ()
        self._take(len(self._held))

    def _before_close(self, last: bool) -> Iterator[Part]:
        """Skip the closing tag, which models forget; what the end of the answer left of it, too."""
        yield from ()
        rest = self._held.lstrip()
        space = len(self._held) - len(rest)
        if rest.startswith(CLOSE):
            self._take(space + len(CLOSE))
        elif CLOSE.startswith(rest):
            if not last:
                return
            self._take(space + len(rest))
        self._step = self._in_text

    def _no_call(self) -> Iterator[Part]:
        """Give back what looked like a call."""
        text = self._gap + OPEN
        self._gap = ""
        self._step = self._in_text
        yield from self._text(text, self._at - len(text))


def _sure(text: str) -> int:
    """Return how much of the text can be no part of an opening tag, nor of the white space before one."""
    before = len(text) - measure_begun(text, (OPEN,))
    return max(len(text[:before].rstrip()), before - _MOST_GAP)


def _call(value: Any) -> tuple[str, str | None]:
    """Return a call's name and the JSON text of its arguments; None where it has no usable ones."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "", None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON inside of JSON
        arguments = _load_json(arguments)
    return value["name"], _write_json(arguments) if isinstance(arguments, dict) else None


def _load_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _write_json(value: dict[str, Any]) -> str | None:
    """Return an object as JSON text; None where it is too deep."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # it has halves of characters: they stay escaped
        return json.dumps(value)
    except RecursionError:
        return None
    return text


def join_pieces(pieces: Iterable[Part]) -> list[Part]:
    """Put neighbours of one kind together."""
    joined: list[Part] = []
    for piece in pieces:
        match (joined[-1] if joined else None), piece:
            case Text(before, start), Text(text):
                joined[-1] = Text(before + text, start)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(piece)
    return joined


_CALL_ID_BYTES = 12


def render_parts(parts: Sequence[Part], request_id: str) -> tuple[str | dict[str, Any], ...]:
    """Return text and calls in their order, calls as a chunk's `tool_calls` has them. The ids of calls follow from the
    choice's own `request_id`: an answer that is told again has the same ones."""
    return tuple(part.text if isinstance(part, Text) else _delta(part, request_id) for part in parts)


def _delta(part: CallBegins | CallArguments, request_id: str) -> dict[str, Any]:
    if isinstance(part, CallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": ""}
    call_id = blake2b(f"{request_id} {part.index}".encode(), digest_size=_CALL_ID_BYTES).hexdigest()
    return {"index": part.index, "id": f"call_{call_id}", "type": "function", "function": function}


def whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that the deltas add up to, as a message has them."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def measure_begun(text: str, wanted: Sequence[str]) -> int:
    """Return the length of the longest end of the text that begins one of these."""
    longest = min(max((len(each) for each in wanted), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(each.startswith(text[-size:]) for each in wanted)), 0)

"""Finds tool calls in an answer's text as it comes. What the text is split into does not change what is found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from orchestrator.daemon.api.tools.syntaxes import (
    HERMES,
    CallHead,
    CallReader,
    CallSyntax,
    JsonDepth,
    WholeCall,
)

# Of an opening tag that was cut off: shorter, it may as well be text.
_SURELY_OPEN = len("<tool")
# Characters of white space before a call that are held back: a text may end in white space for ever. ADR 0100.
_MOST_GAP = 64


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside of calls. `start`: the place of its first character in the answer."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model thought, outside of calls. `start`: as of Text."""

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


Part = Text | Thought | CallBegins | CallArguments


ParserStep = Callable[[bool], Iterator[Part]]
"""Reads what is held, in one state of a parser; True at the end of the answer."""


class OutputParser:
    """Splits an answer into text, thoughts and calls, as it comes, by steps: each reads on until another one is due. A
    step looks at what came alone, never at where that was cut.

    `forced`: there is nothing but calls, so nothing is text. `single`: what stands behind the first call is dropped.
    `calls`: that have begun; `unfinished`: the answer was ended within one.
    """

    def __init__(self, names: Collection[str], first: ParserStep, *, forced: bool, single: bool) -> None:
        self._names = frozenset(names)
        self._step = first
        self._forced = forced
        self._single = single
        self._cut = False
        self._held = ""
        self._at = 0  # the place of `held` in the answer
        self._nesting = 0  # brackets that the arguments stand in
        self._depth = JsonDepth()
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
        return len(self._held)

    def push(self, text: str) -> list[Part]:
        self._held += text
        return join_pieces(self._run_steps(last=False))

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return what is left at the end of the answer. Arguments that were cut off stay cut off. `cut`: the answer was
        ended within its text, so a call that had begun is left out instead of given back."""
        self._cut = cut
        return join_pieces(self._run_steps(last=True))

    def _run_steps(self, *, last: bool) -> Iterator[Part]:
        while True:
            step = self._step
            yield from step(last)
            if self._step == step:
                return

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        self._at += size
        return taken

    def _drop_rest(self, last: bool) -> Iterator[Part]:
        yield from ()
        self._take(len(self._held))

    def _in_arguments(self, last: bool) -> Iterator[Part]:
        place, closed = self._depth.read_until(self._held, 0, self._nesting)
        if last and not closed:
            self.unfinished = True
            place = len(self._held)
        if place:
            yield CallArguments(self.calls - 1, self._take(place))
        if closed:
            self._end_arguments()

    def _end_arguments(self) -> None:
        raise NotImplementedError


class ToolCallParser(OutputParser):
    """Splits an answer into text and calls. White space around calls is dropped; what looks like a call and is none
    (no object of arguments, a name that was not offered) stays text, to the letter. `syntax`: how calls are written."""

    def __init__(
        self, names: Collection[str], syntax: CallSyntax = HERMES, *, forced: bool = False, single: bool = False
    ) -> None:
        super().__init__(names, self._in_text, forced=forced, single=single)
        self._syntax = syntax
        self._gap = ""  # white space in front of a call that is not certain yet
        self._opener = ""  # what may have begun the call; `held` begins with it
        self._leading = True  # only white space came so far
        self._closers = syntax.closers
        self._reader: CallReader = syntax.reader()
        self._behind_call = False

    @property
    def pending(self) -> int:
        return len(self._gap) + len(self._held)

    def _in_text(self, last: bool) -> Iterator[Part]:
        if self._leading and self._syntax.leading:
            written = self._held.lstrip()
            space = len(self._held) - len(written)
            if not written and not last and space <= _MOST_GAP:
                return
            opener = next((opener for opener in self._syntax.leading if written.startswith(opener)), "")
            if opener and space <= _MOST_GAP:
                self._gap = self._take(space)
                self._begin_call(opener)
                return
            self._leading = False
        places = [(place, opener) for opener in self._syntax.openers if (place := self._held.find(opener)) >= 0]
        if places:
            place, opener = min(places, key=lambda match: (match[0], -len(match[1])))
            text = self._take(max(len(self._held[:place].rstrip()), place - _MOST_GAP))
            yield from self._text(text, self._at - len(text))
            self._gap = self._take(place - len(text))
            self._begin_call(opener)
            return
        openers = self._syntax.openers
        text = self._take(len(self._held) if last else _sure(self._held, openers))
        if self._cut and (size := measure_begun(text, openers)) >= (1 if self._forced else _SURELY_OPEN):
            self.unfinished = True
            yield from self._text(text[: len(text) - size].rstrip(), self._at - len(text))
        else:
            yield from self._text(text, self._at - len(text))

    def _begin_call(self, opener: str) -> None:
        """What is held may begin a call."""
        self._leading, self._opener = False, opener
        self._reader, self._step = self._syntax.reader(), self._in_head

    def _text(self, text: str, start: int) -> Iterator[Part]:
        if self._behind_call:
            start, text = start + len(text) - len(text.lstrip()), text.lstrip()
        if text and not self._forced:
            self._behind_call = False
            yield Text(text, start)

    def _in_head(self, last: bool) -> Iterator[Part]:
        """From the opening to the arguments: it is not certain yet that this is a call."""
        reading = self._reader.read(self._held, last=last)
        match reading:
            case CallHead(name, size, nesting) if name in self._names:
                yield CallBegins(self.calls, name)
                self.calls += 1
                self._take(size)
                self._nesting, self._depth = nesting, JsonDepth(nesting)
                self._step = self._in_arguments
            case WholeCall(name, str(arguments), size) if name in self._names:
                yield CallBegins(self.calls, name)
                yield CallArguments(self.calls, arguments)
                self.calls += 1
                self._take(size)
                self._end_call()
            case None if not last:
                pass
            case None if self._cut:
                self.unfinished = True
                self._take(len(self._held))
            case _:
                yield from self._no_call()

    def _end_arguments(self) -> None:
        if self._nesting:
            self._step = self._behind_arguments
        else:
            self._end_call()

    def _behind_arguments(self, last: bool) -> Iterator[Part]:
        """Skip what else the call's object holds."""
        yield from ()
        place, closed = self._depth.read_until(self._held, 0, 0)
        self._take(place)
        if closed or last:
            self._end_call()

    def _end_call(self) -> None:
        self.ended += 1
        self._behind_call = True
        self._gap = ""
        self._closers = self._syntax.closers
        self._step = self._drop_rest if self._single else self._before_close

    def _before_close(self, last: bool) -> Iterator[Part]:
        """Skip what closes a call, which models forget; what the end of the answer left of it, too."""
        yield from ()
        while True:
            rest = self._held.lstrip()
            space = len(self._held) - len(rest)
            further = self._syntax.further if self._closers == self._syntax.closers else ()
            number = next((n for n, closer in enumerate(self._closers) if rest.startswith(closer)), None)
            if number is not None:
                self._take(space + len(self._closers[number]))
                self._closers = self._closers[number + 1 :]
            elif opener := next((opener for opener in further if rest.startswith(opener)), ""):
                self._gap = self._take(space)
                self._begin_call(opener)
                return
            elif any(mark.startswith(rest) for mark in (*self._closers, *further)):
                if last:
                    self._take(space + len(rest))
                    self._step = self._in_text
                return
            else:
                self._step = self._in_text
                return

    def _no_call(self) -> Iterator[Part]:
        """Give back what looked like the beginning of a call."""
        opening = self._take(len(self._opener))
        text, self._gap = self._gap + opening, ""
        self._step = self._in_text
        yield from self._text(text, self._at - len(text))


def _sure(text: str, openers: Sequence[str]) -> int:
    """Return how much of the text can be no part of an opening tag, nor of the white space before one."""
    before = len(text) - measure_begun(text, openers)
    return max(len(text[:before].rstrip()), before - _MOST_GAP)


def join_pieces(pieces: Iterable[Part]) -> list[Part]:
    joined: list[Part] = []
    for piece in pieces:
        match (joined[-1] if joined else None), piece:
            case Text(before, start), Text(text):
                joined[-1] = Text(before + text, start)
            case Thought(before, start), Thought(text):
                joined[-1] = Thought(before + text, start)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(piece)
    return joined


_CALL_ID_BYTES = 12
# Mistral's templates refuse an id of another length.
_SHORT_ID = 9


def render_parts(
    parts: Sequence[Part], request_id: str, *, short_ids: bool = False
) -> tuple[str | Thought | dict[str, Any], ...]:
    """Return text, thoughts and calls in their order, calls as a chunk's `tool_calls` has them. The ids of calls follow
    from the choice's own `request_id`: an answer that is told again has the same ones. `short_ids`: of nine
    characters."""
    return tuple(_render(part, request_id, short_ids=short_ids) for part in parts)


def _render(part: Part, request_id: str, *, short_ids: bool) -> str | Thought | dict[str, Any]:
    match part:
        case Text(text):
            return text
        case Thought():
            return part
        case CallArguments(index, text):
            return {"index": index, "function": {"arguments": text}}
        case CallBegins(index, name):
            digest = blake2b(f"{request_id} {index}".encode(), digest_size=_CALL_ID_BYTES).hexdigest()
            call_id = digest[:_SHORT_ID] if short_ids else f"call_{digest}"
            return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def measure_begun(text: str, wanted: Sequence[str]) -> int:
    longest = min(max((len(each) for each in wanted), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(each.startswith(text[-size:]) for each in wanted)), 0)

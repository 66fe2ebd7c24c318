"""An answer as blocks in their order: thoughts, text and calls. How the text came in pieces does not change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from orchestrator.daemon.api.port import TokenizerPort
from orchestrator.daemon.api.question import AnswerHead
from orchestrator.daemon.api.streaming import Piece
from orchestrator.daemon.api.tools.calls import measure_begun
from orchestrator.daemon.api.wire import ChatRequest


@dataclass(slots=True)
class Block:
    """One block. `text`: so far; of a call the JSON text of its arguments. `whole`: it was not cut off."""

    index: int
    kind: Literal["thought", "text", "call"]
    text: str = ""
    name: str = ""
    call_id: str = ""
    whole: bool = True


class Step(NamedTuple):
    """A block begins, grows by a text, or ends."""

    what: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class BlockBuilder:
    """Builds the blocks of one answer from its pieces. `finish` and `stop_reason` are the last piece's."""

    def __init__(self, head: AnswerHead, body: ChatRequest) -> None:
        # A grammar holds from the first token on: what it writes is no thought.
        bound = bool(body.forced) or (
            body.response_format is not None and body.response_format.wanted_schema is not None
        )
        self._thoughts = ThoughtSplitter(opened=not bound and opens_thought(head.prompt, head.tokenizer))
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.finish = ""
        self.stop_reason: str | int | None = None

    def push(self, piece: Piece) -> list[Step]:
        """Return what a piece adds."""
        steps: list[Step] = []
        for part in piece.parts:
            steps += self._say(part) if isinstance(part, str) else self._call(part)
        if piece.finish:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason
            steps += self._say("", last=True)
            if self._open is not None:
                self._open.whole = piece.finish != "length"
            steps += self._end()
        return steps

    def push_all(self, pieces: Sequence[Piece]) -> None:
        """Build the blocks of an answer that is whole."""
        for piece in pieces:
            self.push(piece)

    def join(self, kind: Literal["thought", "text"]) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def _say(self, text: str, *, last: bool = False) -> list[Step]:
        steps: list[Step] = []
        for share in self._thoughts.push(text, last=last):
            kind: Literal["thought", "text"] = "thought" if share.thought else "text"
            if self._open is None or self._open.kind != kind:
                steps += [*self._end(), self._begin(Block(len(self.blocks), kind))]
            steps.append(self._grow(share.text))
        return steps

    def _call(self, delta: dict[str, Any]) -> list[Step]:
        function = delta["function"]
        steps = self._say("", last=True) if self._open is None or self._open.kind != "call" else []
        if "id" in delta:
            block = Block(len(self.blocks), "call", name=function["name"], call_id=delta["id"])
            steps += [*self._end(), self._begin(block)]
        if function["arguments"]:
            steps.append(self._grow(function["arguments"]))
        return steps

    def _begin(self, block: Block) -> Step:
        self._open = block
        self.blocks.append(block)
        return Step("begin", block)

    def _grow(self, text: str) -> Step:
        assert self._open is not None  # noqa: S101  # a block was begun
        self._open.text += text
        return Step("grow", self._open, text)

    def _end(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Step("end", block)]


OPEN = "<think>"
CLOSE = "</think>"
# Of a prompt in which a template may have opened a thought. Longer than any such opening.
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
    if not prompt:
        return False
    tail = tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special=False)
    return tail.rstrip().endswith(OPEN)

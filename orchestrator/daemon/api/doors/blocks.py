"""An answer as blocks in their order: thoughts, text and calls. How the text came in pieces does not change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from orchestrator.daemon.api.streaming import Piece
from orchestrator.daemon.api.tools.calls import Thought


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

    def __init__(self) -> None:
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.finish = ""
        self.stop_reason: str | int | None = None

    def push(self, piece: Piece) -> list[Step]:
        steps: list[Step] = []
        for part in piece.parts:
            match part:
                case str():
                    steps += self._say("text", part)
                case Thought(text):
                    steps += self._say("thought", text)
                case _:
                    steps += self._call(part)
        if piece.finish:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason
            if self._open is not None:
                self._open.whole = piece.finish != "length"
            steps += self._end()
        return steps

    def push_all(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.push(piece)

    def join(self, kind: Literal["thought", "text"]) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def _say(self, kind: Literal["thought", "text"], text: str) -> list[Step]:
        steps: list[Step] = []
        if text and (self._open is None or self._open.kind != kind):
            steps += [*self._end(), self._begin(Block(len(self.blocks), kind))]
        return [*steps, self._grow(text)] if text else steps

    def _call(self, delta: dict[str, Any]) -> list[Step]:
        function, steps = delta["function"], list[Step]()
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

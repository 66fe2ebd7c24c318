"""Token ids out of an engine's chunks: its own, its own with the gaps filled, or those of the text. No I/O."""

from __future__ import annotations

from typing import Final, Protocol

from adapters.tokenizer import Tokenizer
from orchestrator.worker.endpoint.client import StreamLost
from orchestrator.worker.endpoint.dialects import Chunk

_MOST_GAP: Final = 8
"""Tokens of one gap that are searched for: a character has four bytes at most, and a token one at least."""
_UNKNOWN: Final = "\ufffd"


class TokenReader(Protocol):
    """Reads one answer. `inexact`: some ids are not the engine's own, though their text is."""

    inexact: bool

    def read(self, chunk: Chunk) -> list[int]:
        """Return the ids that a chunk completes. Raises StreamLost where the engine gives none."""
        ...


class ExactReader:
    """The engine gives every id."""

    inexact = False

    def read(self, chunk: Chunk) -> list[int]:
        if chunk.tokens is None:
            if chunk.text:
                raise StreamLost("it gave text without token ids")
            return []
        return list(chunk.tokens)


class GapReader:
    """llama-server gives no chunk for a token that ends inside a character: the next has its own id alone, and counts
    them. What is missing is found by its text."""

    def __init__(self, tokenizer: Tokenizer, pieces: PieceIndex) -> None:
        self.inexact = False
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._count = 0

    def read(self, chunk: Chunk) -> list[int]:
        if not chunk.tokens:
            return []
        gap = chunk.predicted - self._count if chunk.predicted >= 0 else 1
        self._count += max(gap, 1)
        if gap <= 1:
            return list(chunk.tokens)
        last = chunk.tokens[-1]
        ids = self._tokenizer.encode_behind(chunk.text, special=False)
        if len(ids) == gap and ids[-1] == last:
            return ids
        ways = self._pieces.find_ways(chunk.text.encode(), gap, last)
        if len(ways) == 1:
            return ways[0]
        self.inexact = True
        return ways[0] if ways else ids


class TextReader:
    """The engine gives text alone: each piece is encoded by itself, once its characters are whole."""

    inexact = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = ""

    def read(self, chunk: Chunk) -> list[int]:
        text = self._held + chunk.text
        self._held = ""
        if text.endswith(_UNKNOWN) and not chunk.finish:
            whole = text.rstrip(_UNKNOWN)
            text, self._held = whole, text[len(whole) :]
        return self._tokenizer.encode_behind(text, special=True) if text else []


class PieceIndex:
    """Which ids stand for which bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[bytes, list[int]] | None = None

    def find_ways(self, text: bytes, count: int, last: int) -> list[list[int]]:
        """Return, of at most two, the ways to write a text with so many tokens of which the last is given."""
        end = self._tokenizer.token_bytes(last)
        if count > _MOST_GAP or not text.endswith(end):
            return []
        ways: list[list[int]] = []
        self._extend(text[: len(text) - len(end)], count - 1, [], ways)
        return [[*way, last] for way in ways]

    def _extend(self, text: bytes, count: int, before: list[int], ways: list[list[int]]) -> None:
        if len(ways) > 1:
            return
        if not count:
            if not text:
                ways.append(before)
            return
        for length in range(1, len(text) - count + 2):
            for token in self._index().get(text[:length], ()):
                self._extend(text[length:], count - 1, [*before, token], ways)

    def _index(self) -> dict[bytes, list[int]]:
        if self._ids is None:
            self._ids = {}
            hidden = self._tokenizer.control_ids
            for token in range(self._tokenizer.vocabulary_size):
                if token not in hidden and (piece := self._tokenizer.token_bytes(token)):
                    self._ids.setdefault(piece, []).append(token)
        return self._ids

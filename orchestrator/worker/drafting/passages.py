"""A store of documents as a file that workers map: their tokens, and a suffix array over them.

The array orders the places of the text by the tokens *before* them, read backwards. So one binary search finds the
longest match of a sequence's end, and the places around it are the next best. Only MATCH tokens are ordered, by prefix
doubling (Manber and Myers 1993): no match is looked at further. The file is replaced whole by whoever makes it anew,
and a worker that has mapped the old one keeps that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.worker.drafting.mapped_file import FileHeader, FileKind, write_mapped_file

MATCH = 32
"""The longest match that is told apart, in tokens. ADR 0086: five sorts make the order, and the drafter's certainty
ends below it anyway."""
SEAM = 0xFFFFFFFF
"""Ends each document: a token that no text has, so that no match and no continuation runs over it."""
BYTES_PER_TOKEN = 8
"""What a token takes in the file, and where it is mapped: itself, and its place in the order."""

_TOKEN = np.dtype("<u4")


class PassagesHeader(FileHeader, frozen=True):
    tokens: int
    documents: int
    source: str


_STORE = FileKind(
    mark=b"OUTRIDX1",
    header=PassagesHeader,
    count=lambda header: header.tokens,
    entry_bytes=BYTES_PER_TOKEN,
    is_other="is no store of documents",
    command="outrider drafts index DIR",
)


@dataclass(frozen=True, slots=True)
class Match:
    """So many tokens before `place` equal a sequence's end."""

    length: int
    place: int


def order_places(tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the places 1 to n (each behind a token) in the order of the MATCH tokens before them, read backwards."""
    count = len(tokens)
    rank = np.zeros(count + 1, np.int64)  # of place 0, which nothing is before, 0
    rank[1:] = np.unique(tokens, return_inverse=True)[1].reshape(-1) + 1
    reach = 1
    while reach < MATCH and reach <= count:
        before = np.zeros(count + 1, np.int64)
        before[reach:] = rank[: count + 1 - reach]
        rank = np.unique(rank * (count + 2) + before, return_inverse=True)[1].reshape(-1)
        reach *= 2
    ordered = np.argsort(rank, kind="stable")
    return ordered[ordered > 0].astype(_TOKEN)


def write_passages(path: Path, documents: Iterable[Sequence[int]], *, vocabulary: str, source: str) -> PassagesHeader:
    """Write a store of these documents' tokens, in place of what stands there, readable for its owner alone. Raises
    OSError."""
    parts = [np.array([*tokens, SEAM], _TOKEN) for tokens in documents if tokens]
    text = np.concatenate(parts) if parts else np.empty(0, _TOKEN)
    header = PassagesHeader(vocabulary, len(text), len(parts), source)
    write_mapped_file(path, _STORE.mark, header, (text, order_places(text)))
    return header


class Passages:
    """A mapped store. Its pages are the page cache's: workers of a host share them."""

    def __init__(self, path: Path, vocabulary: str) -> None:
        """Map a store whose tokens are those of a vocabulary, by its fingerprint. Raises MappedFileUnusable."""
        self._path = path
        self._file = _STORE.map_file(path, vocabulary)
        self.header, self.size_bytes = self._file.header, self._file.size_bytes
        count = self.header.tokens * _TOKEN.itemsize
        self._text = self._file.data[:count].cast("I")
        self._order = self._file.data[count:].cast("I")

    def find_matches(self, context: Sequence[int], most: int, least: int) -> list[Match]:
        """Return up to `most` places with the longest match of the context's end, where it has `least` tokens."""
        wanted = list(context[: -MATCH - 1 : -1])
        if len(wanted) < least or not self._order:
            return []
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._is_before(self._order[middle], wanted):
                low = middle + 1
            else:
                high = middle
        longest = max((self._measure(at, wanted) for at in (low - 1, low)), default=0)
        if longest < least:
            return []
        matches = [*self._collect(low - 1, -1, longest, most // 2, wanted)]
        return [*matches, *self._collect(low, 1, longest, most - len(matches), wanted)]

    def read(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a place on, up to the end of its document."""
        tokens = self._text[place : place + count].tolist()
        return tokens[: tokens.index(SEAM)] if SEAM in tokens else tokens

    @property
    def is_replaced(self) -> bool:
        """Whether another file stands at its path now; one that is gone replaces nothing."""
        return self._file.is_replaced(self._path)

    def close(self) -> None:
        """Give the mapping back. Idempotent."""
        self._file.close(self._text, self._order)

    def _is_before(self, place: int, wanted: Sequence[int]) -> bool:
        text = self._text
        for back, token in enumerate(wanted, start=1):
            if back > place:
                return True
            own = text[place - back]
            if own != token:
                return own < token
        return False

    def _measure(self, at: int, wanted: Sequence[int]) -> int:
        if not 0 <= at < len(self._order):
            return 0
        place, length = self._order[at], 0
        for back, token in enumerate(wanted, start=1):
            if back > place or self._text[place - back] != token:
                break
            length = back
        return length

    def _collect(self, at: int, step: int, length: int, most: int, wanted: Sequence[int]) -> list[Match]:
        matches: list[Match] = []
        while len(matches) < most and self._measure(at, wanted) == length:
            matches.append(Match(length, self._order[at]))
            at += step
        return matches

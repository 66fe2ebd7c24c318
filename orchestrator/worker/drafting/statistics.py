"""What a model says most often behind its own last tokens: a table in a file that workers map.

An entry is a context of one to three tokens, the likeliest token behind it, and the chance that the target says that
one, as measured on texts that the counts are not from (drafting/counts.py). The longest known context
answers. After REST (He et al., arXiv 2311.08252), which keeps the texts themselves: a draft needs one token a context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.worker.drafting.mapped_file import FileHeader, FileKind, write_mapped_file

MOST_CONTEXT = 3
"""The longest context, in tokens. ADR 0087: three bring nothing up to 144,000 tokens, and are kept for more; a longer
one fits no key."""
TOKEN_BITS = 21
"""Of a token in a key. A key has its context's tokens plus one, the last one lowest: keys of different lengths
differ."""
MOST_TOKEN = (1 << TOKEN_BITS) - 2
"""The largest token id that a key can hold."""
BYTES_PER_ENTRY = 13  # of a key (8), a token (4) and a chance (1)

# Of a byte: 255ths are finer than what chances are measured to (ADR 0087).
_MOST_CHANCE = 255


class StatisticsCard(msgspec.Struct, frozen=True):
    """Where statistics come from. `tokens` of `texts` were counted, over all `prompts`, on the day `built`.
    `agreement`: how often the entry for a position is the target's own first choice, by kind of prompt, over so many
    `held_out` tokens that were not counted."""

    prompts: str
    built: str
    texts: int
    tokens: int
    held_out: int
    agreement: dict[str, float]


class StatisticsHeader(FileHeader, frozen=True):
    """What statistics say of themselves. `model`: whose outputs were counted."""

    model: str
    entries: int
    card: StatisticsCard


_TABLE = FileKind(
    mark=b"OUTRIDS1",
    header=StatisticsHeader,
    count=lambda header: header.entries,
    entry_bytes=BYTES_PER_ENTRY,
    is_other="holds no statistics of a model",
    command="outrider drafts build",
)


class Guess(NamedTuple):
    token: int
    chance: float


class Entries(NamedTuple):
    """The table: `keys` (n,) uint64 in ascending order, `tokens` (n,) uint32, `chances` (n,) of 0 to 1."""

    keys: NDArray[np.uint64]
    tokens: NDArray[np.uint32]
    chances: NDArray[np.float32]

    def within(self, scope: int) -> Entries:
        """Return entries that are found with a scope of 64 bits alone; 0 changes nothing."""
        keys = self.keys ^ np.uint64(scope)
        order = np.argsort(keys)
        return Entries(keys[order], self.tokens[order], self.chances[order])


def merge_entries(tables: Sequence[Entries], most: int) -> Entries:
    """Return the entries of several tables: of a context that more have, the surest. Of more than `most` the least sure
    are left out."""
    keys, tokens, chances = (np.concatenate(columns) for columns in zip(*tables, strict=True))
    order = np.lexsort((-chances, keys))
    order = order[np.concatenate(([True], keys[order][1:] != keys[order][:-1]))[: len(order)]]
    if len(order) > most:
        order = np.sort(order[np.argsort(-chances[order], kind="stable")[:most]])
        order = order[np.argsort(keys[order])]
    return Entries(keys[order], tokens[order], chances[order])


def write_statistics(
    path: Path, entries: Entries, *, model: str, vocabulary: str, card: StatisticsCard
) -> StatisticsHeader:
    """Write statistics in place of what stands there, whole or not at all. Raises OSError."""
    header = StatisticsHeader(vocabulary, model, len(entries.keys), card)
    chances = np.rint(entries.chances * _MOST_CHANCE).astype(np.uint8)
    write_mapped_file(path, _TABLE.mark, header, (entries.keys.astype("<u8"), entries.tokens.astype("<u4"), chances))
    return header


def pack_context(context: Sequence[int]) -> int:
    key = 0
    for token in context:
        key = key << TOKEN_BITS | token + 1
    return key


class Statistics:
    """A mapped table. Its pages are the page cache's: workers of a host share them."""

    def __init__(self, path: Path, vocabulary: str) -> None:
        """Map statistics over a vocabulary, by its fingerprint. Raises MappedFileUnusable."""
        self._file = _TABLE.map_file(path, vocabulary)
        self.header, self.size_bytes, self.path = self._file.header, self._file.size_bytes, path
        count, data = self.header.entries, self._file.data
        self._keys = data[: 8 * count].cast("Q")
        self._tokens = data[8 * count : 12 * count].cast("I")
        self._chances = data[12 * count :]

    def look(self, context: Sequence[int], scope: int = 0) -> Guess | None:
        """Return what the model says most often behind a sequence's end; None where nothing is known. `scope`: whose
        entries are looked at, as of `Entries.within`."""
        keys = self._keys
        key = pack_context(context[-MOST_CONTEXT:])
        for length in range(min(MOST_CONTEXT, len(context)), 0, -1):
            key &= (1 << TOKEN_BITS * length) - 1
            at = bisect_left(keys, key ^ scope)
            if at < len(keys) and keys[at] == key ^ scope:
                return Guess(self._tokens[at], self._chances[at] / _MOST_CHANCE)
        return None

    def entries(self) -> Entries:
        chances = np.array(self._chances, np.float32) / np.float32(_MOST_CHANCE)
        return Entries(np.array(self._keys, np.uint64), np.array(self._tokens, np.uint32), chances)

    def format_source(self) -> str:
        return f"{self.path} ({self.header.card.tokens} tokens of {self.header.model})"

    def close(self) -> None:
        """Give the mapping back. Idempotent."""
        self._file.close(self._keys, self._tokens, self._chances)

"""The rows of a paged forward, as the lists that its inputs are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from adapters.contract import Hidden, Segment
from device_profiles.units import ceil_div

_FILLER = 0
"""The token of a row that nobody asked for: every vocabulary has it."""


@dataclass(slots=True)
class Rows:
    """`tokens` and `positions` are of each row. `pasts`, `begins`, `blocks` and `block_begins` are of each sequence;
    rows of the single-row kernel are sequences of their own over the same blocks. `wanted`: the rows whose logits
    come back; `given`: those that tokens of the batch have, the others only fill up. `hidden`: what each row is where a
    range of layers reads no tokens, shape (rows, hidden size)."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pasts: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=lambda: [0])
    blocks: list[int] = field(default_factory=list)
    block_begins: list[int] = field(default_factory=lambda: [0])
    wanted: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    hidden: Hidden | None = None
    longest: int = 0

    def add(self, segment: Segment, count: int, table: Sequence[int], block_tokens: int, *, apart: bool) -> None:
        """Append a segment as `count` rows, its first token behind its own; `table`: the blocks that hold them all."""
        first, end = len(self.tokens), segment.start + count
        self.tokens += [*segment.tokens, *[segment.tokens[0]] * (count - len(segment.tokens))]
        self.positions += range(segment.start, end)
        self.given += range(first, first + len(segment.tokens))
        self.wanted += range(first + segment.rows[0], first + segment.rows[1])
        step = 1 if apart else count
        for start in range(segment.start, end, step):
            self._add_sequence(start, step, table[: ceil_div(start + step, block_tokens)])

    def fill(self, block: int) -> None:
        """Append a row of no sequence, which is written to the beginning of `block`."""
        self.tokens.append(_FILLER)
        self.positions.append(0)
        self._add_sequence(0, 1, [block])

    def _add_sequence(self, start: int, count: int, blocks: Sequence[int]) -> None:
        self.pasts.append(start)
        self.begins.append(self.begins[-1] + count)
        self.blocks += blocks
        self.block_begins.append(len(self.blocks))
        self.longest = max(self.longest, start + count)

    def read_hidden(self, hidden: Hidden) -> None:
        """Take the hidden states of the batch's tokens, in its order. Rows that only fill up are 0."""
        self.hidden = np.zeros((len(self.tokens), hidden.shape[1]), np.float32)
        self.hidden[self.given] = hidden

    def split_rows(self, width: int) -> Iterator[Rows]:
        """Yield the rows in parts of `width`. All use the single-row kernel, and there is a multiple of `width`."""
        for first in range(0, len(self.tokens), width):
            part, stop = Rows(), first + width
            part.tokens, part.positions = self.tokens[first:stop], self.positions[first:stop]
            part.wanted = [row - first for row in self.wanted if first <= row < stop]
            part.given = [row - first for row in self.given if first <= row < stop]
            part.hidden = self.hidden[first:stop] if self.hidden is not None else None
            for row in range(first, stop):
                part._add_sequence(self.pasts[row], 1, self.blocks[self.block_begins[row] : self.block_begins[row + 1]])
            yield part

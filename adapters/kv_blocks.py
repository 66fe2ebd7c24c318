"""Block tables of a paged KV pool: which blocks a slot holds, and how many positions are written in them."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import CapacityError, Segment, Unsupported
from device_profiles.units import ceil_div


class BlockPool:
    """`blocks` blocks of `block_tokens` positions, shared by `slots` sequences. No I/O, no tensors.

    `pad_to` is the number of rows that a segment is padded to; the padding is written behind the segment and
    is not counted as held, so the next segment overwrites it.
    """

    def __init__(self, blocks: int, block_tokens: int, slots: int, *, pad_to: int = 1) -> None:
        self.block_tokens = block_tokens
        self.total = blocks
        self._slots = slots
        self._pad_to = pad_to
        self._free = list(range(blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._held: dict[int, int] = {}

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def held(self, slot: int) -> int:
        """How many positions a slot holds."""
        return self._held.get(slot, 0)

    def reserved(self, slot: int) -> int:
        """How many blocks a slot holds."""
        return len(self._tables.get(slot, ()))

    def table(self, slot: int, tokens: int) -> list[int]:
        """Return the blocks that hold the slot's first `tokens` positions."""
        return self._tables[slot][: ceil_div(tokens, self.block_tokens)]

    def padded(self, segment: Segment) -> int:
        """Return how many rows the segment is run with."""
        return max(len(segment.tokens), self._pad_to)

    def needed(self, batch: Sequence[Segment]) -> int:
        """Return how many free blocks the batch takes."""
        return sum(max(0, self._blocks_for(segment) - len(self._tables.get(segment.slot, ()))) for segment in batch)

    def reserve(self, batch: Sequence[Segment]) -> None:
        """Give every segment its blocks and note what is held. Raises CapacityError; then nothing changed."""
        needed = self.needed(batch)
        if needed > len(self._free):
            raise CapacityError(f"{needed} KV blocks are needed and {len(self._free)} of {self.total} are free")
        for segment in batch:
            table = self._tables.setdefault(segment.slot, [])
            while len(table) < self._blocks_for(segment):
                table.append(self._free.pop())
            self._held[segment.slot] = segment.start + len(segment.tokens)

    def release(self, slot: int) -> None:
        """Free a slot's blocks."""
        self._free.extend(reversed(self._tables.pop(slot, ())))
        self._held.pop(slot, None)

    def check(self, batch: Sequence[Segment], *, max_rows: int, max_context: int) -> None:
        """Raise Unsupported when the batch breaks the contract."""
        seen: set[int] = set()
        rows = 0
        for segment in batch:
            self._check_segment(segment, max_context)
            if segment.slot in seen:
                raise Unsupported(f"slot {segment.slot} stands twice in one batch")
            seen.add(segment.slot)
            rows += self.padded(segment)
        if not batch:
            raise Unsupported("the batch is empty")
        if rows > max_rows:
            raise Unsupported(f"{rows} rows are more than the {max_rows} of one forward")

    def _check_segment(self, segment: Segment, max_context: int) -> None:
        if not 0 <= segment.slot < self._slots:
            raise Unsupported(f"slot {segment.slot} is not one of {self._slots}")
        if not segment.tokens:
            raise Unsupported(f"slot {segment.slot}: a segment needs at least one token")
        if not 0 <= segment.start <= self.held(segment.slot):
            raise Unsupported(
                f"slot {segment.slot}: start {segment.start} is not within the {self.held(segment.slot)} "
                "positions it holds"
            )
        if segment.start + len(segment.tokens) > max_context:
            raise Unsupported(
                f"slot {segment.slot}: {segment.start + len(segment.tokens)} positions are more than the "
                f"context of {max_context}"
            )
        first, last = segment.rows
        if not 0 <= first <= last <= len(segment.tokens):
            raise Unsupported(f"slot {segment.slot}: rows {segment.rows} are not within its tokens")

    def _blocks_for(self, segment: Segment) -> int:
        return ceil_div(segment.start + self.padded(segment), self.block_tokens)

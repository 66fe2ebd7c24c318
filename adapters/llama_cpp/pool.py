"""Blocks of a KV pool whose sequences lie apart: what a slot begins with is a copy of its own, and counts as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from adapters.contract import BlockRules
from adapters.kv_blocks import BlockPool


class CopiedBlocks(BlockPool):
    """See the module, and `BlockPool`. `attach` and `fork` give a slot blocks of its own, or such as nobody has. Which
    blocks they are to be copies of stands in `sources` until the next call.

    Copies of what may be garbage may be garbage: whatever comes of one computed block, or is said to equal it, has its
    line. `forget` is called with each block that is to hold something else from now on.
    """

    def __init__(self, rules: BlockRules, forget: Callable[[int], None]) -> None:
        super().__init__(rules)
        self._forget = forget
        self.sources: list[int] = []
        self._numbers = count(1)
        self._lines = [0] * rules.blocks
        self._bad_lines: set[int] = set()

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """Where there is no room for all that is remembered, it is less."""
        if not super().attach(slot, tokens):
            return 0
        table = self._tables[slot]
        own: list[int] = []
        for block in table:
            if self._users[block] == 1:  # nobody else has it: it is the slot's from now on
                own.append(block)
            elif self.free:
                own.append(self._take_block())
                self._lines[own[-1]] = self._lines[block]
                self._drop(block)
            else:
                break
        for block in table[len(own) :]:
            self._drop(block)
        self.sources = table[: len(own)]
        if not own:
            self._tables[slot] = []
            self._drop_all(slot)
            return 0
        self._tables[slot] = own
        self._held[slot] = self._fixed[slot] = len(own) * self.block_tokens
        return self._held[slot]

    def fork(self, slot: int, source: int, positions: int, shared: int) -> list[tuple[int, int]]:
        """All blocks of the source are to be copied."""
        fixed = self._fixed.get(source, 0)
        pairs = super().fork(slot, source, positions, 0)
        self._fixed[source] = max(fixed, shared // self.block_tokens * self.block_tokens)
        self.sources = [block for block, _ in pairs]
        for block, own in pairs:
            self._lines[own] = self._lines[block]
        self._fixed[slot] = shared // self.block_tokens * self.block_tokens
        return pairs

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """Of several slots with the same positions the first one's are remembered."""
        whole = self._count_shared(slot, tokens)
        table = self._tables.get(slot, [])
        good = next((at for at in range(whole) if self._lines[table[at]] in self._bad_lines), whole)
        if good:
            for own, known in zip(table, self._prefixes.add(table[:good], tokens), strict=False):
                self._lines[own] = self._lines[known]
            self._fixed[slot] = max(self._fixed.get(slot, 0), good * self.block_tokens)

    def release(self, slot: int) -> list[int]:
        """Free a slot's blocks. Nothing is left behind that would have to be overwritten."""
        self._drop_all(slot)
        return []

    def discard(self, slot: int) -> list[int]:
        self._bad_lines.update(self._lines[block] for block in self._tables.get(slot, ()))
        self._drop_all(slot)
        for block, line in enumerate(self._lines):
            if line in self._bad_lines and block in self._prefixes:
                self._prefixes.forget(block)
                if self._users[block] == 0:
                    self._prefixes.wake(block)
                    self._free.append(block)
        self._bad_lines &= {self._lines[block] for table in self._tables.values() for block in table}
        return []

    def list_remembered(self, slot: int) -> list[tuple[int, int]]:
        """Return which of a slot's blocks are remembered: the place in its table, and the block."""
        return [(at, block) for at, block in enumerate(self._tables.get(slot, ())) if block in self._prefixes]

    def find_holder(self, block: int) -> tuple[int, int]:
        """Return which slot has a block that is in use, and at which place of its table."""
        return next((slot, table.index(block)) for slot, table in self._tables.items() if block in table)

    def _take_block(self) -> int:
        block = super()._take_block()
        self._lines[block] = next(self._numbers)
        self._forget(block)
        return block

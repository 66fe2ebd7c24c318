"""Which full KV blocks hold which tokens, so that a shared prompt prefix is computed once.

A block is found by the tokens it holds and the block before it. Keys are compared whole, never by a digest alone:
two prompts cannot be taken for one another. Blocks that nobody uses stay until their room is needed; the one used
least recently goes first, and a block always goes before the one it continues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

_Key = tuple[int, tuple[int, ...]]
_ROOT = 0


class PrefixIndex:
    """Full blocks by what they hold. `block_tokens` is the positions of one block."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._blocks: dict[_Key, tuple[int, int]] = {}  # -> (the block's number, its unique id)
        self._keys: dict[int, _Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last_id = _ROOT

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def idle(self) -> int:
        """How many known blocks nobody uses."""
        return len(self._idle)

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the known blocks that hold the beginning of `tokens`, in order, at most `most`."""
        blocks: list[int] = []
        parent = _ROOT
        for part in self._parts(tokens, most):
            entry = self._blocks.get((parent, part))
            if entry is None:
                break
            blocks.append(entry[0])
            parent = entry[1]
        return blocks

    def add(self, blocks: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Note what full blocks hold; returns the blocks to use, known ones in the place of equal new ones."""
        kept: list[int] = []
        parent = _ROOT
        for block, part in zip(blocks, self._parts(tokens, len(blocks)), strict=False):
            key = (parent, part)
            entry = self._blocks.get(key)
            if entry is None:
                self._last_id += 1
                entry = self._blocks[key] = (block, self._last_id)
                self._keys[block] = key
            kept.append(entry[0])
            parent = entry[1]
        return kept

    def rest(self, block: int) -> None:
        """Nobody uses the block any more; it is the youngest of the idle ones."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """The block is used again."""
        self._idle.pop(block, None)

    def forget(self, block: int) -> None:
        """Forget what a block that is used holds, if it is known. Nobody finds what continues it either; that goes when
        its room is needed."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def evict(self) -> int:
        """Forget the idle block used least recently and return it. Raises KeyError when there is none."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block

    def _parts(self, tokens: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        for index in range(min(len(tokens) // self._size, most)):
            yield tuple(tokens[index * self._size : (index + 1) * self._size])

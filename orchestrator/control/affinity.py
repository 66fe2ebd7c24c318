"""Which replica computed the beginning of a prompt lately. A guess that costs nothing when it is wrong.

A replica keeps the KV cache of prompts while it has room, and only it knows exactly which (adapters.prefix_index).
Control remembers what it sent where, block by block, and no more than the replica's cache can hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16
"""Beginnings are compared in blocks of so many tokens, whatever blocks a replica has."""


def block_keys(prompt: Sequence[int]) -> list[int]:
    """Return a key for each whole block of the prompt; a key stands for the block and for all before it."""
    keys: list[int] = []
    before = 0
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        before = hash((before, *prompt[end - BLOCK_TOKENS : end]))
        keys.append(before)
    return keys


class SeenPrefixes:
    """The blocks of prompts that one replica was sent, `capacity_tokens` at most: the least recent are forgotten."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // BLOCK_TOKENS
        self._keys: OrderedDict[int, None] = OrderedDict()

    def count_cached_tokens(self, keys: Sequence[int]) -> int:
        """Return how many tokens the leading blocks that are known have."""
        known, mine = 0, self._keys
        for key in keys:
            if key not in mine:
                break
            known += 1
        return known * BLOCK_TOKENS

    def note(self, keys: Sequence[int]) -> None:
        """The replica is computing these blocks. The first are kept longest: the others need them."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

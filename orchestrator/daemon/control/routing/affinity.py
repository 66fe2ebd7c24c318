"""Which replica computed the beginning of a prompt lately. A guess that costs nothing when it is wrong.

A replica keeps the KV cache of prompts while it has room, and only it knows exactly which (adapters.kv_blocks).
Control remembers what it sent where, block by block, and no more than the replica's cache can hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Final

BLOCK_TOKENS = 16
"""Beginnings are compared in blocks of so many tokens, whatever blocks a replica has. ADR 0027, 0091: a million blocks
are remembered. Not tuned: a guess that is wrong costs nothing."""
# ADR 0091: of the replicas that remember a beginning.
_LOOKED_AT: Final = 32
# ADR 0091: who remembers less is looked at only where few remember more.
_ENOUGH: Final = 4


def block_keys(prompt: Sequence[int], lora: str = "") -> list[int]:
    """Return a key for each whole block of the prompt, for all before it, and for the LoRA adapter."""
    keys: list[int] = []
    before = hash(lora) if lora else 0
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        before = hash((before, *prompt[end - BLOCK_TOKENS : end]))
        keys.append(before)
    return keys


class PrefixHolders:
    def __init__(self) -> None:
        self._names: dict[int, str | dict[str, None]] = {}

    def add(self, key: int, name: str) -> None:
        known = self._names.get(key)
        if known is None:
            self._names[key] = name
        elif isinstance(known, dict):
            known[name] = None
        elif known != name:
            self._names[key] = {known: None, name: None}

    def discard(self, key: int, name: str) -> None:
        known = self._names.get(key)
        if known == name:
            del self._names[key]
        elif isinstance(known, dict):
            known.pop(name, None)
            if not known:
                del self._names[key]

    def find_holders(self, keys: Sequence[int]) -> list[str]:
        """Return replicas that remember the most of these leading blocks, and where they are few some that remember
        half as much: so few that each may be looked at. What a replica remembers of a prompt is its beginning, so the
        last block that somebody has is found by halves."""
        names, low, high = self._names, 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in names:
                low = middle + 1
            else:
                high = middle
        if not low:
            return []
        holders: dict[str, None] = {}
        for depth in dict.fromkeys((low, (low + 1) // 2)):
            known = names.get(keys[depth - 1], ())
            holders |= dict.fromkeys([known] if isinstance(known, str) else islice(known, _LOOKED_AT))
            if len(holders) >= _ENOUGH:
                break
        return list(holders)


class SeenPrefixes:
    """The blocks of prompts that one replica was sent, `capacity_tokens` at most: the least recent are forgotten."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = self._own_capacity = capacity_tokens // BLOCK_TOKENS
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._holders: PrefixHolders | None = None
        self._name = ""

    def count_cached_tokens(self, keys: Sequence[int]) -> int:
        known, mine = 0, self._keys
        for key in keys:
            if key not in mine:
                break
            known += 1
        return known * BLOCK_TOKENS

    def note(self, keys: Sequence[int]) -> None:
        """The replica is computing these blocks. The first are kept longest: the others need them."""
        mine, holders = self._keys, self._holders
        for key in reversed(keys):
            if holders is not None and key not in mine:
                holders.add(key, self._name)
            mine[key] = None
            mine.move_to_end(key)
        self._forget_oldest()

    @property
    def is_told(self) -> bool:
        return self._holders is not None

    def tell(self, holders: PrefixHolders | None, name: str, most_blocks: int) -> None:
        """Tell somebody which blocks there are, from now on, and keep so many at most. None: nobody any more."""
        if self._holders is not None:
            for key in self._keys:
                self._holders.discard(key, self._name)
        self._capacity = min(self._own_capacity, most_blocks)
        self._holders = None
        self._forget_oldest()
        self._holders, self._name = holders, name
        if holders is not None:
            for key in self._keys:
                holders.add(key, name)

    def _forget_oldest(self) -> None:
        while len(self._keys) > self._capacity:
            key = self._keys.popitem(last=False)[0]
            if self._holders is not None:
                self._holders.discard(key, self._name)

"""KV caches in place: address space for every slot at full length, memory only for the positions that are written.

ONNX Runtime's attention wants one array for each sequence. Allocating it in full would cost the whole context for
every slot; growing it would copy. So each cache is a private mapping without reserved swap: the kernel gives a page
when it is first written and takes it back when the slot is released (the idea of vAttention, arXiv 2405.04437).
What is written is counted in blocks of whole pages, so the blocks' bound is a bound on memory.
"""

from __future__ import annotations

import math
import mmap

from adapters.contract import OutOfMemory
from device_profiles.units import GIB, ceil_div

_MAP_NORESERVE = 0x4000  # Linux; the module names it from Python 3.13 on
_LEAST_BLOCK_TOKENS = 32


def block_tokens(position_bytes: int) -> int:
    """Return how many positions make a block: whole pages of a head's cache, `position_bytes` a position."""
    pages = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, position_bytes)
    return math.lcm(pages, _LEAST_BLOCK_TOKENS)


class KvMemory:
    """`caches` arrays of shape (slots, kv_heads, capacity, head_dim) in float32; `capacity` is whole blocks."""

    def __init__(self, caches: int, slots: int, kv_heads: int, capacity: int, head_dim: int) -> None:
        """Reserve address space. Raises OutOfMemory where the system grants none."""
        self.shape = (kv_heads, capacity, head_dim)
        self._head_bytes = capacity * head_dim * 4
        self._slot_bytes = kv_heads * self._head_bytes
        self._position_bytes = head_dim * 4
        self._maps: list[mmap.mmap] = []
        try:
            for _ in range(caches):
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
                self._maps.append(mmap.mmap(-1, slots * self._slot_bytes, flags=flags))
                self._maps[-1].madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would be memory that nobody counted
        except OSError as error:
            wanted = caches * slots * self._slot_bytes / GIB
            raise OutOfMemory(
                f"the system grants no {wanted:.0f} GiB of address space for KV caches ({error.strerror}): "
                "lower limits.max_running or limits.kv_cache"
            ) from error
        self._addresses = [_address(mapping) for mapping in self._maps]

    def address(self, cache: int, slot: int) -> int:
        """Return where a slot's part of a cache begins."""
        return self._addresses[cache] + slot * self._slot_bytes

    def drop(self, slot: int, positions: int) -> None:
        """Give back the memory of a slot's first `positions` positions, a whole number of blocks."""
        length = positions * self._position_bytes
        for mapping in self._maps:
            for head in range(self.shape[0]):
                mapping.madvise(mmap.MADV_DONTNEED, slot * self._slot_bytes + head * self._head_bytes, length)

    def close(self) -> None:
        """Give everything back. No forward may run afterwards. Idempotent."""
        for mapping in self._maps:
            mapping.close()
        self._maps.clear()


def _address(mapping: mmap.mmap) -> int:
    import ctypes

    view = ctypes.c_char.from_buffer(mapping)
    try:
        return ctypes.addressof(view)
    finally:
        del view  # a living view would keep the mapping from closing


def capacity_of(positions: int, block: int) -> int:
    """Return the positions of whole blocks that hold `positions`."""
    return ceil_div(positions, block) * block

"""A paged KV cache for runtimes that want every sequence's cache in one piece: the processor's own page tables.

ONNX Runtime's attention takes one array for each sequence, and so do graphs of fixed shape. So every slot has address
space for the whole context. The blocks of a common pool are mapped into it where the slot needs them (the idea of
vAttention, arXiv 2405.04437). Nothing is copied when a sequence grows, and slots that share a prefix read the same
memory. Linux only.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import KvLayout, OutOfMemory
from adapters.pooled import Bytes, PooledModel

_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000  # Linux; the mmap module does not name them all
_ANYWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
# Prefixes are shared by whole blocks (ADR 0013). Not tuned.
_LEAST_BLOCK_TOKENS = 32
_MOST_PIECES = 32768
"""Pieces of memory that the pool may be scattered over: half of what Linux maps for a process (vm.max_map_count). ADR
0008."""


def block_tokens(position_bytes: int, budget_bytes: int) -> int:
    """Return how many positions make a block.

    A block is whole pages of a head's cache, `position_bytes` a position. It has so many positions that a pool of
    `budget_bytes` cannot fall into more pieces than the system maps.
    """
    pages = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, position_bytes)
    step = math.lcm(pages, _LEAST_BLOCK_TOKENS)
    return step * max(1, math.ceil(budget_bytes / (_MOST_PIECES * step * position_bytes)))


class KvMemory:
    """A pool of `blocks` blocks, and the address space of `slots` sequences of `slot_blocks` blocks each.

    There are `caches` arrays (keys and values of every layer), of shape (slots, kv_heads, slot_blocks * block_tokens,
    head_dim) each, of elements of `element_bytes`. Positions that no block is mapped to read as zeros.
    """

    def __init__(
        self,
        *,
        caches: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        block: int,
        blocks: int,
        slot_blocks: int,
        element_bytes: int = 4,
    ) -> None:
        """Reserve address space. Raises OutOfMemory where the system grants none."""
        self.shape = (kv_heads, slot_blocks * block, head_dim)
        self._element_bytes, self._block = element_bytes, block
        self._caches, self._heads, self._blocks = caches, kv_heads, blocks
        self._piece_bytes = block * head_dim * element_bytes  # one head's share of a block in one cache
        self._head_bytes = slot_blocks * self._piece_bytes
        self._slot_bytes = kv_heads * self._head_bytes
        self._mapped: dict[int, list[int]] = {}
        self._system = _System()
        self._file = os.memfd_create("outrider-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, caches * kv_heads * blocks * self._piece_bytes)
        self._bytes = caches * slots * self._slot_bytes
        self._base = self._system.map(0, self._bytes, _ANYWHERE)
        self._cache_bytes = slots * self._slot_bytes

    def address(self, cache: int, slot: int) -> int:
        """Return where a slot's part of a cache begins."""
        return self._base + cache * self._cache_bytes + slot * self._slot_bytes

    def layout(self, runtime: str) -> KvLayout:
        """Return how `read` returns pages."""
        heads, _, width = self.shape
        name = f"{runtime} {self._caches}x{heads}x{self._block}x{width * self._element_bytes} bytes, head by head"
        return KvLayout(name, self._block, (heads * self._piece_bytes,) * self._caches)

    def view(self, slot: int, kind: type[np.generic]) -> NDArray[Any]:
        """Return the slot's caches as one array, (caches, *shape), of elements of type `kind`.

        What is written to a position without a block is lost. The view must not be used after `close`.
        """
        heads, positions, width = self.shape
        span = (ctypes.c_char * (self._bytes - slot * self._slot_bytes)).from_address(self.address(0, slot))
        row_bytes, item_bytes = width * self._element_bytes, np.dtype(kind).itemsize
        strides = (self._cache_bytes, self._head_bytes, row_bytes, item_bytes)
        flat = np.frombuffer(memoryview(span), kind)
        return np.lib.stride_tricks.as_strided(flat, (self._caches, heads, positions, row_bytes // item_bytes), strides)

    def read(self, cache: int, slot: int, table: Sequence[int], start: int) -> NDArray[np.uint8]:
        """Return a copy of what one cache has in the blocks of a slot's `table` from block `start` of it on, in one row
        of bytes: head by head.

        Raises OutOfMemory; the memory is unusable then.
        """
        self.place(slot, table)
        page: NDArray[np.uint8] = self.view(slot, np.uint8)[
            cache, :, start * self._block : len(table) * self._block
        ].flatten()
        return page

    def write(
        self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: NDArray[np.uint8]
    ) -> None:
        """Write what `read` returned. `span`: the block of the table that it began with, and the one from which on it
        is written. Raises OutOfMemory; the memory is unusable then."""
        self.place(slot, table)
        start, begin, end = span[0] * self._block, span[1] * self._block, len(table) * self._block
        own = pages.reshape(self._heads, end - start, -1)
        self.view(slot, np.uint8)[cache, :, begin:end] = own[:, begin - start :]

    def place(self, slot: int, table: Sequence[int]) -> None:
        """Let the slot's cache begin with the blocks of `table`. Raises OutOfMemory; the memory is unusable then."""
        mapped = self._mapped.setdefault(slot, [])
        if mapped[: len(table)] == table:
            return
        first = next((i for i, (old, new) in enumerate(zip(mapped, table, strict=False)) if old != new), len(mapped))
        del mapped[first:]
        while len(mapped) < len(table):
            start = stop = len(mapped)
            while stop < len(table) and table[stop] - table[start] == stop - start:
                stop += 1  # neighbours in the pool become neighbours in the slot, in one call
            self._map_run(slot, start, table[start], stop - start)
            mapped.extend(table[start:stop])

    def _map_run(self, slot: int, at: int, block: int, count: int) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        size = self._piece_bytes
        for cache in range(self._caches):
            for head in range(self._heads):
                address = self.address(cache, slot) + head * self._head_bytes + at * size
                offset = ((cache * self._heads + head) * self._blocks + block) * size
                self._system.map(address, count * size, flags, self._file, offset)

    def clear(self, slot: int) -> None:
        """Map nothing into the slot; the blocks keep what they hold."""
        mapped = self._mapped.pop(slot, [])
        for cache in range(self._caches if mapped else 0):
            for head in range(self._heads):
                address = self.address(cache, slot) + head * self._head_bytes
                self._system.map(address, len(mapped) * self._piece_bytes, _ANYWHERE | _MAP_FIXED)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks, in all caches."""
        for piece in range(self._caches * self._heads):
            for source, target in zip(sources, targets, strict=True):
                read = os.pread(self._file, self._piece_bytes, (piece * self._blocks + source) * self._piece_bytes)
                os.pwrite(self._file, read, (piece * self._blocks + target) * self._piece_bytes)

    def erase(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros."""
        zeros = bytes(self._piece_bytes)
        for piece in range(self._caches * self._heads if self._file >= 0 else 0):
            for block in blocks:
                os.pwrite(self._file, zeros, (piece * self._blocks + block) * self._piece_bytes)

    def close(self) -> None:
        """Give everything back. No forward may run afterwards. Idempotent."""
        if self._file >= 0:
            self._system.unmap(self._base, self._bytes)
            os.close(self._file)
            self._file = -1


class _System:
    """The calls that the mmap module cannot make: mapping at a given address."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._munmap = libc.mmap, libc.munmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def map(self, address: int, length: int, flags: int, file: int = -1, offset: int = 0) -> int:
        """Map memory, readable and writable, and return its address. Raises OutOfMemory."""
        place = self._mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
        if place is None or place == ctypes.c_void_p(-1).value:
            reason = os.strerror(ctypes.get_errno())
            raise OutOfMemory(
                f"the system maps no {length} bytes for KV caches ({reason}): "
                "lower limits.max_running or limits.kv_cache, or raise vm.max_map_count"
            )
        return int(place)

    def unmap(self, address: int, length: int) -> None:
        self._munmap(address, length)


class MappedModel(PooledModel):
    """A model whose KV cache lies in a `KvMemory`."""

    _memory: KvMemory

    def _read_pages(self, cache: int, slot: int, table: Sequence[int], start: int) -> Bytes:
        return self._memory.read(cache, slot, table, start)

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        self._memory.write(cache, slot, table, span, pages)

    def _copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._memory.copy(sources, targets)

    def _erase(self, blocks: Sequence[int]) -> None:
        self._memory.erase(blocks)

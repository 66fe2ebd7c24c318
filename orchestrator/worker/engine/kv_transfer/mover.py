"""Pages of the target's KV cache: out of it into shared memory or onto a link, and from there into the one of another
worker."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from adapters.device_memory import read_host_memory
from adapters.loaded_model import KvLayout, LoadedModel, MovableKv
from device_profiles.units import human_bytes
from orchestrator.protocol.commands import KvPages, SharedMemory
from orchestrator.protocol.links.pages import LinkBroken
from orchestrator.protocol.shared_memory import SharedMemoryFailed, open_memory, read_all, write_all
from orchestrator.worker.engine.kv_transfer.page_inbox import PageInbox

_DIGEST_BYTES = 16
_CRC_BYTES = 4  # of a CRC-32
# ADR 0051: left free on the host behind a move. Not tuned.
LEAST_FREE_BYTES = 256 << 20


class KvMover:
    """Moves pages out of a target and into it. `kv_format`: what decides that they mean the same (ReadyKv.format);
    "" where they cannot be moved."""

    def __init__(self, target: LoadedModel, kv_format: str) -> None:
        self._target = target if isinstance(target, MovableKv) and kv_format else None
        self.format = kv_format
        self.inbox: PageInbox | None = None

    @property
    def moves(self) -> bool:
        return self._target is not None

    @property
    def page_tokens(self) -> int:
        """Positions of a page. Raises SharedMemoryFailed, as all but `moves` do, where pages cannot be moved."""
        return self._require_target().kv_layout.page_tokens

    @property
    def page_bytes(self) -> int:
        return sum(self._require_target().kv_layout.page_bytes)

    def count_bytes(self, positions: int) -> int:
        return self._require_target().kv_layout.count_bytes(positions)

    def export(self, slot: int, positions: int, start_page: int) -> list[NDArray[np.uint8]]:
        """Return copies of a slot's pages, a part for each cache. Raises what MovableKv.export_kv raises."""
        return list(self._require_target().export_kv(slot, positions, start_page))

    def digest_tokens(self, tokens: Sequence[int], lora: str = "") -> bytes:
        """Return a digest of tokens, with the LoRA adapter that computes them."""
        return bytes.fromhex(self._begin_checksum(tokens, lora).digest())

    def _begin_checksum(self, tokens: Sequence[int], lora: str) -> _Checksum:
        return _Checksum(f"{self.format}; adapter {lora}" if lora else self.format, tokens)

    def write(self, slot: int, tokens: Sequence[int], memory: SharedMemory, lora: str = "") -> KvPages:
        """Write the pages of a slot that begins with these tokens, computed with this LoRA adapter. Raises
        SharedMemoryFailed, and what adapters raise when their device fails."""
        target = self._require_target()
        length = target.kv_layout.count_bytes(len(tokens))
        if length > memory.most_bytes:
            allowed = human_bytes(memory.most_bytes)
            raise SharedMemoryFailed(f"{human_bytes(length)} are more than the {allowed} allowed")
        if read_host_memory().free_bytes < 2 * length + LEAST_FREE_BYTES:
            raise SharedMemoryFailed(f"the host has no memory for {human_bytes(length)} twice")
        checksum = self._begin_checksum(tokens, lora)
        with open_memory(memory, writing=True) as file:
            os.ftruncate(file, 0)
            for part in target.export_kv(slot, len(tokens)):
                checksum.add(part)
                write_all(file, part.data)
        return KvPages(memory, self.format, len(tokens), length, checksum.digest())

    def read(self, pages: KvPages, tokens: Sequence[int], lora: str = "") -> NDArray[np.uint8]:
        """Return pages of a sequence of these tokens and this adapter, checked. From any thread. Raises
        SharedMemoryFailed and MemoryError."""
        layout = self._require_target().kv_layout
        if pages.format != self.format:
            raise SharedMemoryFailed(f"the pages are of {pages.format!r}, and here they are of {self.format!r}")
        if not 0 < pages.positions < len(tokens):
            raise SharedMemoryFailed(f"pages of {pages.positions} positions are not of a sequence of {len(tokens)}")
        length = layout.count_bytes(pages.positions)
        if pages.length_bytes != length:
            raise SharedMemoryFailed(f"{pages.length_bytes} bytes are not the pages of {pages.positions} positions")
        data = np.empty(length, np.uint8)
        checksum, begin = self._begin_checksum(tokens[: pages.positions], lora), 0
        with open_memory(pages.memory) as file:
            size = os.fstat(file).st_size
            for part in layout.list_lengths(pages.positions):
                own = data[begin : begin + part]
                if size != length or read_all(file, own.data) < part:
                    raise SharedMemoryFailed(f"there are {size} bytes in the shared memory, not {length}")
                checksum.add(own)
                begin += part
        if checksum.digest() != pages.checksum:
            raise SharedMemoryFailed("the pages or their tokens do not have the checksum that they were sent with")
        return data

    def receive(
        self, pages: KvPages, tokens: Sequence[int], lora: str = ""
    ) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """Return pages that another host sends, and the first pages of their pieces, once all are there. From any
        thread. Raises LinkBroken and SharedMemoryFailed."""
        layout = self._require_target().kv_layout
        if self.inbox is None:
            raise LinkBroken("this worker takes in no pages over links")
        transfer = self.inbox.take(pages.transfer)
        length, came = layout.count_bytes(pages.positions), (transfer.positions, transfer.length_bytes)
        if not 0 < pages.positions < len(tokens) or came != (pages.positions, length):
            raise LinkBroken(f"{transfer.length_bytes} bytes are not the pages of {pages.positions} positions")
        digest = self.digest_tokens(tokens[: pages.positions], lora)
        if not transfer.tokens_digest == bytes.fromhex(pages.checksum) == digest:
            raise LinkBroken("the pages are not of these tokens")
        return transfer.data[:length], tuple(transfer.start_pages)

    def load(self, slot: int, positions: int, data: NDArray[np.uint8], start_pages: Sequence[int]) -> None:
        """Let a slot begin with pages. Raises what adapters.loaded_model.MovableKv.import_kv raises."""
        self._require_target().import_kv(slot, positions, data, start_pages)

    def _require_target(self) -> MovableKv:
        if self._target is None:
            raise SharedMemoryFailed("pages of this worker's KV cache cannot be moved")
        return self._target


class _Checksum:
    """Of tokens and of parts in their order. The parts go through a CRC each, which is fast where they are large."""

    def __init__(self, kv_format: str, tokens: Sequence[int]) -> None:
        self._hash = blake2b(kv_format.encode(), digest_size=_DIGEST_BYTES)
        self._hash.update(np.array([len(tokens), *tokens], np.int64).tobytes())

    def add(self, part: NDArray[np.uint8]) -> None:
        self._hash.update(len(part).to_bytes(8, "big") + zlib.crc32(part.data).to_bytes(_CRC_BYTES, "big"))

    def digest(self) -> str:
        return self._hash.hexdigest()


def describe_layout(target: LoadedModel) -> tuple[str, int]:
    """Return the name of a target's KV layout, and the bytes of a page of all its caches; ("", 0) without one."""
    if not isinstance(target, MovableKv):
        return "", 0
    layout: KvLayout = target.kv_layout
    return layout.name, sum(layout.page_bytes)

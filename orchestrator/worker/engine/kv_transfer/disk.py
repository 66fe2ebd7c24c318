"""Beginnings that several requests had, kept on disk: a worker that starts anew, or has forgotten them, reads what it
would compute.

A beginning is kept once two requests went on from the same place of it in different ways, or came again: a system
prompt is, and a conversation, which grows with each of its turns, is not. A file is found by a digest of its tokens
and of what decides that pages mean the same. It is used where its own tokens and its checksum agree with that. Its name
begins with a digest of its first tokens: a request is compared with the files alone that begin as it does. The LoRA
adapter that computed them is in both digests.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from adapters.device_memory import read_host_memory
from adapters.errors import CapacityError, Unsupported
from device_profiles.whole_file import replace_file
from orchestrator.durable import is_full
from orchestrator.side_lane import SideLane
from orchestrator.worker.engine.kv_transfer.mover import LEAST_FREE_BYTES, KvMover

LEAST_POSITIONS = 128
"""A shorter beginning is not kept: a model of 1.5B parameters computes it in less than a second."""
# Each is a digest and a count, 100 bytes: so a flood of prompts takes no memory.
_MOST_CANDIDATES = 1024
_SUFFIX = ".kv"
_MAGIC = b"OUTRKV1\n"
_NUMBER_BYTES = 8  # of the head's length
_NAME_BYTES = 8  # of a directory's digest: a store has some formats


class _Head(msgspec.Struct, frozen=True):
    tokens: list[int]
    length_bytes: int
    crc: int


class _Damaged(Exception):
    """A file is not what was written."""


class KvDisk:
    """Implements engine.prefix_cache.KeptPrefixes for the target of `mover`, in files below `root` that take
    `most_bytes` at most: the one used least recently goes first. Workers of one host share them.

    Its thread is the engine's; files are written in another one.
    """

    def __init__(self, mover: KvMover, root: Path, most_bytes: int) -> None:
        self._mover = mover
        self._root = root
        self._most_bytes = most_bytes
        self._directory = root / blake2b(mover.format.encode(), digest_size=_NAME_BYTES).hexdigest()
        self._names: dict[str, set[str]] = {}  # by the digest of their first tokens
        self._changed_ns = 0
        self._candidates: OrderedDict[str, None] = OrderedDict()
        self._writer = SideLane("KV pages to disk", gives_way=True)

    def load_prefix(self, slot: int, tokens: Sequence[int], held: int, lora: str = "") -> int:
        """Let a slot that holds `held` positions begin with the longest kept beginning of `tokens`, as it was computed
        with this LoRA adapter. Returns how many positions it has of it; 0: none, or no more than it holds."""
        for positions, path in self._find(tokens, held, lora):
            try:
                data = self._read(path, tokens[:positions])
                self._mover.load(slot, positions, data, (0,))
            except FileNotFoundError:  # another worker needed its room
                continue
            except (OSError, _Damaged, MemoryError) as error:
                sys.stderr.write(f"{path}: cannot be used, and is removed: {error}\n")
                with suppress(OSError):
                    path.unlink()
                continue
            except (CapacityError, Unsupported):
                return 0
            with suppress(OSError):
                os.utime(path)
            return positions
        return 0

    def keep_prefix(self, slot: int, tokens: Sequence[int], lora: str = "") -> None:
        """A request begins with these tokens, which a slot holds and an earlier request had computed with the same
        adapter: keep them, if it is not the first one."""
        length = self._mover.count_bytes(len(tokens)) if len(tokens) >= LEAST_POSITIONS else 0
        if not 0 < length <= self._most_bytes:
            return
        name = self._name(tokens, lora)
        if name in self._list_names(tokens, lora):
            return
        if name not in self._candidates:
            self._candidates[name] = None
            if len(self._candidates) > _MOST_CANDIDATES:
                self._candidates.popitem(last=False)
            return
        del self._candidates[name]
        if read_host_memory().free_bytes < length + LEAST_FREE_BYTES:
            return
        try:
            parts = self._mover.export(slot, len(tokens), 0)
        except (Unsupported, MemoryError):
            return
        self._writer.submit(self._write, self._directory / name, list(tokens), parts)

    def _find(self, tokens: Sequence[int], held: int, lora: str) -> list[tuple[int, Path]]:
        """Return the kept beginnings of `tokens` that are longer than `held`, and leave a token to compute: the longest
        first."""
        kept = self._list_names(tokens, lora)
        lengths = sorted({int(name.split("-")[1]) for name in kept}, reverse=True)
        fitting = (positions for positions in lengths if held < positions < len(tokens))
        named = ((positions, self._name(tokens[:positions], lora)) for positions in fitting)
        return [(positions, self._directory / name) for positions, name in named if name in kept]

    def _name(self, tokens: Sequence[int], lora: str) -> str:
        digest = self._mover.digest_tokens(tokens, lora).hex()
        return f"{self._digest_first(tokens, lora)}-{len(tokens)}-{digest}{_SUFFIX}"

    def _digest_first(self, tokens: Sequence[int], lora: str) -> str:
        return self._mover.digest_tokens(tokens[:LEAST_POSITIONS], lora).hex()

    def _list_names(self, tokens: Sequence[int], lora: str) -> set[str]:
        """Return the names of files that begin as `tokens` do. The directory is read again where any worker changed
        it."""
        try:
            changed_ns = self._directory.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                names: defaultdict[str, set[str]] = defaultdict(set)
                for name in os.listdir(self._directory):
                    if name.endswith(_SUFFIX):
                        names[name.partition("-")[0]].add(name)
                self._names, self._changed_ns = dict(names), changed_ns
        except OSError:
            self._names, self._changed_ns = {}, 0
        return self._names.get(self._digest_first(tokens, lora), set()) if self._names else set()

    def _read(self, path: Path, tokens: Sequence[int]) -> NDArray[np.uint8]:
        """Return the pages of a file. Raises OSError, MemoryError and _Damaged."""
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise _Damaged("it does not begin as such files do")
            size = int.from_bytes(file.read(_NUMBER_BYTES), "big")
            if size > os.fstat(file.fileno()).st_size:
                raise _Damaged("its head is longer than the file")
            try:
                head = msgspec.msgpack.decode(file.read(size), type=_Head)
            except msgspec.MsgspecError as error:
                raise _Damaged(str(error)) from error
            if head.tokens != list(tokens) or head.length_bytes != self._mover.count_bytes(len(tokens)):
                raise _Damaged("it holds other tokens than its name says")
            data = np.empty(head.length_bytes, np.uint8)
            if file.readinto(data.data) != head.length_bytes or zlib.crc32(data.data) != head.crc:
                raise _Damaged("its checksum is another one")
        return data

    def _write(self, path: Path, tokens: list[int], parts: list[NDArray[np.uint8]]) -> None:
        length, crc = sum(map(len, parts)), 0
        for part in parts:
            crc = zlib.crc32(part.data, crc)
        head = msgspec.msgpack.encode(_Head(tokens, length, crc))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(length)
            with replace_file(path, 0o600) as file:
                file.write(_MAGIC + len(head).to_bytes(_NUMBER_BYTES, "big") + head)
                for part in parts:
                    file.write(part.data)
        except OSError as error:
            why = "the disk is full" if is_full(error) else error.strerror or str(error)
            sys.stderr.write(f"{path}: the beginning of a prompt is not kept: {why}\n")

    def _make_room(self, length: int) -> None:
        """Remove the files used least recently until so many bytes more are within the bound. Raises OSError."""
        files = []
        for path in self._root.glob(f"*/*{_SUFFIX}*"):  # those whose writer was killed, too
            with suppress(FileNotFoundError):
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        excess = sum(size for _, size, _ in files) + length - self._most_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

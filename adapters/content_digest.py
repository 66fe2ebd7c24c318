"""Digests of model files, remembered so that a second start does not read gigabytes again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from adapters.contract import ModelRefused, Progress
from device_profiles.units import MIB
from device_profiles.whole_file import replace_file

_CHUNK_BYTES = MIB
_DIGEST_BYTES = 16
_KIND = "blake3"  # an entry of another kind of digest is none

EachChunk = Callable[[int], None]
"""Called with the number of bytes that were read."""


class DigestCache:
    """Content digests by path, trusted while size, inode, modification and change time of the file stay the same.

    The change time tells of writers that set the modification time back. The cache only saves time: a missing, corrupt
    or unwritable one is as good as an empty one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_now: dict[str, list[int]] = {}  # what this object has hashed itself

    def digest(self, file: Path, progress: Progress) -> str:
        """Return the file's digest (32 hex digits). Raises ModelRefused when it cannot be read or changes."""
        try:
            key, identity = str(file.resolve()), full_identity(file)
            digest = self._recall(key, identity)
            if digest is not None:
                return digest
            digest = self._hash(file, identity, progress)
        except OSError as error:
            raise ModelRefused(f"{file.name}: cannot be read ({error.strerror or error})") from error
        self._remember(key, {"file": identity, _KIND: digest})
        return digest

    def recall(self, files: Sequence[Path]) -> str | None:
        """Return what `digest_of` would, where every file's digest is remembered; None where one would have to be read.

        Raises ModelRefused when a file is not there.
        """
        digests: dict[str, str] = {}
        for file in files:
            try:
                digest = self._recall(str(file.resolve()), full_identity(file))
            except OSError as error:
                raise ModelRefused(f"{file.name}: cannot be read ({error.strerror or error})") from error
            if digest is None:
                return None
            digests[file.name] = digest
        return _join_digests(digests)

    def _recall(self, key: str, identity: list[int]) -> str | None:
        known = self._read().get(key)
        if not isinstance(known, dict) or known.get("file") != identity or not _is_digest(known.get(_KIND)):
            return None
        return str(known[_KIND])

    def confirm(self, files: Sequence[Path], progress: Progress) -> Path | None:
        """Read files whose digest was only remembered; return one that has other content now, None when none has.

        Raises ModelRefused as `digest` does.
        """
        for file in files:
            known = self.digest(file, progress)
            key, identity = str(file.resolve()), full_identity(file)
            if self._read_now.get(key) == identity:
                continue
            try:
                if self._hash(file, identity, progress) != known:
                    return file
            except OSError as error:
                raise ModelRefused(f"{file.name}: cannot be read ({error.strerror or error})") from error
        return None

    def _hash(self, file: Path, identity: list[int], progress: Progress) -> str:
        done, size = 0, max(1, identity[0])

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress(f"reading {file.name}", min(1.0, done / size))

        digest = hash_file(file, tell)
        if full_identity(file) != identity:
            raise ModelRefused(f"{file.name}: it changed while it was read. Try again when it is complete.")
        self._read_now[str(file.resolve())] = identity
        return digest

    def digest_of(self, files: Sequence[Path], progress: Progress) -> str:
        """Return one digest for several files, by their names and contents; one file's digest is its own.

        Raises ModelRefused as `digest` does.
        """
        return _join_digests({file.name: self.digest(file, progress) for file in files})

    def _read(self) -> dict[str, Any]:
        try:
            cache = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return cache if isinstance(cache, dict) else {}

    def _remember(self, key: str, entry: dict[str, Any]) -> None:
        # Two processes that write at once can lose one entry; the loser hashes once more, which is harmless.
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self._path) as file:
                file.write(json.dumps(self._read() | {key: entry}, indent=1).encode())


def _join_digests(digests: dict[str, str]) -> str:
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def full_identity(file: Path) -> list[int]:
    """Return what changes with any write, also with one whose writer sets the modification time back.

    Raises OSError.
    """
    return [*file_identity(file), file.stat().st_ctime_ns]


def file_identity(file: Path) -> list[int]:
    """Return what changes when a file is written or replaced: bytes, modification time in ns, inode."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def ignore_chunk(count: int) -> None:
    """An EachChunk that does nothing."""


def hash_file(file: Path, each_chunk: EachChunk = ignore_chunk) -> str:
    """Return a file's digest (32 hex digits). `each_chunk` hears of every piece read. Raises OSError."""
    digest = blake3()  # a third of a second per GB, where blake2b takes more than one
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            each_chunk(len(chunk))
    return digest.hexdigest(length=_DIGEST_BYTES)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and not set(value) - set("0123456789abcdef")

"""A file of the journal that has its blocks before it needs them, and is used again and again.

The file system gives blocks when it is asked for them, not when somebody writes: so a disk that others fill stops no
write into what was allocated. A file system that can never be sure of a write, as ZFS, promises less.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

import psutil

# ADR 0106: on a disk with less a slot is no use.
LEAST_SLOT_BYTES = 64 * 1024
_NO_PROMISE = ("zfs", "bcachefs", "nilfs", "nfs", "cifs", "smb", "fuse", "9p", "ceph")
"""File systems that write everything anew elsewhere, or whose server has the last word."""
_ZEROS = bytes(256 * 1024)  # of one write. Not tuned.
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL


class Slot:
    """One file of a directory. `allocated_bytes`: what is sure to be writable, of the `wanted_bytes`. `found_bytes`:
    what an earlier process left, which may not have been read yet."""

    def __init__(self, path: Path, wanted_bytes: int) -> None:
        self._path = path
        self._descriptor = -1
        self.wanted_bytes = wanted_bytes
        self.allocated_bytes = self.found_bytes = 0
        self._sure_bytes = 0  # with what was allocated beyond

    def read(self) -> bytes:
        """Return all that is in it; b"" where it is not there. Raises OSError."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""

    def allocate(self, size: int) -> None:
        """Take blocks for so many bytes, all of them or none. Idempotent. Raises OSError."""
        self.open()
        if size > self.allocated_bytes:
            _allocate(self._descriptor, 0, size)
            self.allocated_bytes = size
            self._sure_bytes = max(self._sure_bytes, size)

    def give_back(self, size: int) -> None:
        """Keep blocks for so many bytes alone; a refused allocation may have left some more."""
        with suppress(OSError):
            if size < os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)
            self.allocated_bytes = self._sure_bytes = min(self.allocated_bytes, size)

    def write(self, data: bytes, at: int) -> None:
        """Write all of it there. Raises OSError."""
        self.open()
        end = at + len(data)
        if end > self._sure_bytes:
            _allocate(self._descriptor, self._sure_bytes, end - self._sure_bytes)  # all of it, or nothing
            self._sure_bytes = end
        done = os.pwrite(self._descriptor, data, at)
        if done < len(data):  # the disk is full just here, or this was a part; the next write tells
            done += os.pwrite(self._descriptor, data[done:], at + done)
        if done < len(data):
            raise OSError(errno.ENOSPC, f"only {done} of {len(data)} bytes could be written")

    def clear(self, used_bytes: int) -> None:
        """Leave nothing of what was written, and give back what is more than wanted. The rest of its blocks stay."""
        with suppress(OSError):
            self.open()
            size = os.fstat(self._descriptor).st_size
            if size > self.wanted_bytes:
                os.ftruncate(self._descriptor, self.wanted_bytes)
            self.found_bytes = 0
            self._sure_bytes = self.allocated_bytes
            for at in range(0, min(used_bytes, size, self.wanted_bytes), len(_ZEROS)):
                end = min(at + len(_ZEROS), used_bytes, size, self.wanted_bytes)
                os.pwrite(self._descriptor, _ZEROS[: end - at], at)

    def sync(self) -> None:
        """Force what was written to the disk. Blocks; from any thread. Raises OSError."""
        copy = os.dup(self._descriptor)
        try:
            os.fdatasync(copy)
        finally:
            os.close(copy)

    def close(self) -> None:
        """Use it no more."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def open(self) -> None:
        """Have it at hand. Idempotent. Raises OSError."""
        if self._descriptor >= 0:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        self.found_bytes = os.fstat(self._descriptor).st_size
        if not self.found_bytes:
            _write_in_place(self._descriptor)


def find_promise_problem(directory: Path) -> str:
    """Return why what is allocated in a directory may not be writable on a full disk; "" where it is."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    resolved = directory.resolve()
    kind = next((mounts[near] for near in (resolved, *resolved.parents) if near in mounts), "")
    if kind.startswith(_NO_PROMISE):
        return f"{resolved} is on {kind}, which does not promise room for what was allocated"
    return ""


def _allocate(descriptor: int, at: int, count: int) -> None:
    """Let a file have so many bytes of its own from there on. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, at, count)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        end = os.fstat(descriptor).st_size  # a file system that cannot: what was written once has its blocks
        while end < at + count:
            end += os.pwrite(descriptor, _ZEROS[: at + count - end], end)


def _write_in_place(descriptor: int) -> None:
    """Ask for a file whose blocks are written where they are: btrfs would look for new ones with each write. Only an
    empty file takes that, and other file systems refuse it, or do not need it."""
    with suppress(OSError):
        flags = array.array("l", [0])
        fcntl.ioctl(descriptor, _GET_FLAGS, flags, True)
        flags[0] |= _NO_COPY_ON_WRITE
        fcntl.ioctl(descriptor, _SET_FLAGS, flags)

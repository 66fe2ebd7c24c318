"""Faults of storage: a file system that is full, and prepared weights in which bits have flipped."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider_lab.chaos.faults.base import Fault, NoTarget
from outrider_lab.chaos.schedule import Shape
from outrider_lab.chaos.service import Layout

SMALL_MIB = {"scripted": 32, "default": 2048}
_BLOCK_BYTES = 1 << 20
_SECTOR_BYTES, _GARBAGE_BYTES = 512, 256 << 10
_LOADED_WITHIN_S = 120.0


@contextmanager
def small_file_system(directory: Path, size_mib: int) -> Iterator[None]:
    """Mount a file system of its own there, and take it away in the end. Raises CalledProcessError."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False)


class DiskFull(Fault):
    """The file system of all that the daemon keeps is full; a worker dies meanwhile and has to come back."""

    kind = "disk-full"
    group = "storage"
    description = "the small file system that holds the state is filled, a target's worker is killed, room comes back"
    shape = Shape(1, 5.0, 12.0)

    @classmethod
    def find_obstacle(cls, layout: Layout) -> str:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            return "mounting a small file system needs root and mount"
        return ""

    async def inject(self) -> None:
        victim = self.choose("target")
        self.filler = self.arena.state / f"filler-{self.planned.number}"
        filled = await asyncio.to_thread(_fill, self.filler)
        self.blame(victim, detail=f"filled {filled >> 20} MiB of the state, and SIGKILL of {victim.title}")
        self.gone.append(victim.pid)
        self.arena.service.send_signal(victim.pid, signal.SIGKILL)

    async def heal(self) -> None:
        self.filler.unlink(missing_ok=True)


def _fill(path: Path) -> int:
    """Write until there is no room left; returns how many bytes went in."""
    written, size = 0, _BLOCK_BYTES
    with path.open("wb", buffering=0) as file:
        while size:
            try:
                written += file.write(b"\xa5" * size)
            except OSError:
                size //= 2
    return written


class CorruptArtefact(Fault):
    """Bits of prepared weights have flipped; the next worker that loads them is to notice.

    The file is replaced by a copy with its time kept, so workers that have the old one mapped are not touched. Healing
    puts the good file back where the daemon did not, and ends the workers that loaded the bad one.
    """

    kind = "corrupt-artefact"
    group = "storage"
    description = "bits flip in a file of prepared weights, then a target's worker is killed and loads them"
    shape = Shape(1, 8.0, 14.0)

    @classmethod
    def find_obstacle(cls, layout: Layout) -> str:
        return "the toy has no prepared weights: --model default" if layout.model == "scripted" else ""

    async def inject(self) -> None:
        victim = self.choose("target")
        self.before = {one.title: one.pid for one in self.arena.kept_workers}
        self.path = _find_artefact(self.arena.state / "store")
        self.good = await asyncio.to_thread(self.path.read_bytes)
        self.bad = flip_bits(self.good, self.planned.pick)
        await asyncio.to_thread(_replace, self.path, self.bad)
        self.blame(
            victim, detail=f"flipped bits in {self.path.name} of {self.path.parent.name}, SIGKILL of {victim.title}"
        )
        self.gone.append(victim.pid)
        self.arena.service.send_signal(victim.pid, signal.SIGKILL)

    async def hold(self) -> None:
        """Wait until the bad file was loaded, or nobody could load it, and then for the hold."""
        await self.arena.watch.until_ready(self.record.victims, self.gone, _LOADED_WITHIN_S)
        await super().hold()

    async def heal(self) -> None:
        with suppress(OSError):
            if await asyncio.to_thread(self.path.read_bytes) != self.bad:
                self.record.detail += "; the daemon had replaced it"
                return
        await asyncio.to_thread(_replace, self.path, self.good)
        fresh = [one for one in self.arena.kept_workers if one.pid and self.before.get(one.title) != one.pid]
        self.blame(
            *fresh, detail=f"nobody had noticed: put back, and {len(fresh)} workers ended that may have loaded it"
        )
        for one in fresh:
            self.gone.append(one.pid)
            self.arena.service.send_signal(one.pid, signal.SIGKILL)


def _find_artefact(store: Path) -> Path:
    """Return the file to corrupt: the largest of all prepared files."""
    found = [path for path in store.rglob("*") if path.is_file()]
    if not found:
        raise NoTarget("there is no prepared file")
    return max(found, key=lambda path: path.stat().st_size)


def flip_bits(data: bytes, pick: float) -> bytes:
    """Return data in which bits have flipped: a few in a sector, or, from a `pick` of 0.5 on, a stretch of garbage."""
    changed = bytearray(data)
    count, mask = (_GARBAGE_BYTES, 0xA5) if pick >= 0.5 else (_SECTOR_BYTES, 0x11)
    start = int(len(data) * (0.5 + 0.4 * pick))
    for index in range(start, min(len(data), start + count)):
        changed[index] ^= mask
    return bytes(changed)


def _replace(path: Path, data: bytes) -> None:
    """Put other bytes in the place of a file, with its times and rights."""
    status = path.stat()
    copy = path.with_name(f".{path.name}.chaos")
    copy.write_bytes(data)
    copy.chmod(status.st_mode)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)

"""The control groups around a process, of both versions: where they are, and what memory they allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC = Path("/proc")
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
_RECLAIMED = {1: ("total_inactive_file", "total_active_file"), 2: ("inactive_file", "active_file")}
"""What the kernel takes back before it ends a process: pages of files, as in MemAvailable of the whole machine."""
_KILLS = {1: "memory.oom_control", 2: "memory.events"}


class Group(NamedTuple):
    """A control group of `version` 1 or 2."""

    directory: Path
    version: int


class MemoryBound(NamedTuple):
    """What a group allows, and what of it is free now, in bytes. `file`: that the limit is read from."""

    limit_bytes: int
    free_bytes: int
    file: Path


def list_groups(controller: str, proc: Path = PROC) -> list[Group]:
    """Return the groups that bound this process, the inmost first; none where the system does not tell."""
    groups: list[Group] = []
    with suppress(OSError, ValueError, IndexError):
        mounts = (proc / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        for version, path in _list_paths(paths, controller):
            for root, mount in _list_mounts(mounts, version, controller):
                groups += [Group(directory, version) for directory in _list_directories(path, root, mount)]
                break
    return groups


def list_memory_bounds(proc: Path = PROC) -> list[MemoryBound]:
    """Return what each group around this process allows of memory."""
    return [bound for group in list_groups("memory", proc) for bound in _list_bounds(group)]


def count_group_kills(proc: Path = PROC) -> int | None:
    """Return how many processes of this one's group the kernel has ended for want of memory, None where no group
    tells."""
    for group in list_groups("memory", proc):
        counts = _read_counts(group.directory / _KILLS[group.version])
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return None


def _list_paths(lines: list[str], controller: str) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield a process's place in each hierarchy that may bound it."""
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            yield 1, PurePosixPath(path)
        elif number == "0" and not controllers:
            yield 2, PurePosixPath(path)


def _list_mounts(lines: list[str], version: int, controller: str) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield where a hierarchy is mounted, and which of its groups is there."""
    for line in lines:
        mount, _, kind = line.partition(" - ")
        fields, (name, _, options) = mount.split(), kind.split()[:3]
        if name == ("cgroup", "cgroup2")[version - 1] and (version == 2 or controller in options.split(",")):
            yield PurePosixPath(fields[3]), Path(fields[4].replace("\\040", " "))


def _list_directories(path: PurePosixPath, root: PurePosixPath, mount: Path) -> list[Path]:
    """Return the directories of a group and of those around it. Of what lies outside a container only the outmost group
    that is seen inside is known."""
    inside = path.is_relative_to(root) and ".." not in path.parts
    parts = path.relative_to(root).parts if inside else ()
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _list_bounds(group: Group) -> Iterator[MemoryBound]:
    directory, version = group
    used = _read_bytes(directory / _USED[version]) or 0
    counts = _read_counts(directory / "memory.stat")
    held = max(0, used - sum(counts.get(name, 0) for name in _RECLAIMED[version]))
    for name in _LIMITS[version]:
        limit = _read_bytes(directory / name)
        if limit is not None:
            yield MemoryBound(limit, max(0, limit - held), directory / name)


def _read_bytes(path: Path) -> int | None:
    """Return what a file says; None for no limit, or where there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_counts(path: Path) -> dict[str, int]:
    """Return the counts of a file of names and numbers; none where there is no such file."""
    with suppress(OSError, ValueError):
        lines = path.read_text(encoding="ascii").splitlines()
        return {name: int(count) for name, count in (line.split() for line in lines)}
    return {}

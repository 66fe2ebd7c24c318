"""Control groups for tests: trees of files that look like them, and real ones of memory where they can be made."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


class FakeGroups:
    """A `/proc` and a hierarchy of either version under a directory."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory / "proc"
        self.groups = directory / "cgroup"

    def place(self, path: str, *, version: int, root: str = "/") -> tuple[Path, Path]:
        """Put this process into a group, in a hierarchy that is mounted from `root` on. Returns both directories."""
        own = self.proc / "self"
        own.mkdir(parents=True, exist_ok=True)
        (self.groups / path.removeprefix(root).strip("/")).mkdir(parents=True, exist_ok=True)
        kind, options, line = ("cgroup2", "rw", "0::") if version == 2 else ("cgroup", "rw,memory", "4:memory:")
        (own / "mountinfo").write_text(
            "23 1 8:1 / / rw - ext4 /dev/sda rw\n"
            f"41 31 0:38 {root} {self.groups} rw,relatime shared:9 - {kind} x {options}\n"
        )
        (own / "cgroup").write_text(f"9:name=systemd:/elsewhere\n{line}{path}\n")
        return self.proc, self.groups


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a real control group with a limit of memory. Skips where none can be made."""
    found = _find_memory_root()
    if found is None or os.geteuid() != 0:
        pytest.skip("memory control groups cannot be made here")
    parent, limit = found
    group = parent / f"outrider-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes), encoding="utf-8")
        with suppress(OSError):
            (group / "memory.swap.max").write_text("0", encoding="utf-8")
    except OSError as error:
        pytest.skip(f"memory control groups cannot be made here: {error}")
    try:
        yield group
    finally:
        _remove_group(group)


def run_in_group(group: Path, *arguments: str, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a control group, to its end."""
    enter = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.executable, sys.argv[2:])"
    command = [sys.executable, "-c", enter, str(group / "cgroup.procs"), sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _find_memory_root() -> tuple[Path, str] | None:
    """Return where memory groups can be made, and the name of their limit; None where none can."""
    with suppress(OSError):
        if "memory" in (_ROOT / "cgroup.controllers").read_text(encoding="utf-8").split():
            return _ROOT, "memory.max"
    if (_ROOT / "memory" / "memory.limit_in_bytes").exists():
        return _ROOT / "memory", "memory.limit_in_bytes"
    return None


def _remove_group(group: Path) -> None:
    for _ in range(50):  # its dead are taken out a moment after they died
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)

"""What tells one start of the machine from another."""

from __future__ import annotations

from pathlib import Path

_FILE = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """Return what is another text after every start of the machine; "" where there is none."""
    try:
        return _FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""

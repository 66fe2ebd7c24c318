"""What this process holds, by the system's own account."""

from __future__ import annotations

from pathlib import Path

from device_profiles.units import KIB


def peak_rss_bytes() -> int:
    """Return the most memory that this process ever held (VmHWM, of Linux), 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:")), 0)

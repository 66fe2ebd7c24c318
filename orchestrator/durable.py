"""What is to outlive a loss of power, and disks that are full."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def is_full(error: OSError) -> bool:
    """Whether a write failed for want of room, which may come: on the disk, or in the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def has_room(directory: Path, least_bytes: int) -> bool:
    """Whether the file system says that so much could be written there. Raises OSError."""
    told = os.statvfs(directory)
    return told.f_bavail * told.f_frsize >= least_bytes


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

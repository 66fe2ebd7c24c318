"""What an archive holds."""

from __future__ import annotations

import tarfile
from pathlib import Path


def read_archive(path: Path) -> dict[str, bytes]:
    """Return the files of a tar.gz by their names, without the folder that they are in."""
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive.getmembers():
            stream = archive.extractfile(entry)
            assert stream is not None, entry.name
            found[entry.name.partition("/")[2]] = stream.read()
    return found

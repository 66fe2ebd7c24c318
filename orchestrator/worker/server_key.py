"""The key that another engine's server asks for."""

from __future__ import annotations

from pathlib import Path


def read_server_key(file: str) -> str:
    """Return the key that a file holds, "" where none is named. Raises OSError where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8").strip() if file else ""
    except UnicodeDecodeError as error:
        raise OSError(f"{file}: is no UTF-8 text") from error

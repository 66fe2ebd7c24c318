"""Files that are written whole or not at all, whatever ends the writing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

UNFINISHED_SUFFIX: Final = ".new"
"""Of a file that is being written, or whose writer was killed."""


@contextmanager
def replace_file(path: Path, mode: int = 0o666, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Give a file that takes the place of what stands at a path once it is written; it is gone where that fails.
    `mode`: of the new file, less what the umask takes. `sync`: it is to outlive a loss of power. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

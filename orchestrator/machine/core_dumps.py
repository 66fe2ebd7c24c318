"""No core dumps: the memory of the daemon and its workers has prompts, answers and keys."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

_NO_DUMP_BYTES: Final = 1
"""Less than any dump. Of 0 bytes Linux would still start the program that `core_pattern` pipes to; of 1 it does not."""


def limit_core_dumps() -> None:
    """Let this process, and those that it will start, write no core dump. The hard limit stays, so that its user can
    allow one again with prlimit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    wanted = _NO_DUMP_BYTES if hard == resource.RLIM_INFINITY else min(_NO_DUMP_BYTES, hard)
    if soft != wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (wanted, hard))

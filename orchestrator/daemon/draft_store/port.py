"""What the daemon asks of a place that keeps answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import OutriderError


class StoreFailed(OutriderError):
    """The store did not do what it was asked for; the message is one line without secrets."""


class StoreRefused(StoreFailed):
    """The store is there, and did not do it: it is full, has damaged keys, or this user may not."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer to keep. `entry_id` is the same for the same answer to the same prompt; `blocks` are the keys by which
    prompts like its own find it, and `value` is the packed answer (see `codec`)."""

    entry_id: str
    blocks: Sequence[str]
    value: bytes


class DraftStore(Protocol):
    """Keeps answers within its bounds. Used by one task at a time for `keep`, by any number for `find_answers`."""

    async def find_answers(self, blocks: Sequence[str], least: int, most: int) -> list[bytes]:
        """Return the values of at most `most` answers that share at least `least` of these blocks: those that share
        most first, then the latest. Raises StoreFailed."""
        ...

    async def keep(self, entry: Entry) -> None:
        """Keep an answer; one that is there already is the latest from now on. Raises StoreFailed."""
        ...

    async def close(self) -> None:
        """Give back what the store holds. Never raises."""
        ...

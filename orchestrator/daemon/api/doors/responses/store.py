"""Responses that are kept in memory for a while, so that a next request can go on from them. Bounded in every way."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.config.model import Api


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response: `body` as it was answered, and `items`, the conversation up to its end. Both are JSON."""

    body: bytes
    items: bytes
    until_s: float

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items)


class ResponseStore:
    """Keeps responses, each for its key, within `api.stored_responses`; the oldest go first. Safe for threads."""

    def __init__(self, bounds: Api, clock: Clock) -> None:
        self.bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], StoredResponse] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def set_bounds(self, bounds: Api) -> None:
        """Keep within these from now on; what is kept already stays for as long as it was to."""
        with self._lock:
            self.bounds = bounds
            self._make_room()

    def put(self, owner: str, response_id: str, body: bytes, items: bytes) -> None:
        """Keep a response; one that is larger than all that may be kept is not."""
        with self._lock:
            self._drop((owner, response_id))
            entry = StoredResponse(body, items, self._clock.monotonic_s() + self.bounds.stored_responses_s)
            if not self.bounds.stored_responses or entry.size > self.bounds.stored_responses_memory:
                return
            self._kept[owner, response_id] = entry
            self._bytes += entry.size
            self._make_room()

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            self._expire()
            return self._kept.get((owner, response_id))

    def delete(self, owner: str, response_id: str) -> bool:
        with self._lock:
            self._expire()
            return self._drop((owner, response_id))

    def _make_room(self) -> None:
        while len(self._kept) > self.bounds.stored_responses or self._bytes > self.bounds.stored_responses_memory:
            self._drop(next(iter(self._kept)))

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        for name in [name for name, entry in self._kept.items() if entry.until_s <= now_s]:
            self._drop(name)

    def _drop(self, name: tuple[str, str]) -> bool:
        entry = self._kept.pop(name, None)
        if entry is not None:
            self._bytes -= entry.size
        return entry is not None

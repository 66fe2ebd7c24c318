"""A decode loop that requests leave, and come to, with their KV pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import MoveOut, PageLink, SharedMemory
from orchestrator.protocol.events import MovedIn, MovedOut
from orchestrator.worker.engine.kv_transfer.departures import Departures
from orchestrator.worker.engine.kv_transfer.intake import TakenPages
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.loop import DecodeLoop


class MovingLoop:
    """`came`: what was said of pages that came."""

    def __init__(self, loop: DecodeLoop, kv_format: str) -> None:
        self.loop = loop
        self.model = loop._target
        self.mover = KvMover(self.model, kv_format)
        self.departures = Departures(loop, self.mover, SystemClock())
        self.came: list[MovedIn] = []

    def move_out(self, request_id: str, memory: SharedMemory) -> MovedOut:
        """Let a request leave, its pages in shared memory."""
        left = self.departures.move_out(MoveOut(request_id, memory))
        assert left is not None
        return left

    def send_out(self, request_id: str, link: PageLink) -> MovedOut | None:
        """Let a request leave, its pages ahead over a link."""
        return self.departures.move_out(MoveOut(request_id, SharedMemory("", "none", 0), link))

    def take(self, positions: int, data: NDArray[np.uint8]) -> TakenPages:
        """Pages that a request begins with here."""
        return TakenPages(self.mover, SystemClock(), self.came.append, positions, data, 0.0)

"""Several drafters that are held together, however they are asked."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import Drafter


class DrafterGroup:
    """The part of drafting.port.Drafter that all its drafters take part in."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes() for drafter in self._drafters)

    def states(self) -> list[DrafterState]:
        return [state for drafter in self._drafters for state in drafter.states()]

    def close(self) -> None:
        """The one loaded last goes first: OpenVINO's models leave a signal stack behind otherwise."""
        for drafter in reversed(self._drafters):
            drafter.close()

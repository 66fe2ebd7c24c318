"""A drafter that never came to be: it proposes nothing and says why."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Ask, Draft, DraftHints
from policies.sampling import Sampling


class FailedDrafter:
    """Stands where a draft model's device failed while it was loaded; `state` says how."""

    def __init__(self, state: DrafterState) -> None:
        self._state = state

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        """See the port."""

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """See the port."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See the port."""
        return [NOTHING] * len(asks)

    def end(self, key: str, *, keep: bool) -> None:
        """See the port."""

    def memory_bytes(self) -> int:
        """See the port."""
        return 0

    def states(self) -> list[DrafterState]:
        """See the port."""
        return [self._state]

    def close(self) -> None:
        """See the port."""

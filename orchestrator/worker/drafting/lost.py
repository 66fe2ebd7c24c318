"""A drafter that never came to be: it proposes nothing and says why."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Ask, Draft, DraftHints
from policies.sampling import Sampling


class FailedDrafter:
    """Implements drafting.port.Drafter: stands where a draft model's device failed while it was loaded; `state` says
    how."""

    def __init__(self, state: DrafterState) -> None:
        self._state = state

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None: ...

    def extend(self, key: str, tokens: Sequence[int]) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [NOTHING] * len(asks)

    def end(self, key: str, *, keep: bool) -> None: ...

    def memory_bytes(self) -> int:
        return 0

    def states(self) -> list[DrafterState]:
        return [self._state]

    def close(self) -> None: ...

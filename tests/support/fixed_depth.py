"""A depth policy that adapts to nothing."""

from __future__ import annotations

from collections.abc import Sequence

from policies.speculation import DraftSummary, Rest, RoundContext
from policies.speculation.cost_model import TYPICAL, start_cost_model
from policies.speculation.policy import DraftLimits, RoundOutcome


class FixedDepth:
    """The same depth for every request and round; 0 is plain decoding. Methods: see the port."""

    rest = Rest.NONE

    def __init__(self, depth: int) -> None:
        self.name = f"fixed-{depth}"
        self.cost = start_cost_model(TYPICAL)
        self._depth = depth
        self._limits: list[int] = []

    def begin(self, key: str, most: int, *, sure: bool = False) -> None: ...

    def end(self, key: str) -> None: ...

    def reset_gain(self) -> None: ...

    def decide_draft_limits(self, now: RoundContext) -> DraftLimits:
        self._limits = [min(self._depth, place.max_draft_tokens) for place in now.places]
        return DraftLimits(self._limits)

    def decide_depths(self, now: RoundContext, proposals: Sequence[DraftSummary]) -> list[int]:
        return [min(proposal.tokens, limit) for proposal, limit in zip(proposals, self._limits, strict=True)]

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None: ...

    def decide_pause(self) -> int:
        return 0

    def observe_pause(self, rounds: int, rows: int) -> None: ...

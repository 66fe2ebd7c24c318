"""Fixed depths: what is configured where nothing adapts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider_lab.replay.recorded import Costs, RecordedRequest
from outrider_lab.replay.run import Replay, replay
from policies.speculation import DraftSummary, Rest, RoundContext, RoundSequence
from policies.speculation.cost_model import TYPICAL, start_cost_model
from policies.speculation.policy import DraftLimits, RoundOutcome


class FixedDepth:
    """`by_key`: depths of single requests, where they differ from `depth`. Depth 0 is plain decoding."""

    rest = Rest.NONE

    def __init__(self, depth: int, by_key: Mapping[str, int] | None = None, name: str = "") -> None:
        self.name = name or f"fixed-{depth}"
        self.cost = start_cost_model(TYPICAL)
        self._depth = depth
        self._by_key = dict(by_key or {})
        self._limits: list[int] = []

    def begin(self, key: str, most: int, *, sure: bool = False) -> None: ...

    def end(self, key: str) -> None: ...

    def reset_gain(self) -> None: ...

    def decide_draft_limits(self, now: RoundContext) -> DraftLimits:
        self._limits = [min(self.depth_of(now, place), place.max_draft_tokens) for place in now.places]
        return DraftLimits(self._limits)

    def depth_of(self, now: RoundContext, place: RoundSequence) -> int:
        return self._by_key.get(place.key, self._depth)

    def decide_depths(self, now: RoundContext, proposals: Sequence[DraftSummary]) -> list[int]:
        return [min(proposal.tokens, limit) for proposal, limit in zip(proposals, self._limits, strict=True)]

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None: ...

    def decide_pause(self) -> int:
        return 0

    def observe_pause(self, rounds: int, rows: int) -> None: ...


def replay_fixed_depths(
    requests: Sequence[RecordedRequest],
    costs: Costs,
    *,
    concurrency: int | Sequence[tuple[int, int]],
    depths: Sequence[int] = tuple(range(9)),
) -> dict[int, Replay]:
    return {
        depth: replay(requests, FixedDepth(depth), costs, concurrency=concurrency, most=max(depth, 1))
        for depth in depths
    }


def hindsight(
    requests: Sequence[RecordedRequest],
    costs: Costs,
    tried: dict[int, Replay],
    *,
    concurrency: int | Sequence[tuple[int, int]],
) -> Replay:
    """Return the best of those, and of a replay in which each request has the depth at which it took least time."""
    by_key = {request.key: min(tried, key=lambda depth: tried[depth].request_ms[request.key]) for request in requests}
    own = FixedDepth(0, by_key, name="hindsight")
    found = replay(requests, own, costs, concurrency=concurrency, most=max(*by_key.values(), 1))
    best = max([found, *tried.values()], key=lambda outcome: outcome.tokens_per_s)
    return Replay("hindsight", best.tokens, best.ms, best.request_ms, best.steps)

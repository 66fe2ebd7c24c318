"""The best fixed depths that one could have chosen, had one known: by trying them all."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_lab.replay.fixed import FixedDepth
from outrider_lab.replay.recorded import Costs, RecordedRequest
from outrider_lab.replay.run import Replay, replay


def replay_fixed_depths(
    requests: Sequence[RecordedRequest],
    costs: Costs,
    *,
    concurrency: int | Sequence[tuple[int, int]],
    depths: Sequence[int] = tuple(range(9)),
) -> dict[int, Replay]:
    """Return a replay for each depth, 0 (plain decoding) included."""
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

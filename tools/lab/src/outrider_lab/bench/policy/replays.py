"""Every policy on a recording: no model, no clock, so that what differs is the policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from device_profiles.units import MS_PER_S
from outrider_lab.bench.policy.arms import ADAPTIVE, FIXED_DEPTHS, PLAIN, name_fixed_depth, policy_of
from outrider_lab.replay.fixed import hindsight, replay_fixed_depths
from outrider_lab.replay.recorded import RecordedRequest
from outrider_lab.replay.run import Replay, replay
from outrider_lab.simulation.recording import Recording
from policies.speculation.policy import DepthPolicy

HINDSIGHT = "hindsight"
STEPS = "steps"
"""The load that goes up and down, in place of a concurrency."""
_MIX_REQUESTS = 4
"""Of each category in the mix, at least four times as many as run at once in all."""
Load = int | Sequence[tuple[int, int]]


def cells(recording: Recording, advanced: Callable[[], None]) -> dict[tuple[str, int, str], float]:
    """Return adaptive over plain decoding's tokens/s, by category, concurrency and kind of drafter. One policy for each
    kind goes through all its cells, as in the real runs."""
    found = {}
    for kind, requests in recording.kinds.items():
        policy = policy_of(ADAPTIVE, recording.known)
        for concurrency in recording.concurrencies:
            for category in recording.categories():
                own = [request for request in requests if request.category == category]
                own = own[: max(recording.limit, 2 * concurrency)]
                plain = _replay_requests(recording, own, policy_of(PLAIN, recording.known), concurrency)
                adaptive = _replay_requests(recording, own, policy, concurrency)
                found[category, concurrency, kind] = steady_rate(adaptive, concurrency) / steady_rate(
                    plain, concurrency
                )
            advanced()
    return found


def steady_rate(played: Replay, load: int | str) -> float:
    """Return tokens/s while as many requests run as the load says (of one that steps: over all), as real runs count."""
    steps = [step for step in played.steps if step.sequences == load] if isinstance(load, int) else []
    ms = sum(step.round_ms for step in steps)
    return MS_PER_S * sum(step.tokens for step in steps) / ms if ms else played.tokens_per_s


def mix(
    recording: Recording, kind: str, load: Load, advanced: Callable[[], None], *, of_category: int = _MIX_REQUESTS
) -> dict[str, Replay]:
    """Return what each policy comes to over requests of all categories in turn."""
    requests = _in_turn(recording, kind, of_category)
    costs = recording.costs
    tried = replay_fixed_depths(requests, costs, concurrency=load, depths=(0, *FIXED_DEPTHS))
    found = {PLAIN: tried[0]} | {name_fixed_depth(depth): tried[depth] for depth in FIXED_DEPTHS}
    found[HINDSIGHT] = hindsight(requests, costs, tried, concurrency=load)
    found[ADAPTIVE] = _replay_requests(recording, requests, policy_of(ADAPTIVE, recording.known), load)
    advanced()
    return found


def mixes(recording: Recording, advanced: Callable[[], None]) -> dict[tuple[int | str, str], dict[str, Replay]]:
    """Return the mix at each concurrency, and under the load that goes up and down, for each kind of drafter."""
    found: dict[tuple[int | str, str], dict[str, Replay]] = {}
    for kind in recording.kinds:
        for concurrency in recording.concurrencies:
            found[concurrency, kind] = mix(recording, kind, concurrency, advanced)
        found[STEPS, kind] = mix(recording, kind, steps_of(recording, kind), advanced)
    return found


def steps_of(recording: Recording, kind: str) -> list[tuple[int, int]]:
    """Return a load that goes up and down over the mix: (from so many tokens on, requests at once)."""
    tokens = sum(len(request.drafts) for request in _in_turn(recording, kind, _MIX_REQUESTS))
    most = max(recording.concurrencies)
    stages = [(0.0, 1), (0.1, max(1, most // 4)), (0.3, most), (0.7, max(1, most // 4)), (0.9, 1)]
    return [(round(share * tokens), count) for share, count in stages]


def _replay_requests(
    recording: Recording, requests: Sequence[RecordedRequest], policy: DepthPolicy, load: Load
) -> Replay:
    return replay(requests, policy, recording.costs, concurrency=load, most=recording.most)


def _in_turn(recording: Recording, kind: str, of_category: int) -> list[RecordedRequest]:
    by_category = {name: [] for name in recording.categories()}  # type: dict[str, list[RecordedRequest]]
    for request in recording.kinds[kind]:
        by_category[request.category].append(request)
    wanted = max(of_category, -(-4 * max(recording.concurrencies) // len(by_category)))
    return [
        own[place] for place in range(wanted) for own in by_category.values() if place < len(own) and own[place].drafts
    ]

"""Plays recorded requests under a policy: no model, no clock, no noise. Prefill is left out: it is the same for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from device_profiles.units import MS_PER_S
from outrider_lab.replay.recorded import Costs, RecordedRequest
from policies.speculation import DraftComparison, DraftSummary, RoundContext, RoundSequence, RoundTimes
from policies.speculation.policy import DepthPolicy, RoundOutcome


@dataclass(frozen=True, slots=True)
class Step:
    """One round of a replay."""

    round_ms: float
    sequences: int
    tokens: int
    drafted: int
    accepted: int


class RequestRound(NamedTuple):
    """One request's share of a round: tokens that it had before it, and the tokens it made, drafted and had
    accepted."""

    done: int
    tokens: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class Replay:
    """What came of a replay. `request_ms`: time from a request's first round to its last. `courses`: the rounds of each
    request. `rows` of the last round."""

    policy: str
    tokens: int = 0
    ms: float = 0.0
    request_ms: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    courses: dict[str, list[RequestRound]] = field(default_factory=dict)
    rows: int = 0

    @property
    def tokens_per_s(self) -> float:
        return MS_PER_S * self.tokens / self.ms if self.ms else 0.0


@dataclass(slots=True)
class _Running:
    request: RecordedRequest
    begin_ms: float
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.request.drafts) - self.done


def replay(
    requests: Sequence[RecordedRequest],
    policy: DepthPolicy,
    costs: Costs,
    *,
    concurrency: int | Sequence[tuple[int, int]],
    most: int,
) -> Replay:
    """Play all requests in order, with at most `most` drafts a sequence.

    `concurrency` run at a time, or as many as are due from so many tokens on: (tokens, concurrency) in ascending order,
    from 0.
    """
    load = [(0, concurrency)] if isinstance(concurrency, int) else list(concurrency)
    waiting = deque(requests)
    running: list[_Running] = []
    outcome = Replay(policy.name)
    while waiting or running:
        wanted = [count for tokens, count in load if tokens <= outcome.tokens][-1]
        while waiting and len(running) < wanted:
            request = waiting.popleft()
            policy.begin(request.key, most)
            running.append(_Running(request, outcome.ms))
        _round(running, policy, costs, most, outcome)
        for one in [one for one in running if one.left <= 0]:
            running.remove(one)
            policy.end(one.request.key)
            outcome.request_ms[one.request.key] = outcome.ms - one.begin_ms
    return outcome


def _round(running: Sequence[_Running], policy: DepthPolicy, costs: Costs, most: int, outcome: Replay) -> None:
    base = costs.rows(0)
    places = [RoundSequence(one.request.key, min(most, one.left - 1), free=base - 1) for one in running]
    base_rows = base * len(places)
    context = sum(one.request.prompt_tokens + one.done for one in running) / len(running)
    now = RoundContext(places, base_rows, max(0, costs.most_rows - base_rows), context, costs.widths)
    found = policy.decide_draft_limits(now)
    asked = [0] * len(found.limits) if found.cheap_only and costs.dear else found.limits
    drafts = [one.request.drafts[one.done] for one in running]
    proposals = [
        DraftSummary(min(limit, draft.tokens), draft.confidences[:limit])
        for limit, draft in zip(asked, drafts, strict=True)
    ]
    depths = policy.decide_depths(now, proposals)
    accepted = [min(depth, draft.accepted) for depth, draft in zip(depths, drafts, strict=True)]
    verdicts = [
        DraftComparison(min(draft.accepted, right + 1, proposal.tokens), min(proposal.tokens, right + 1))
        for draft, right, proposal in zip(drafts, accepted, proposals, strict=True)
    ]
    tokens = sum(accepted) + len(running)
    times = RoundTimes(costs.forward_ms(depths, context, outcome.rows), costs.drafting_ms(asked))
    outcome.rows = sum(map(costs.rows, depths))
    policy.observe_round(now, RoundOutcome(proposals, depths, accepted, verdicts, times, tokens))
    for one, depth, right in zip(running, depths, accepted, strict=True):
        course = outcome.courses.setdefault(one.request.key, [])
        course.append(RequestRound(one.done, right + 1, depth, right))
        one.done += right + 1
    round_ms = times.forward_ms + times.draft_ms
    outcome.steps.append(Step(round_ms, len(running), tokens, sum(depths), sum(accepted)))
    outcome.tokens += tokens
    outcome.ms += round_ms

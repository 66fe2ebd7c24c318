"""What can be expected of a drafter: how many tokens, in which rounds, and what becomes of them.

What drafting takes where a draft model checks cheaper drafters' tokens in its own steps (drafting/cascade.py).

A step that is fed k tokens of a cheaper drafter makes 1 + E(k) tokens, E(k) the expected number of them that are the
model's own choice, and nothing of the rest. With c the share of steps for which the cheaper drafter has tokens and T(r)
the time of a step with r rows of each sequence,

    tokens a step = 1 + c E(k)        time of a step = c T(1 + k) + (1 - c) T(1) + asking

so d tokens take d / (1 + c E(k)) steps, at least one. The first one reads a row more. The best k of the best cheaper
drafter is taken; 0 is the model alone. A cheaper drafter that is a model is asked for k tokens in the same way: its
steps take a share of T, and may check still cheaper tokens (vertical cascades, CS-Drafting, arXiv 2312.11462).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from device_profiles.cost import estimate_round_tokens
from policies.planning.plan import CheaperDrafter, DrafterFacts, Workload

MOST_CHECKED = 8
"""Tokens that are checked in one step at most, as in policies/speculation/cascade.py."""
_FIRST_ROWS = 2.0  # the token of the last verdict that a draft missed, and the newest

StepTime = Callable[[float], float]
"""Returns what a step with so many rows of each sequence takes, in ms."""


def estimate_drafting_ms(step_ms: StepTime, cheaper: Sequence[CheaperDrafter], depth: int) -> float:
    """Return what drafting so many tokens of each sequence takes a model behind a verification."""
    return _drafting_ms(step_ms, cheaper, depth, _FIRST_ROWS)


def _drafting_ms(step_ms: StepTime, cheaper: Sequence[CheaperDrafter], depth: int, first_rows: float) -> float:
    if depth <= 0:
        return 0.0
    best = step_ms(first_rows) + (depth - 1) * step_ms(1.0)
    for drafter in cheaper:
        for checked in range(1, min(depth - 1, MOST_CHECKED) + 1):
            best = min(best, _checking_ms(step_ms, drafter, checked, depth, first_rows))
    return best


def _checking_ms(step_ms: StepTime, drafter: CheaperDrafter, checked: int, depth: int, first_rows: float) -> float:
    a_step = 1.0 + drafter.coverage * (estimate_round_tokens(drafter.acceptance, checked) - 1.0)
    asking = 0.0
    if drafter.step_share:
        asking = _drafting_ms(lambda rows: drafter.step_share * step_ms(rows), drafter.cheaper, checked, 1.0)

    def sum_step_ms(rows: float) -> float:
        return drafter.coverage * step_ms(rows + checked) + (1.0 - drafter.coverage) * step_ms(rows) + asking

    return sum_step_ms(first_rows) + max(0.0, depth / a_step - 1.0) * sum_step_ms(1.0)


def depth_bound(workload: Workload, drafter: DrafterFacts) -> int:
    """Return the deepest that is worth looking at."""
    return min(workload.depth_bound, drafter.max_depth) if drafter.max_depth else workload.depth_bound


def hit_rate(drafter: DrafterFacts, depth: int) -> float:
    """Return the chance that drafts made ahead of a verification follow it: all `depth` and the guess behind them."""
    last = len(drafter.acceptance) - 1
    return prod(drafter.acceptance[min(index, last)] for index in range(depth + 1))


def compute_draft_length_shares(drafter: DrafterFacts | None, depth: int) -> list[tuple[int, float]]:
    """Return how many tokens a draft of at most `depth` has, and in which share of the rounds: (tokens, share), without
    those that never occur."""
    if drafter is None or depth == 0:
        return [(0, 1.0)]
    coverage, known = drafter.coverage, drafter.offered
    offered = [min(coverage, known[min(place, len(known) - 1)]) if known else coverage for place in range(depth)]
    reached = [1.0, *offered, 0.0]
    shares = [(count, reached[count] - reached[count + 1]) for count in range(depth + 1)]
    return [(count, share) for count, share in shares if share > 0.0]


def changes_of(drafter: DrafterFacts, sequences: int) -> float:
    """Return the share of verifications that run another number of rows than the one before: the part of any sequence
    may have changed, each drafting for itself."""
    return float(1.0 - (1.0 - drafter.changes) ** sequences)


def tokens_per_round(drafter: DrafterFacts | None, depth: int) -> float:
    """Return the expected tokens of one sequence in a round, the target's own included."""
    if drafter is None or depth == 0:
        return 1.0
    return 1.0 + drafter.coverage * (estimate_round_tokens(drafter.acceptance, depth) - 1.0)


def usual_depth(drafter: DrafterFacts, bound: int) -> int:
    """Return how many tokens drafts have on average where there is one: where a policy that chooses may start."""
    drafts = [(count, share) for count, share in compute_draft_length_shares(drafter, bound) if count]
    return max(1, round(sum(count * share for count, share in drafts) / max(1e-9, sum(share for _, share in drafts))))


def all_hit_rate(drafter: DrafterFacts, depth: int, sequences: int) -> tuple[float, float]:
    """Return the chance that the drafts made ahead of every sequence follow its verification, and how many sequences'
    do not where some do not."""
    hit = hit_rate(drafter, depth)
    return float(hit**sequences), max(1.0, (1.0 - hit) * sequences)

"""What can be expected of a drafter: how many tokens, in which rounds, and what becomes of them."""

from __future__ import annotations

from math import prod

from device_profiles.cost import estimate_round_tokens
from policies.planning.plan import DrafterFacts, Workload


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

"""What drafting takes where a draft model checks cheaper drafters' tokens in its own steps (drafting/cascade.py).

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

from device_profiles.cost import estimate_round_tokens
from policies.planning.plan import CheaperDrafter

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
    """Return what it takes with so many tokens of one cheaper drafter in each step."""
    a_step = 1.0 + drafter.coverage * (estimate_round_tokens(drafter.acceptance, checked) - 1.0)
    asking = 0.0
    if drafter.step_share:
        asking = _drafting_ms(lambda rows: drafter.step_share * step_ms(rows), drafter.cheaper, checked, 1.0)

    def sum_step_ms(rows: float) -> float:
        return drafter.coverage * step_ms(rows + checked) + (1.0 - drafter.coverage) * step_ms(rows) + asking

    return sum_step_ms(first_rows) + max(0.0, depth / a_step - 1.0) * sum_step_ms(1.0)

"""When a costlier drafter is asked after a cheaper one, and whose draft is taken.

A draft is worth the tokens that it saves. With c_i the chance that token i is accepted if all before it are, the
expected number of accepted tokens is sum over k of prod_{i<=k} c_i. This is Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, section 3.1, with a chance for each token.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.running_mean import update_mean

WORTH_TOKENS = 0.5
"""A costlier drafter is asked where it usually brings so many accepted tokens more."""
OPTIMISM_TOKENS = 4.0
"""What is expected of a drafter at first: enough to ask it until its own figures say otherwise."""
_WEIGHT = 0.05  # of the newest draft, in an exponential mean


def estimate_accepted_tokens(confidences: Sequence[float]) -> float:
    total, chance = 0.0, 1.0
    for confidence in confidences:
        chance *= confidence
        total += chance
    return total


def asks_on(confidences: Sequence[float], *, limit: int, usual: float) -> bool:
    """Return whether to ask the next drafter too, where the cheaper ones' best draft has these confidences.

    `usual`: the accepted tokens that can be expected of the next one's drafts. Where there is no draft yet it is always
    asked, so what is usual stays known.
    """
    if limit <= 0:
        return False
    if not confidences:
        return True
    return estimate_accepted_tokens(confidences) + WORTH_TOKENS < min(usual, limit)


def usual_after(usual: float, confidences: Sequence[float]) -> float:
    """Return what can be expected of a drafter's drafts, one more of them considered."""
    return update_mean(usual, estimate_accepted_tokens(confidences), _WEIGHT)

"""What becomes of one draft at its position: it is accepted, or another token is chosen in its place.

rejection   accept x with the chance min(1, p(x) / q(x)), else choose from the residual, norm(max(p - q, 0)): the
            token is distributed as p whatever q is (Leviathan et al., arXiv 2211.17192, theorem 1; Chen et al.,
            arXiv 2302.01318, theorem 1)
tolerance   accept x where log p(x) >= log q(x) - delta too: more is accepted, and the tokens are not distributed as p;
            with delta 0 it is rejection

p is the target's distribution under everything that the request asks for, q the draft's (`proposal`). A draft that was
not drawn is a point mass: q(x) = 1. The gap of a draft is log q(x) - log p(x), in nats. Greedily the target's
distribution is its best token, and under tolerance the gap is how far the draft's logit is below the best one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.sampling import noise
from policies.sampling.coupled import choose
from policies.sampling.draft_distribution import DraftDistribution
from policies.sampling.filters import distribution
from policies.sampling.params import Row, Sampling, finite_top


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """`token` is the draft where it was accepted. `gap`: see the module; None where the rule does not use it.
    `tolerated`: the tolerance alone accepted it; by the rule that loses nothing another token would stand there."""

    accepted: bool
    token: int
    gap: float | None = None
    tolerated: bool = False


def judge(
    row: Row,
    draft: int,
    proposal: DraftDistribution | None,
    sampling: Sampling,
    position: int,
    *,
    delta: float | None = None,
    uniform: noise.Uniform = noise.single,
) -> VerifiedToken:
    """Judge one draft by its row (float32, shape (vocabulary,)) and the request's rule.

    `proposal`: what the draft was drawn from, None for a point mass. One that is no distribution, or does not hold
    the draft, is a draft that failed: the token is the target's own choice. `delta`: the tolerance in nats; None while
    it is not known, and then nothing is lost: the rule is rejection. Raises NotFinite.
    """
    if sampling.rule in ("greedy", "coupled"):
        token = choose(row, sampling, position)
        return VerifiedToken(token == draft, token)
    if sampling.temperature == 0.0:
        return _near_the_best(row, draft, delta)
    q = _build_draft_distribution(proposal, draft, len(row))
    if q is None:
        return VerifiedToken(False, choose(row, sampling, position))
    ids, p = distribution(row, sampling)
    p_draft, q_draft = _share(ids, p, draft), _share(*q, draft)
    gap = math.log(q_draft) - math.log(p_draft) if p_draft > 0.0 else math.inf
    tolerated = sampling.acceptance == "tolerance" and delta is not None and math.isfinite(gap) and gap <= delta
    lossless = uniform(sampling.seed, position, noise.Purpose.ACCEPT) * q_draft < p_draft
    if tolerated or lossless:
        return VerifiedToken(True, draft, gap, tolerated=not lossless)
    left = residual(ids, p, *q)
    at = uniform(sampling.seed, position, noise.Purpose.RESIDUAL)
    return VerifiedToken(False, int(ids[noise.draw_index(left, at)]), gap)


def residual(
    ids: NDArray[np.uint32], p: NDArray[np.float64], tokens: NDArray[np.uint32], q: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return max(p - q, 0) over `ids`, not normalised; p itself where that is nothing (p and q are equal but for
    rounding)."""
    order = np.argsort(ids, kind="stable")
    places = np.minimum(np.searchsorted(ids, tokens, sorter=order), len(ids) - 1)
    matches = order[places]
    same = ids[matches] == tokens
    left = p.copy()
    left[matches[same]] = np.maximum(left[matches[same]] - q[same], 0.0)
    return left if left.any() else p


def _near_the_best(row: Row, draft: int, delta: float | None) -> VerifiedToken:
    gap = finite_top(row) - float(row[draft])
    best = int(row.argmax())
    accepted = draft == best if delta is None else math.isfinite(gap) and gap <= delta
    return VerifiedToken(accepted, draft if accepted else best, gap, tolerated=accepted and draft != best)


def _build_draft_distribution(
    proposal: DraftDistribution | None, draft: int, vocabulary: int
) -> tuple[NDArray[np.uint32], NDArray[np.float64]] | None:
    if proposal is None:
        return np.array([draft], np.uint32), np.ones(1)
    q = proposal.probabilities(vocabulary)
    return (proposal.tokens, q) if q is not None and _share(proposal.tokens, q, draft) > 0.0 else None


def _share(ids: NDArray[np.uint32], probabilities: NDArray[np.float64], token: int) -> float:
    return float(probabilities[ids == token].sum())

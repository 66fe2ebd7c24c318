"""The judgement of one sequence's whole draft.

What becomes of one draft at its position: it is accepted, or another token is chosen in its place.

rejection   accept x with the chance min(1, p(x) / q(x)), else choose from the residual, norm(max(p - q, 0)): the
            token is distributed as p whatever q is (Leviathan et al., arXiv 2211.17192, theorem 1; Chen et al.,
            arXiv 2302.01318, theorem 1)
tolerance   accept x where log p(x) >= log q(x) - delta too: more is accepted, and the tokens are not distributed as p;
            with delta 0 it is rejection

p is the target's distribution under everything that the request asks for, q the draft's (`proposal`). A draft that was
not drawn is a point mass: q(x) = 1. The gap of a draft is log q(x) - log p(x), in nats. Greedily the target's
distribution is its best token, and under tolerance the gap is how far the draft's logit is below the best one.

The distribution that a drafter drew a token from, as far as anybody needs to know it: a few ids and their shares.

The sparse row *is* the proposal. The drafter cuts its own distribution to the likeliest tokens first and draws from
what is left. So both sides use the same numbers, and the rule stays exact at any width.

What decides whether a drawn token is verified must not look at that token or at those behind it. A token that is kept
for what it is, is no draw any more, and the output would lean. Its row, and the tokens before it, may be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.sampling import noise
from policies.sampling.coupled import choose, choose_each, greedy
from policies.sampling.filters import distribution
from policies.sampling.params import BestRow, BestRows, Ids, NotFinite, Row, Sampling, Shape, finite_top

PROPOSAL_WIDTH = 128
"""The most tokens of a proposal."""

# Of shares that were rounded to float32: 128 of them are off by 1e-5 at most. More is a broken draft (ADR 0019).
_SUM_SLACK = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """Token ids, each once, and their shares (float32, both of shape (m,)); the shares are normalised when used."""

    tokens: NDArray[np.uint32]
    shares: NDArray[np.float32]

    def probabilities(self, vocabulary: int) -> NDArray[np.float64] | None:
        """Return each token's probability, in the order of `tokens`; None where this is no distribution."""
        shares = self.shares.astype(np.float64)
        if self.tokens.shape != shares.shape or shares.ndim != 1 or not len(shares):
            return None
        if not np.isfinite(shares).all() or (shares < 0.0).any() or abs(shares.sum() - 1.0) > _SUM_SLACK:
            return None
        if int(self.tokens.max()) >= vocabulary or len(np.unique(self.tokens)) < len(shares):
            return None
        return np.asarray(shares / shares.sum())

    @property
    def peak(self) -> float:
        """The share of the likeliest token: how sure the drafter is, whatever it drew."""
        return float(self.shares.max())


def propose(
    row: Row,
    sampling: Sampling,
    position: int,
    behind: int,
    width: int = PROPOSAL_WIDTH,
    *,
    uniform: noise.Uniform = noise.single,
) -> tuple[int, DraftDistribution]:
    """Draw a token for `position` from a draft model's logits (float32, shape (vocabulary,)) under the request's own
    temperature and filters, cut to the `width` likeliest tokens.

    The same row, seed, position and `behind` (tokens committed before the whole draft) give the same token. A token
    that was drawn for a position in an earlier round, and thrown away, is independent of it. The temperature must be
    above 0. Raises NotFinite.
    """
    ids, probabilities = distribution(row, sampling, position)
    if len(ids) > width:
        best = np.argpartition(-probabilities, width - 1)[:width]
        ids, probabilities = ids[best], probabilities[best]
    shares = (probabilities / probabilities.sum()).astype(np.float32)
    at = uniform(sampling.seed, (behind << 32) | position, noise.Purpose.DRAFT)
    index = noise.draw_index(shares.astype(np.float64), at)
    return int(ids[index]), DraftDistribution(ids, shares)


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
    ids, p = distribution(row, sampling, position)
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


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """`tokens` are to be committed: `accepted` drafts, then one recovered or bonus token (none where a shape said that
    nothing may follow). `gaps` of the drafts that were judged, where the rule is tolerance; `tolerated`: which of the
    tokens only the tolerance accepted."""

    accepted: int
    tokens: tuple[int, ...]
    gaps: tuple[float, ...] = ()
    tolerated: tuple[int, ...] = ()


class CoupledDraft(NamedTuple):
    """A draft to be judged by the coupled rule, as `verify_draft` takes it. `best`: where `rows` are the best logits
    alone."""

    rows: Row
    draft: Sequence[int]
    sampling: Sampling
    position: int
    best: BestRows | None = None


def verify_draft(
    rows: Row,
    draft: Sequence[int],
    sampling: Sampling,
    position: int,
    shape: Shape | None = None,
    *,
    proposals: Sequence[DraftDistribution | None] = (),
    delta: float | None = None,
    ids: Ids | None = None,
) -> VerifiedDraft:
    """Judge one sequence's draft by the rule of `sampling`.

    `rows`: float32, shape (len(draft) + 1, vocabulary); row i holds the logits of position `position + i`,
    where `position` is that of the first drafted token. `shape` changes each row before it is judged, in order: what a
    row is shaped to depends on the drafts accepted before it. `proposals[i]` is what draft i was drawn from: None, or
    no entry, where it was not drawn. `delta`: see `judge`. `ids`: as BestRows has them, where `rows` are the
    best logits alone, for the greedy rule without a shape. Raises NotFinite.
    """
    if shape is None and sampling.rule == "greedy":
        return _greedy_verdict(rows, draft, ids)
    gaps: list[float] = []
    tolerated: list[int] = []
    for index, token in enumerate(draft):
        row = _shape_row(rows[index], draft[:index], shape)
        if row is None:
            return VerifiedDraft(index, tuple(draft[:index]), tuple(gaps), tuple(tolerated))
        proposal = proposals[index] if index < len(proposals) else None
        judged = judge(row, token, proposal, sampling, position + index, delta=delta)
        if judged.gap is not None and sampling.acceptance == "tolerance":
            gaps.append(judged.gap)
        if not judged.accepted:
            return VerifiedDraft(index, (*draft[:index], judged.token), tuple(gaps), tuple(tolerated))
        if judged.tolerated:
            tolerated.append(index)
    count = len(draft)
    row = _shape_row(rows[count], draft, shape)
    bonus = () if row is None else (choose(row, sampling, position + count),)
    return VerifiedDraft(count, (*draft, *bonus), tuple(gaps), tuple(tolerated))


def verify_coupled_drafts(drafts: Sequence[CoupledDraft]) -> list[VerifiedDraft]:
    """Return what `verify_draft` does for each, side by side, a position of each at a time. All must go by the coupled
    rule, and none may have a shape. Raises NotFinite."""
    taken: list[list[int]] = [[] for _ in drafts]
    going = list(range(len(drafts)))
    while going:
        chosen = choose_each(_next(drafts[index], len(taken[index])) for index in going)
        for index, token in zip(going, chosen, strict=True):
            taken[index].append(token)
        going = [index for index in going if _goes_on(taken[index], drafts[index].draft)]
    return [VerifiedDraft(len(tokens) - 1, tuple(tokens)) for tokens in taken]


def _next(draft: CoupledDraft, taken: int) -> tuple[Row, BestRow | None, Sampling, int]:
    best = None if draft.best is None else draft.best.take_row(taken)
    return draft.rows[taken], best, draft.sampling, draft.position + taken


def _goes_on(taken: Sequence[int], draft: Sequence[int]) -> bool:
    """True where the last token was drafted, so that the row behind it counts."""
    return len(taken) <= len(draft) and taken[-1] == draft[len(taken) - 1]


def _greedy_verdict(rows: Row, draft: Sequence[int], ids: Ids | None) -> VerifiedDraft:
    choices = greedy(rows, ids)
    accepted = 0
    while accepted < len(draft) and choices[accepted] == draft[accepted]:
        accepted += 1
    return VerifiedDraft(accepted, tuple(choices[: accepted + 1]))


def _shape_row(row: Row, taken: Sequence[int], shape: Shape | None) -> Row | None:
    if shape is None:
        return row
    if not math.isfinite(float(row.max())):  # a shape may cover garbage up
        raise NotFinite("the logits are not finite")
    return shape(row, taken)

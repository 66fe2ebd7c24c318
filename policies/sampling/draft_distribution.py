"""The distribution that a drafter drew a token from, as far as anybody needs to know it: a few ids and their shares.

The sparse row *is* the proposal. The drafter cuts its own distribution to the likeliest tokens first and draws from
what is left. So both sides use the same numbers, and the rule stays exact at any width.

What decides whether a drawn token is verified must not look at that token or at those behind it. A token that is kept
for what it is, is no draw any more, and the output would lean. Its row, and the tokens before it, may be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.sampling import noise
from policies.sampling.filters import distribution
from policies.sampling.params import Row, Sampling

PROPOSAL_WIDTH = 128
"""The most tokens of a proposal."""

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
    ids, probabilities = distribution(row, sampling)
    if len(ids) > width:
        best = np.argpartition(-probabilities, width - 1)[:width]
        ids, probabilities = ids[best], probabilities[best]
    shares = (probabilities / probabilities.sum()).astype(np.float32)
    at = uniform(sampling.seed, (behind << 32) | position, noise.Purpose.DRAFT)
    index = noise.draw_index(shares.astype(np.float64), at)
    return int(ids[index]), DraftDistribution(ids, shares)

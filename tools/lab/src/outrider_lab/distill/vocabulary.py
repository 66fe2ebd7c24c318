"""Which tokens a draft may propose: the frequent ones only, because its output layer is most of what a token costs it.

As in FR-Spec (arXiv 2502.14856), counted over what the target itself wrote. A token that is left out is never drafted,
which costs a little acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from orchestrator.generating.data import Text


def counts(texts: Iterable[Text], vocabulary_size: int) -> NDArray[np.int64]:
    """Return how often each token was written by the target or was its likeliest one, shape (vocabulary,)."""
    total = np.zeros(vocabulary_size, np.int64)
    for text in texts:
        total += np.bincount(text.tokens[text.head :], minlength=vocabulary_size)
        total += np.bincount(text.top_ids[:, 0], minlength=vocabulary_size)
    return total


def most_frequent(total: NDArray[np.int64], size: int, always: Iterable[int]) -> NDArray[np.int64]:
    """Return `size` token ids in ascending order: those of `always`, then the most frequent, the lower id first."""
    ranked = np.argsort(-total, kind="stable")
    kept = list(dict.fromkeys([*always, *(int(token) for token in ranked[:size])]))[: min(size, len(total))]
    return np.array(sorted(kept), np.int64)


def coverage(total: NDArray[np.int64], kept: NDArray[np.int64]) -> float:
    """Return the share of all that was counted which `kept` can say."""
    return float(total[kept].sum() / max(1, total.sum()))

"""Log-probabilities of tokens that are known, from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_probabilities(rows: NDArray[Any], following: Sequence[int]) -> list[float]:
    """Return log softmax of each row, (tokens, vocabulary), at the token that follows it."""
    wide = rows.astype(np.float64)
    top = wide.max(axis=1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return [float(value) for value in wide[np.arange(len(wide)), np.asarray(following)] - total]

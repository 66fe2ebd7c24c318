"""Log-probabilities of tokens: the log-softmax of the target's own logits.

Of the logits as the model computed them: before bias, penalties, temperature, filters and grammar (vLLM's
`raw_logprobs`). Each row is reduced alone and in float64. So a row which is the same to the bit gives figures that are
the same to the bit, whatever was drafted beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.sampling import Row

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say (vLLM's and OpenAI's figure)."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """`logprob` is the token's own, in nats; `top` holds the likeliest tokens and theirs, best first, the lower id
    first among equals."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def score(row: Row, token: int, top: int) -> TokenScore:
    """Score `token` at a row of raw logits (float32, shape (vocabulary,)), beside the `top` likeliest."""
    wide = row.astype(np.float64)
    highest = wide.max()
    log_total = float(highest + np.log(np.exp(wide - highest).sum()))

    def logprob(of: int) -> float:
        return max(LEAST, float(wide[of]) - log_total)

    return TokenScore(logprob(token), tuple((each, logprob(each)) for each in _likeliest(row, top)))


def _likeliest(row: Row, count: int) -> list[int]:
    count = min(count, len(row))
    if count == 0:
        return []
    least = np.partition(row, -count)[-count]  # every token at or above it, so that ties are broken by id
    ids = np.flatnonzero(row >= least)
    return [int(token) for token in ids[np.argsort(-row[ids], kind="stable")][:count]]

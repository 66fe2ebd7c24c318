"""What a request adds to the logits before a token is chosen: bias and penalties.

In vLLM's order:

- `logit_bias` is added.
- The repetition penalty divides positive and multiplies negative logits of every token of prompt and output (Keskar et
  al., "CTRL", 2019, section 4.1).
- The frequency penalty is taken off once for each time that a token was generated.
- The presence penalty is taken off once if the token was generated at all.
- The penalty on repetitions is taken off last (policies/sampling/dry; llama.cpp has it behind the others, too).

For frequency and presence the prompt does not count (OpenAI's definitions).

All of it is a function of the tokens before a position. So a row of a verified draft is judged with the counts that
include the accepted drafts before it, and the result is the same at every depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.sampling import Row, Sampling
from policies.sampling.dry import DryPenalty

LEAST_REPETITION = 0.01
"""A smaller repetition penalty could divide a logit into infinity, which would look like a broken device. Bounded by
that alone."""

_Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Penalties:
    """One request's bias and penalties, made ready once: ids and their bias, and the distinct ids of the prompt."""

    bias_ids: _Ids
    bias: NDArray[np.float32]
    prompt_ids: _Ids
    repetition: np.float32
    frequency: np.float32
    presence: np.float32
    dry: DryPenalty | None = None

    @classmethod
    def of(cls, sampling: Sampling, prompt: Iterable[int]) -> Penalties | None:
        """Return what a request asks for; None where it asks for nothing."""
        repeats = sampling.repetition_penalty != 1.0
        counts = repeats or sampling.frequency_penalty or sampling.presence_penalty
        if not counts and not sampling.logit_bias and sampling.dry is None:
            return None
        return cls(
            bias_ids=np.array([token for token, _ in sampling.logit_bias], dtype=np.intp),
            bias=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
            prompt_ids=np.unique(np.fromiter(prompt if repeats else (), dtype=np.intp)),
            repetition=np.float32(sampling.repetition_penalty),
            frequency=np.float32(sampling.frequency_penalty),
            presence=np.float32(sampling.presence_penalty),
            dry=None if sampling.dry is None else DryPenalty(sampling.dry),
        )

    def apply_penalties(self, row: Row, generated: Mapping[int, int], text: Sequence[int]) -> Row:
        """Return a changed copy of a row (float32, shape (vocabulary,)); `generated` counts the output's tokens, and
        `text` is prompt and output, where `dry` is to look at them."""
        row = row.copy()
        if len(self.bias_ids):
            row[self.bias_ids] += self.bias
        ids = np.fromiter(generated.keys(), dtype=np.intp, count=len(generated))
        if self.repetition != 1.0:
            for known in (self.prompt_ids, ids[~np.isin(ids, self.prompt_ids)]):
                logits = row[known]
                row[known] = np.where(logits > 0, logits / self.repetition, logits * self.repetition)
        if len(ids) and (self.frequency or self.presence):
            counts = np.fromiter(generated.values(), dtype=np.float32, count=len(generated))
            row[ids] -= self.frequency * counts + self.presence
        if self.dry is not None:
            self.dry.apply_dry(row, text)
        return row


def without(row: Row, banned: Sequence[int]) -> Row:
    """Return a copy of a row in which the banned ids cannot be chosen."""
    row = row.copy()
    row[list(banned)] = -np.inf
    return row

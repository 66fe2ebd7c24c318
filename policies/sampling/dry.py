"""DRY ("don't repeat yourself"): a penalty on the token that would go on with a repetition.

By p-e-w (oobabooga/text-generation-webui pull request 5637), as llama.cpp has it (src/llama-sampler.cpp,
`llama_sampler_dry_apply`; ported from koboldcpp pull request 982). Where the text ends as it went on before some
earlier token, for n tokens, that token's logit loses multiplier * base ** (n - allowed_length) if n reaches
`allowed_length`. The longest such n counts. A repetition never reaches over a breaker, and a breaker is not penalised.

All of it is a function of the tokens before a position, as penalties are (policies/sampling/penalties).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from policies.sampling.params import Dry, Row

# llama.cpp's: the logarithm of the largest float32, which a penalty stays below.
_MOST_LOG = 88.7228391
# llama.cpp's: at a smaller base the length of a repetition counts for nothing.
_LEAST_BASE = 1.000001
# Below the largest float32: a penalty without bound would look like a ban. Bounded by that alone.
_MOST_PENALTY = 1e30


@dataclass(frozen=True)
class DryPenalty:
    """One request's penalty, made ready once."""

    dry: Dry

    @cached_property
    def _tails(self) -> dict[int, list[tuple[int, ...]]]:
        """What has to follow a token that breaks, by that token."""
        tails: dict[int, list[tuple[int, ...]]] = {}
        for tokens, tail in self.dry.breakers:
            for token in tokens:
                tails.setdefault(token, []).append(tail)
        return tails

    @cached_property
    def _most_exponent(self) -> int:
        return int(_MOST_LOG / math.log(self.dry.base)) if self.dry.base > _LEAST_BASE else 0

    @cached_property
    def _longest_tail(self) -> int:
        return max((len(tail) for _, tail in self.dry.breakers), default=0)

    def apply_dry(self, row: Row, text: Sequence[int]) -> None:
        """Change a row (float32, shape (vocabulary,)) in place; `text`: prompt and output before it."""
        for token, length in self.find_repeats(text).items():
            exponent = length - self.dry.allowed_length
            penalty = self.dry.multiplier * self.dry.base ** min(exponent, self._most_exponent)
            row[token] -= np.float32(min(penalty, _MOST_PENALTY))

    def find_repeats(self, text: Sequence[int]) -> dict[int, int]:
        """Return the tokens that would go on with a repetition of `allowed_length` or more, and how long that is. One
        is followed no further than its length counts."""
        dry = self.dry
        window = text if dry.last_tokens < 0 else text[max(0, len(text) - dry.last_tokens) :]
        most = min(dry.allowed_length + self._most_exponent, len(window) - 1)
        most = min(most, self._count_behind_breaker(window, most))
        if most < dry.allowed_length:
            return {}
        tokens = np.fromiter(window, np.int64, len(window))
        lengths = _measure_repeats(tokens, most)
        ends = np.flatnonzero(lengths >= dry.allowed_length)
        repeats: dict[int, int] = {}
        for token, length in zip(tokens[ends + 1].tolist(), lengths[ends].tolist(), strict=True):
            if () not in self._tails.get(token, ()):
                repeats[token] = max(length, repeats.get(token, 0))
        return repeats

    def _count_behind_breaker(self, window: Sequence[int], most: int) -> int:
        """Return how many tokens stand behind the last breaker; `most` or more where there are as many."""
        size = len(window)
        for back in range(min(size, most + self._longest_tail + 1)):
            at = size - 1 - back
            tails = self._tails.get(window[at], ())
            whole = [len(tail) for tail in tails if tuple(window[at + 1 : at + 1 + len(tail)]) == tail]
            if whole:
                return back - max(whole)
        return size


def _measure_repeats(tokens: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return for each position but the last how many tokens up to it, `most` at most, are those up to the last."""
    last = len(tokens) - 1
    lengths = np.zeros(last, np.int64)
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    for length in range(1, most + 1):
        lengths[ends] = length
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[last - length]]
        if not len(ends):
            break
    return lengths

"""Counter-based Gumbel noise: a pure function of (seed, position, token), with no state to lose or to share.

Gumbel-max: argmax(log p + g) with g i.i.d. standard Gumbel is a sample from p (Gumbel 1954; Maddison et al., "A*
Sampling", 2014, section 2). The noise of a position does not depend on who asks. So a draft that looks at the same
position meets the same noise, and a replay after a failure draws the same token.

The generator is a keyed integer hash (two rounds of the multiply-xorshift finaliser "lowbias32", C. Wellons)
over the token id, keyed by a 64-bit mix ("splitmix64", Steele et al. 2014) of seed and position. Two 32-bit
hashes make the 52 bits of one uniform; the high one alone is enough to tell which tokens can matter.

A rule that needs several random numbers at a position takes each from a purpose of its own; they are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_MASK64 = (1 << 64) - 1  # of 64-bit arithmetic
# Of splitmix64 (Steele, Lea, Flood 2014): to change it is to change every seeded answer.
_GOLDEN = 0x9E3779B97F4A7C15
# An odd number without pattern, as the next one: to change it is to change every seeded answer.
_LOW_SALT = 0xD1B54A32D192ED03

_PURPOSE_SALT = 0xA0761D6478BD642F  # another such number

# Tokens hashed at a time: a longer array costs more for its memory than for what is computed. No choice depends on it.
_PIECE = 16384

Keys = tuple[np.uint32 | NDArray[np.uint32], np.uint32 | NDArray[np.uint32]]

# Of lowbias32's mixing: to change one is to change every seeded answer.
_TOKEN_MULTIPLIER, _FIRST, _SECOND = np.uint32(0x9E3779B9), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_15, _16 = np.uint32(15), np.uint32(16)


class Purpose(IntEnum):
    """What a single random number of a position is for. 0 is the noise of the target's own choice."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    EXCLUDE = 4


def _mix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@lru_cache(maxsize=4096)
def _mix_seed(seed: int, salt: int) -> int:
    return _mix64((seed ^ salt) & _MASK64)


def _mix_position(seed: int, position: int, salt: int) -> int:
    """Return the two keys of a position, the first one in the high bits."""
    return _mix64(_mix_seed(seed, salt) ^ ((position * _GOLDEN) & _MASK64))


def _hash32(tokens: NDArray[np.uint32], keys: Keys) -> NDArray[np.uint32]:
    x = (tokens * _TOKEN_MULTIPLIER) ^ keys[0]
    x ^= x >> _16
    x *= _FIRST
    x ^= x >> _15
    x += keys[1]
    x *= _SECOND
    x ^= x >> _16
    x *= _FIRST
    x ^= x >> _15
    return x


def high_bits(seed: int, position: int, tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the 32 high bits of each token's uniform: uniform is in [h, h + 1) / 2**32."""
    mixed = _mix_position(seed, position, 0)
    return _hash32(tokens, (np.uint32(mixed >> 32), np.uint32(mixed & 0xFFFFFFFF)))


def loudest(seed: int, position: int, least: int, vocabulary: int) -> NDArray[np.uint32]:
    """Return the tokens below `vocabulary` whose high bits are at least `least`, ascending."""
    kept = []
    for start in range(0, vocabulary, _PIECE):
        tokens = np.arange(start, min(start + _PIECE, vocabulary), dtype=np.uint32)
        kept.append(tokens[high_bits(seed, position, tokens) >= np.uint32(least)])
    return np.concatenate(kept)


def uniform(seed: int, position: int, tokens: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return uniforms in the open interval (0, 1), midpoints of a grid of 2**-52, of tokens of shape (n,)."""
    return _uniform([(seed, position)], [len(tokens)], tokens)


def _uniform(
    places: Sequence[tuple[int, int]], counts: Sequence[int], tokens: NDArray[np.uint32]
) -> NDArray[np.float64]:
    """Return the uniforms of tokens, the first `counts[0]` of which are asked for at `places[0]`, and so on."""
    mixed = np.array([[_mix_position(*place, salt) for place in places] for salt in (0, _LOW_SALT)], np.uint64)
    mixed = mixed.repeat(counts, axis=1)
    keys = (mixed >> np.uint64(32)).astype(np.uint32), mixed.astype(np.uint32)
    high, low = _hash32(tokens, keys).astype(np.uint64)
    grid = (high << np.uint64(20)) | (low >> np.uint64(12))
    return np.asarray((grid.astype(np.float64) + 0.5) * 2.0**-52, dtype=np.float64)


def gumbel(seed: int, position: int, tokens: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return standard Gumbel noise, -log(-log(u)), of each token at a position, shape of `tokens`."""
    return np.asarray(-np.log(-np.log(uniform(seed, position, tokens))), dtype=np.float64)


def gumbels(places: Sequence[tuple[int, int]], tokens: Sequence[NDArray[np.uint32]]) -> list[NDArray[np.float64]]:
    """Return what `gumbel` does for each place, a seed and a position, and its tokens: computed together."""
    if not places:
        return []
    counts = [len(own) for own in tokens]
    noises = -np.log(-np.log(_uniform(places, counts, np.concatenate(tokens))))
    ends = list(accumulate(counts))
    return [noises[end - count : end] for count, end in zip(counts, ends, strict=True)]


def single(seed: int, position: int, purpose: Purpose) -> float:
    """Return one uniform in the open interval (0, 1) for a purpose at a position; independent of all others."""
    salted = (seed ^ (purpose * _PURPOSE_SALT)) & _MASK64
    return float(uniform(salted, position, np.zeros(1, np.uint32))[0])


Uniform = Callable[[int, int, Purpose], float]
"""(seed, position, purpose) to a number in the open interval (0, 1); `single` is one."""


def draw_index(weights: NDArray[np.float64], at: float) -> int:
    """Return the index that the uniform `at` picks from weights (shape (n,), >= 0, some above 0) by inversion."""
    steps = np.cumsum(weights)
    index = int(np.searchsorted(steps, at * steps[-1], side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])

"""The keys by which prompts that are alike find each other: a few blocks of neighbouring tokens, chosen by their hash.

Of all blocks of a prompt's end those with the smallest hashes are its sketch (MinHash, Broder 1997). Two prompts share
about that part of their sketches that they share of their blocks. What is stored is a keyed hash of each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# ADR 0072: to change it is to forget all that was kept. Not tuned.
BLOCK_TOKENS = 6
# ADR 0072, as above: two of eight make an answer alike.
SKETCH_BLOCKS = 8
# ADR 0072: of a prompt's end. Bounds time.
_LOOKED_AT_TOKENS = 4096
_KEY_BYTES = 12
# Of so many blocks one must be shared. ADR 0072.
_LIKENESS = 4
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64
_STEP = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64, as in policies.sampling.noise


def sketch_prompt(tokens: Sequence[int], scope: bytes) -> list[str]:
    """Return the keys of a prompt, at most SKETCH_BLOCKS; () of an empty one. Nothing is found across `scope`s, which
    have 1 to 64 bytes."""
    if not tokens:
        return []
    end = np.array(tokens[-_LOOKED_AT_TOKENS:], np.uint64)
    width = min(BLOCK_TOKENS, len(end))
    hashes = np.unique(_hash_blocks(end, width))[:SKETCH_BLOCKS]
    return [
        blake2b(value.tobytes() + bytes([width]), digest_size=_KEY_BYTES, key=scope).hexdigest() for value in hashes
    ]


def count_least_shared(blocks: Sequence[str]) -> int:
    """Return how many blocks of a sketch another prompt has to share to be like it."""
    return max(1, len(blocks) // _LIKENESS)


def _hash_blocks(tokens: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each run of `width` tokens; sums wrap around on purpose."""
    count = len(tokens) - width + 1
    hashes = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for place in range(width):
            hashes = (hashes + tokens[place : place + count] + np.uint64(1)) * _STEP
            hashes ^= hashes >> np.uint64(29)
        for factor, shift in zip(_MIX, (30, 27), strict=True):
            hashes = (hashes ^ (hashes >> np.uint64(shift))) * factor
    return hashes ^ (hashes >> np.uint64(31))

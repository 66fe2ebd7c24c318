"""Tokens as bytes: four for each, the lowest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BYTES_PER_TOKEN = 4  # of the format above
_PACKED = np.dtype("<u4")


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes. Raises OverflowError for one that is below 0 or has more than 32 bits."""
    return np.array(tokens, _PACKED).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the tokens that these bytes are; a torn one at the end is left out."""
    whole = len(packed) - len(packed) % BYTES_PER_TOKEN
    tokens: list[int] = np.frombuffer(packed[:whole], _PACKED).tolist()
    return tokens

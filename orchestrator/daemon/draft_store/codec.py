"""An answer as a value of the draft store: a mark, a checksum, and the tokens packed and compressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from orchestrator.protocol.packed_tokens import BYTES_PER_TOKEN, pack_tokens

MAX_ENTRY_TOKENS = 1024
"""Tokens of an answer that are kept: its first ones. ADR 0072. Not tuned."""
_MARK = b"OD1"
_CHECKSUM_BYTES = 4  # of a CRC-32
_HEADER_BYTES = len(_MARK) + _CHECKSUM_BYTES
_MOST_BYTES = MAX_ENTRY_TOKENS * BYTES_PER_TOKEN


class DamagedValue(ValueError):
    """A value that is no answer."""


def encode_answer(tokens: Sequence[int]) -> bytes:
    """Return the value of an answer. Raises OverflowError for what is no token."""
    packed = zlib.compress(pack_tokens(tokens[:MAX_ENTRY_TOKENS]), level=1)
    return _MARK + zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES, "big") + packed


def decode_answer(value: bytes) -> bytes:
    """Return the packed tokens (protocol.packed_tokens) of a value, never more than MAX_ENTRY_TOKENS. Raises
    DamagedValue."""
    packed = value[_HEADER_BYTES:]
    checksum = zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES, "big")
    if value[:_HEADER_BYTES] != _MARK + checksum:
        raise DamagedValue("its mark or its checksum is wrong")
    try:
        tokens = zlib.decompressobj().decompress(packed, _MOST_BYTES)
    except zlib.error as error:
        raise DamagedValue("it cannot be decompressed") from error
    if not tokens or len(tokens) % BYTES_PER_TOKEN:
        raise DamagedValue("it has a torn token")
    return tokens

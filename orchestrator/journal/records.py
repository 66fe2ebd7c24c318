"""What the journal's files hold: records, each with its length and its checksum in front.

A daemon may be killed in the middle of a write, and a disk may be full. So a file counts up to its first torn record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from orchestrator.workers.messages import RequestStats, Submit, TokenScore
from policies.serving.overrides import EffectiveBound

MAGIC = b"OUTRJNL1"
CUT = "cut"
"""The finish of a choice whose text had come to a stop string: no more of its tokens are wanted."""

_HEADER = struct.Struct(">II")  # length, CRC-32 of the rest
_MAX_BYTES = 256 * 1024 * 1024


class CommittedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one round committed to choice `choice` of request `number`. `finish`: "" while it runs; the rest
    stands where it is known, or was asked for (see workers.messages.Delta). `bounds`: of several rounds, how many
    tokens the choice had behind each."""

    number: int
    choice: int
    tokens: list[int]
    finish: str = ""
    stats: RequestStats | None = None
    logprobs: list[TokenScore] | None = None
    prompt_logprobs: list[TokenScore] | None = None
    speculation: EffectiveBound | None = None
    bounds: list[int] = []
    bare: bool = False
    """The finish came behind the last token, by itself."""


class Opened(msgspec.Struct, frozen=True, tag="open"):
    """A request was taken in. `number` names it in this journal; what was known of that number does not count any more.

    `key` is the client's Idempotency-Key ("": none). `owner` and `body` are digests: of who asked, and of the request.
    `submits` has one for each choice, `parts` what was committed to them so far. `created_s`: seconds since 1970.
    `model`: whose tokens they are ("": of the only one, as earlier versions wrote it).
    """

    number: int
    request_id: str
    key: str
    owner: str
    body: str
    created_s: int
    submits: list[Submit]
    parts: list[CommittedTokens] = []
    model: str = ""


class Committed(msgspec.Struct, frozen=True, tag="commit"):
    """All that one round committed."""

    parts: list[CommittedTokens]


Record = Opened | Committed

_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Return a record as it stands in a file."""
    body = _encoder.encode(record)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def encode_records(records: Sequence[Record]) -> bytes:
    """Return records as they stand in a file, one behind the other."""
    return b"".join(map(encode_record, records))


def decode_records(data: bytes) -> Iterator[Record]:
    """Yield the records of a file up to the first that is torn; none of a file that is no journal."""
    if not data.startswith(MAGIC):
        return
    view, at = memoryview(data), len(MAGIC)
    while at + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, at)
        body = view[at + _HEADER.size : at + _HEADER.size + length]
        if length > _MAX_BYTES or len(body) < length or zlib.crc32(body) != checksum:
            return
        try:
            yield _decoder.decode(body)
        except msgspec.MsgspecError:  # of another version of this program
            return
        at += _HEADER.size + length

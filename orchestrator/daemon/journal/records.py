"""What the journal's files hold: records, each with its length and its checksum in front.

A daemon may be killed in the middle of a write, and a disk may be full. So a file counts up to its first torn record.
A file is used again: its head has a number that enters every checksum, so that nothing of its last use counts.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RequestStats
from policies.sampling.logprobs import TokenScore
from policies.serving.overrides import EffectiveBound

MAGIC = b"OUTRJNL2"
CUT = "cut"
"""The finish of a choice whose text had come to a stop string: no more of its tokens are wanted."""

_HEAD = struct.Struct(">8sQIQI")  # magic, number of the segment, salt, bytes of what it began with, CRC-32 of these
_HEADER = struct.Struct(">II")  # length, CRC-32 of the rest, which begins with the salt
_MAX_BYTES = 256 * 1024 * 1024  # a longer record is damage
HEAD_BYTES, HEADER_BYTES = _HEAD.size, _HEADER.size


class CommittedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one round committed to choice `choice` of request `number`. `finish`: "" while it runs; the rest
    stands where it is known, or was asked for (see protocol.rounds.Delta). `bounds`: of several rounds, how many
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
    groups: list[tuple[int, str]] = []
    """From which token of the choice on its bits are of which group."""


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


class Head(NamedTuple):
    """How a segment begins. `number` grows with each; `snapshot_bytes`: what it began with, records and all."""

    number: int
    salt: int
    snapshot_bytes: int

    def encode(self) -> bytes:
        """Return it as it stands in the file."""
        head = _HEAD.pack(MAGIC, *self, 0)[:-4]
        return head + struct.pack(">I", zlib.crc32(head))


def draw_salt() -> int:
    """Return what enters the checksums of a new segment; never 0, so that zeros are no record."""
    return secrets.randbelow(2**32 - 1) + 1


def read_head(data: bytes) -> Head | None:
    """Return how a segment begins; None where it is none, or torn already there."""
    if len(data) < HEAD_BYTES:
        return None
    magic, number, salt, snapshot_bytes, checksum = _HEAD.unpack_from(data)
    if magic != MAGIC or zlib.crc32(data[: HEAD_BYTES - 4]) != checksum:
        return None
    return Head(number, salt, snapshot_bytes)


def encode_body(record: Record) -> bytes:
    """Return what stands behind a record's header."""
    return _encoder.encode(record)


def frame_bodies(bodies: Sequence[bytes], salt: int) -> bytes:
    """Return bodies with their headers, one behind the other."""
    return b"".join(_HEADER.pack(len(body), zlib.crc32(body, salt)) + body for body in bodies)


def encode_records(records: Sequence[Record], salt: int) -> bytes:
    """Return records as they stand in a segment, one behind the other."""
    if len(records) == 1:  # a round's
        body = _encoder.encode(records[0])
        return _HEADER.pack(len(body), zlib.crc32(body, salt)) + body
    return frame_bodies(list(map(_encoder.encode, records)), salt)


def decode_segment(data: bytes) -> list[Record] | None:
    """Return the records of a segment up to the first that is torn; None where what it began with is not whole."""
    head = read_head(data)
    if head is None:
        return None
    decoded = list(_decode_records(data, head.salt))
    end = decoded[-1][1] if decoded else HEAD_BYTES
    return [record for record, _ in decoded] if end >= HEAD_BYTES + head.snapshot_bytes else None


def _decode_records(data: bytes, salt: int) -> Iterator[tuple[Record, int]]:
    """Yield records, each with where it ends."""
    view, at = memoryview(data), HEAD_BYTES
    while at + HEADER_BYTES <= len(data):
        length, checksum = _HEADER.unpack_from(data, at)
        body = view[at + HEADER_BYTES : at + HEADER_BYTES + length]
        if length > _MAX_BYTES or len(body) < length or zlib.crc32(body, salt) != checksum:
            return
        try:
            record = _decoder.decode(body)
        except msgspec.MsgspecError:  # of another version of this program
            return
        at += HEADER_BYTES + length
        yield record, at

"""Pages of a KV cache on a connection between two workers: what is said first, and then one piece after the other.

The side that connects says which transfer it is (`Opening`), and is let in or told why not. Each piece has a number, a
checksum and its place among the pages. The last piece says which tokens the pages belong to. Pieces are read into the
place where they stay. A side that hears nothing of the other for STILL_S takes the link for cut.
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from adapters.framing import ProtocolError, add_header, receive_exactly, receive_frame

# ADR 0080: after 2 s without a byte the stream is computed again.
STILL_S: Final = 2.0
_PIECE: Final = struct.Struct(">IIIQI16s")
_MOST_WORDS: Final = 64 * 1024  # a longer opening is a broken stream


class LinkBroken(Exception):
    """The link is cut, or what came over it makes no sense; the message says which."""


class Opening(msgspec.Struct, frozen=True):
    transfer: str
    """Its name."""
    format: str
    """What its pages are, as ReadyKv.format."""
    most_bytes: int


@dataclass(frozen=True, slots=True)
class PieceHead:
    number: int
    """Of pieces, from 0."""
    start_page: int
    positions: int
    """Of the whole sequence, in the last piece; 0 before."""
    length_bytes: int
    crc: int
    tokens_digest: bytes = bytes(16)
    """Of these positions' tokens: 16 bytes."""


def send_opening(link: socket.socket, opening: Opening) -> str:
    """Say what is going to come; returns why it is refused ("": it is not). Raises OSError, ProtocolError."""
    link.settimeout(STILL_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(add_header(msgspec.msgpack.encode(opening)))
    return receive_frame(link, _MOST_WORDS).decode("utf-8", "replace")


def receive_opening(link: socket.socket) -> Opening:
    """Return what the other side says first; `answer_opening` is to follow. Raises OSError, LinkBroken."""
    link.settimeout(STILL_S)
    try:
        return msgspec.msgpack.decode(receive_frame(link, _MOST_WORDS), type=Opening)
    except (ProtocolError, msgspec.DecodeError) as error:
        raise LinkBroken(f"the sender's first word makes no sense: {error}") from error


def answer_opening(link: socket.socket, refusal: str) -> None:
    """Let the sender go on, or say why not. Raises OSError."""
    link.sendall(add_header(refusal.encode()))


def send_piece(link: socket.socket, head: PieceHead, parts: Sequence[memoryview]) -> None:
    """Send a piece. Waits STILL_S at most while the other side takes nothing. Raises OSError."""
    link.sendall(
        _PIECE.pack(head.number, head.start_page, head.positions, head.length_bytes, head.crc, head.tokens_digest)
    )
    for part in parts:
        link.sendall(part)


def receive_head(link: socket.socket) -> PieceHead:
    """Return what goes ahead of the next piece; waits for it as long as it takes, while the sender says now and then
    that it lives. Raises OSError."""
    return PieceHead(*_PIECE.unpack(receive_exactly(link, _PIECE.size)))


def sum_parts(parts: Sequence[memoryview]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc

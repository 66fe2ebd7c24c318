"""Frames on a stream between two of our processes: a length in 4 bytes, big endian, then so many bytes.

Each link says how long a frame of it may be. One that is longer can only be of a broken stream, or of another program.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from device_profiles.units import MIB

if TYPE_CHECKING:
    import asyncio

# A longer one is a broken stream: a prompt of a million tokens has 5 MB.
MAX_FRAME_BYTES: Final = 256 * MIB
ANY_BYTES: Final = 2**32 - 1
"""As many as a header can announce, where both ends are this very program."""
_HEADER_BYTES: Final = 4  # of the format above
_PIECE_BYTES: Final = MIB


class ProtocolError(ValueError):
    """The other side sent what makes no sense; the message says what."""


class StreamEnded(ConnectionResetError):
    """The other side has closed the connection, between two frames or within one."""

    def __init__(self) -> None:
        super().__init__("the connection was closed")


def add_header(frame: bytes) -> bytes:
    """Return a frame as it travels. Raises ProtocolError where it is longer than any frame may be."""
    if len(frame) > ANY_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes cannot be announced")
    return len(frame).to_bytes(_HEADER_BYTES, "big") + frame


def read_length(header: bytes | bytearray, most_bytes: int = MAX_FRAME_BYTES) -> int:
    """Return the length that a header announces, in bytes. Raises ProtocolError where it is more than `most_bytes`."""
    length = int.from_bytes(header[:_HEADER_BYTES], "big")
    if length > most_bytes:
        raise ProtocolError(f"a frame of {length} bytes was announced, where none has more than {most_bytes}")
    return length


async def read_frame(reader: asyncio.StreamReader, most_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the next frame. Raises ProtocolError; StreamEnded and other OSErrors where there is none."""
    try:
        header = await reader.readexactly(_HEADER_BYTES)
        return await reader.readexactly(read_length(header, most_bytes))
    except EOFError as error:
        raise StreamEnded from error


def receive_frame(link: socket.socket, most_bytes: int = MAX_FRAME_BYTES) -> bytearray:
    """Wait for the next frame. Raises ProtocolError; StreamEnded and other OSErrors where there is none."""
    return receive_exactly(link, read_length(receive_exactly(link, _HEADER_BYTES), most_bytes))


def receive_frames(link: socket.socket) -> Iterator[bytearray]:
    """Yield frames until the other side is gone. Raises ProtocolError."""
    while True:
        try:
            frame = receive_frame(link)
        except OSError:
            return
        yield frame


def take_frame(received: bytearray, most_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
    """Remove the first frame from what has come so far, and return it; None where not all of it is there. Raises
    ProtocolError."""
    if len(received) < _HEADER_BYTES:
        return None
    end = _HEADER_BYTES + read_length(received, most_bytes)
    if len(received) < end:
        return None
    frame = bytes(received[_HEADER_BYTES:end])
    del received[:end]
    return frame


def receive_exactly(link: socket.socket, count: int) -> bytearray:
    """Wait for so many bytes; only what has come takes memory, whatever was announced. Raises StreamEnded and other
    OSErrors."""
    data = bytearray()
    while missing := count - len(data):
        piece = link.recv(min(missing, _PIECE_BYTES))
        if not piece:
            raise StreamEnded
        data += piece
    return data


def receive_into(link: socket.socket, place: memoryview) -> None:
    """Fill a place with the next bytes. Raises StreamEnded and other OSErrors."""
    while place:
        count = link.recv_into(place)
        if not count:
            raise StreamEnded
        place = place[count:]

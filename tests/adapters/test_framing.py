"""Frames arrive whole and in order however the stream is cut, and what is no frame is said clearly."""

import asyncio
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.framing import (
    MAX_FRAME_BYTES,
    ProtocolError,
    StreamEnded,
    add_header,
    read_frame,
    read_length,
    receive_exactly,
    receive_frame,
    receive_frames,
    receive_into,
    take_frame,
)

FRAMES = st.lists(st.binary(max_size=300), max_size=8)
CUTS = st.lists(st.integers(1, 97), min_size=1, max_size=20)


def cut_stream(stream: bytes, cuts: list[int]) -> Iterator[bytes]:
    """Yield the stream in pieces of these lengths, over and over."""
    at, number = 0, 0
    while at < len(stream):
        length = cuts[number % len(cuts)]
        yield stream[at : at + length]
        at, number = at + length, number + 1


@contextmanager
def sending(stream: bytes, cuts: list[int]) -> Iterator[socket.socket]:
    """The receiving end of a socket pair into which a thread sends the pieces, and then closes."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, suppress(OSError):  # the other end may have seen enough
            for piece in cut_stream(stream, cuts):
                theirs.sendall(piece)

    thread = threading.Thread(target=send)
    thread.start()
    with ours:
        yield ours
    thread.join(30)


async def read_all(stream: bytes, cuts: list[int]) -> list[bytes]:
    reader = asyncio.StreamReader()
    for piece in cut_stream(stream, cuts):
        reader.feed_data(piece)
    reader.feed_eof()
    frames = []
    while True:
        try:
            frames.append(await read_frame(reader))
        except StreamEnded:
            return frames


def take_all(stream: bytes, cuts: list[int]) -> list[bytes]:
    received, frames = bytearray(), []
    for piece in cut_stream(stream, cuts):
        received += piece
        while (frame := take_frame(received)) is not None:
            frames.append(frame)
    return frames


@given(FRAMES, CUTS, st.integers(0, 3))
def test_every_way_to_receive_returns_the_whole_frames_in_order(frames, cuts, lost):
    """`lost`: so many bytes at the end do not come, so the last frame is none."""
    stream = b"".join(map(add_header, frames))
    stream = stream[: len(stream) - lost]
    whole = frames if not lost or not frames else frames[:-1]
    with sending(stream, cuts) as link:
        assert list(receive_frames(link)) == whole
    assert take_all(stream, cuts) == whole
    assert asyncio.run(read_all(stream, cuts)) == whole


@given(st.binary(max_size=300), CUTS, st.integers(1, 300))
def test_a_place_is_filled_with_just_its_bytes(data, cuts, more):
    with sending(data + bytes(more), cuts) as link:
        place = bytearray(len(data))
        receive_into(link, memoryview(place))
        assert bytes(place) == data
        assert receive_exactly(link, more) == bytes(more)
        with pytest.raises(StreamEnded, match="the connection was closed"):
            receive_exactly(link, 1)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_header_that_announces_more_than_may_come_is_refused(length, most):
    header = length.to_bytes(4, "big")
    if length <= most:
        assert read_length(header, most) == length
        return
    with pytest.raises(
        ProtocolError, match=f"a frame of {length} bytes was announced, where none has more than {most}"
    ):
        read_length(header, most)


def receive(stream: bytes) -> None:
    with sending(stream, [7]) as link:
        receive_frame(link)


@pytest.mark.parametrize(
    "receiving",
    [receive, lambda stream: take_frame(bytearray(stream)), lambda stream: asyncio.run(read_all(stream, [7]))],
    ids=["socket", "buffer", "asyncio"],
)
def test_a_broken_stream_is_told_by_each_way_to_receive(receiving: Callable[[bytes], object]):
    with pytest.raises(ProtocolError, match=f"none has more than {MAX_FRAME_BYTES}"):
        receiving(b"HTTP/1.1 400 Bad Request\r\n")


def test_what_is_announced_takes_no_memory_before_it_comes():
    tracemalloc.start()
    try:
        with sending((200 << 20).to_bytes(4, "big"), [4]) as link, pytest.raises(StreamEnded):
            receive_frame(link)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()

"""Bodies that come packed, as `Content-Encoding` says: unpacked piece by piece, so that a small body that grows without
end is seen as soon as it is too large."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from backports import zstd

from orchestrator.errors import RequestError

_PIECE_BYTES: Final = 64 * 1024
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
_WINDOW_BITS: Final = 23
"""RFC 9659: HTTP's zstd needs no window above 8 MiB. The memory of one body is bounded by it."""
_TAKEN: Final = "gzip, zstd"


class Unpacker:
    """Takes a body as it comes; this one is not packed."""

    def unpack(self, data: bytes) -> Iterator[bytes]:
        """Yield what these bytes become, at most 64 KiB of what is packed at a time. Raises RequestError."""
        yield data

    def finish(self) -> None:
        """The body has ended. Raises RequestError where it has not come to its own end."""


class _Packed(Unpacker):
    """One or several frames, one behind the other. Both formats allow that."""

    name = ""
    broken: type[Exception] = ValueError

    def __init__(self) -> None:
        self._begun = False
        self._frame = self._open()

    def _open(self) -> Any:
        raise NotImplementedError

    def _step(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """Unpack some; (what came of it, what is left to unpack, whether to go on)."""
        raise NotImplementedError

    def unpack(self, data: bytes) -> Iterator[bytes]:
        goes_on = bool(data)
        self._begun = self._begun or goes_on
        while goes_on:
            if self._frame.eof:
                self._frame = self._open()
            try:
                piece, data, goes_on = self._step(data)
            except self.broken as error:
                raise self._refuse(str(error)) from None
            if piece:
                yield piece

    def finish(self) -> None:
        if self._begun and not self._frame.eof:
            raise self._refuse("it ends too early")

    def _refuse(self, why: str) -> RequestError:
        return RequestError(f"the body is declared as {self.name}, and is none: {why}", code="invalid_encoding")


class _Gzip(_Packed):
    name = "gzip"
    broken = zlib.error

    def _open(self) -> Any:
        return zlib.decompressobj(_GZIP_BITS)

    def _step(self, data: bytes) -> tuple[bytes, bytes, bool]:
        piece = self._frame.decompress(data, _PIECE_BYTES)
        left = self._frame.unused_data if self._frame.eof else self._frame.unconsumed_tail
        return piece, left, bool(left)


class _Zstd(_Packed):
    name = "zstd"
    broken = zstd.ZstdError

    def _open(self) -> Any:
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_BITS})

    def _step(self, data: bytes) -> tuple[bytes, bytes, bool]:
        piece = self._frame.decompress(data, _PIECE_BYTES)  # keeps what it has not unpacked yet
        left = self._frame.unused_data if self._frame.eof else b""
        return piece, left, bool(left) or not (self._frame.eof or self._frame.needs_input)


_UNPACKERS: Final[dict[str, type[_Packed]]] = {"gzip": _Gzip, "x-gzip": _Gzip, "zstd": _Zstd}


def build_unpacker(encoding: str) -> Unpacker:
    """Return what unpacks a body of this `Content-Encoding`. Raises RequestError 415 for one that is not taken, and for
    several, one in the other."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return Unpacker()
    if name not in _UNPACKERS:
        raise RequestError(
            f"the body is packed as {name[:60]!r}: send it as it is, or by one of {_TAKEN}",
            status=415,
            code="unsupported_media_type",
            headers={"Accept-Encoding": _TAKEN},
        )
    return _UNPACKERS[name]()


async def unpack_stream(stream: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield the pieces of a body of this `Content-Encoding` as it comes; others have their turns between two. Raises
    RequestError as `build_unpacker` and Unpacker do."""
    unpacker = build_unpacker(encoding)
    async for chunk in stream:
        for piece in unpacker.unpack(chunk):
            yield piece
            await asyncio.sleep(0)
    unpacker.finish()

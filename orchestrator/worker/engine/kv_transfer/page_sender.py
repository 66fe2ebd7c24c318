"""Sends pages of one sequence to a worker on another host, in a thread of its own: the decode thread never waits."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapters.framing import ProtocolError
from device_profiles.units import MIB
from orchestrator.protocol.commands import PageLink
from orchestrator.protocol.links.endpoint import LinkLost, knock
from orchestrator.protocol.links.pages import Opening, PieceHead, send_opening, send_piece, sum_parts

MOST_UNSENT_BYTES = 16 * MIB
"""Pages that wait for the link: no more are taken out of the cache while there are so many."""
_BEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages from `start_page` on, a part for each cache. `positions` and `tokens_digest`: of the last one."""

    start_page: int
    parts: Sequence[NDArray[np.uint8]]
    positions: int = 0
    tokens_digest: bytes = bytes(16)

    @property
    def length_bytes(self) -> int:
        """Return how long its parts are."""
        return sum(len(part) for part in self.parts)


class PageSender:
    """One transfer. `why`: why it has failed ("": it has not, so far). `ready`: the other side takes pieces."""

    def __init__(self, link: PageLink, kv_format: str, request_id: str) -> None:
        self.transfer = f"{request_id}/{secrets.token_hex(8)}"
        self.why = ""
        self.ready = False
        self._link = link
        self._opening = Opening(self.transfer, kv_format, link.most_bytes)
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._unsent_bytes = 0
        threading.Thread(target=self._run, name="KV pages to another host", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether another piece is welcome."""
        return self.ready and self._unsent_bytes < MOST_UNSENT_BYTES

    @property
    def unsent_bytes(self) -> int:
        """Bytes of pieces that wait, or are on their way."""
        return self._unsent_bytes

    def add(self, piece: Piece) -> None:
        """Send a piece behind those before it."""
        with self._changing:
            self._unsent_bytes += piece.length_bytes
        self._pieces.put(piece)

    def end(self) -> None:
        """Hang up behind what was added. Idempotent."""
        self._pieces.put(None)

    def _run(self) -> None:
        try:
            with knock(self._link.endpoint) as link:
                self.why = send_opening(link, self._opening)
                if self.why:
                    return
                self.ready = True
                number = 0
                while (piece := self._next_piece()) is not None:
                    parts = [np.ascontiguousarray(part).data for part in piece.parts]
                    length_bytes = piece.length_bytes
                    place = (number, piece.start_page, piece.positions, length_bytes, sum_parts(parts))
                    send_piece(link, PieceHead(*place, piece.tokens_digest), parts)
                    number += 1
                    with self._changing:
                        self._unsent_bytes -= length_bytes
        except (OSError, LinkLost, ProtocolError) as error:
            self.why = f"the link to the next worker: {error or type(error).__name__}"
        finally:
            self.ready = False

    def _next_piece(self) -> Piece | None:
        """Return the next piece; an empty one now and then while there is none, which says that this side lives."""
        with suppress(queue.Empty):
            return self._pieces.get(timeout=_BEAT_S)
        return Piece(0, ())

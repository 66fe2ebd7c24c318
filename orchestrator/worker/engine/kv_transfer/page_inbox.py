"""Takes in pages that workers on other hosts send to this one, ahead of the requests that they belong to."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adapters.framing import receive_into
from device_profiles.units import MIB
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import EndpointServer
from orchestrator.protocol.links.pages import (
    STILL_S,
    LinkBroken,
    PieceHead,
    answer_opening,
    receive_head,
    receive_opening,
    sum_parts,
)

# ADR 0080: 1 GiB, as of moves within a host. Not tuned.
MOST_BYTES = 1024 * MIB
MOST_TRANSFERS = 8
"""Half of them may be of requests that went elsewhere, and are dropped soon. ADR 0080."""
# ADR 0080: a `Submit` follows its pages within a round, so this only frees memory.
_KEPT_S = 60.0


@dataclass(eq=False)
class Transfer:
    """Pages as they come: `length_bytes` so far in `data`, from each of `start_pages` on. `positions`: of all of them,
    once `done`. `why`: why there will be none."""

    data: NDArray[np.uint8]
    length_bytes: int = 0
    start_pages: list[int] = field(default_factory=list)
    pieces: int = 0
    positions: int = 0
    tokens_digest: bytes = b""
    done: bool = False
    why: str = ""
    touched_s: float = field(default_factory=time.monotonic)
    over: bool = False
    """Nobody wants it any more."""


class PageInbox:
    """`host`: the address at which other hosts reach this one. Raises OSError."""

    def __init__(self, host: str, kv_format: str) -> None:
        self._server = EndpointServer(host)
        self._format = kv_format
        self._changed = threading.Condition()
        self._transfers: dict[str, Transfer] = {}
        self._greeting = threading.BoundedSemaphore(MOST_TRANSFERS)
        threading.Thread(target=self._admit, name="KV pages from other hosts", daemon=True).start()

    @property
    def endpoint(self) -> LinkEndpoint:
        """Where it is to be found, by other hosts only."""
        own = self._server.endpoint
        return LinkEndpoint(
            [address for address in own.addresses if address.startswith("tcp:")], own.key, own.certificate
        )

    def take(self, name: str) -> Transfer:
        """Return a transfer, once, when all of it is there. Waits while it goes on, but no longer than STILL_S without
        a byte. Raises LinkBroken."""
        waiting_s = time.monotonic()
        with self._changed:
            try:
                while True:
                    transfer = self._transfers.get(name)
                    if transfer is not None and (transfer.done or transfer.why):
                        break
                    still_s = max(waiting_s, transfer.touched_s if transfer is not None else 0.0)
                    left_s = still_s + STILL_S - time.monotonic()
                    if left_s <= 0.0:
                        raise LinkBroken(f"nothing came over the link for {STILL_S:g} s")
                    self._changed.wait(left_s)
            finally:
                self._forget(name)
        if transfer.why:
            raise LinkBroken(transfer.why)
        return transfer

    def close(self) -> None:
        """Take in no more. Idempotent."""
        for listening in self._server.listening:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._changed:
            for name in list(self._transfers):
                self._forget(name)

    def _forget(self, name: str) -> None:
        transfer = self._transfers.pop(name, None)
        if transfer is not None:
            transfer.over = True

    def _admit(self) -> None:
        listening = self._server.listening[-1]
        while True:
            try:
                knocking, _ = listening.accept()
            except OSError:
                return
            if self._greeting.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(knocking,), name="KV pages", daemon=True).start()
            else:
                knocking.close()

    def _serve(self, knocking: socket.socket) -> None:
        transfer: Transfer | None = None
        try:
            link = self._server.greet(knocking)
            if link is None:
                return
            with link:
                transfer = self._open(link)
                while transfer is not None and not transfer.done and not transfer.over:
                    self._receive_piece(link, transfer)
        except (OSError, LinkBroken) as error:
            self._fail(transfer, f"the link from the worker before: {error or type(error).__name__}")
        except MemoryError:
            self._fail(transfer, "no memory for pages")
        finally:
            self._greeting.release()

    def _open(self, link: socket.socket) -> Transfer | None:
        opening = receive_opening(link)
        now_s = time.monotonic()
        with self._changed:
            for name in [name for name, old in self._transfers.items() if old.touched_s + _KEPT_S < now_s]:
                self._forget(name)
            transfer, refusal = None, ""
            if opening.format != self._format:
                refusal = f"the pages are of {opening.format!r}, and here they are of {self._format!r}"
            elif opening.transfer in self._transfers:
                refusal = "there is such a transfer already"
            elif len(self._transfers) >= MOST_TRANSFERS or (
                opening.most_bytes + sum(len(other.data) for other in self._transfers.values()) > MOST_BYTES
            ):
                refusal = "the next worker takes in no more pages at a time"
            else:
                transfer = Transfer(np.empty(opening.most_bytes, np.uint8))
                self._transfers[opening.transfer] = transfer
        answer_opening(link, refusal)
        return transfer

    def _receive_piece(self, link: socket.socket, transfer: Transfer) -> None:
        head = receive_head(link)
        begin, end = transfer.length_bytes, transfer.length_bytes + head.length_bytes
        if head.number != transfer.pieces:
            raise LinkBroken(f"piece {head.number} came, and piece {transfer.pieces} was to come")
        if end > len(transfer.data):
            raise LinkBroken("more pages came than were announced")
        place = transfer.data[begin:end].data
        while place:  # each megabyte shows that the link lives
            part, place = place[:MIB], place[MIB:]
            receive_into(link, part)
            transfer.touched_s = time.monotonic()
        if sum_parts([transfer.data[begin:end].data]) != head.crc:
            raise LinkBroken(f"piece {head.number} does not have the checksum that it was sent with")
        self._add(transfer, head, end)

    def _add(self, transfer: Transfer, head: PieceHead, end: int) -> None:
        with self._changed:
            transfer.pieces += 1
            transfer.length_bytes = end
            transfer.touched_s = time.monotonic()
            if head.length_bytes:
                transfer.start_pages.append(head.start_page)
            if head.positions:
                transfer.positions, transfer.tokens_digest, transfer.done = head.positions, head.tokens_digest, True
            self._changed.notify_all()

    def _fail(self, transfer: Transfer | None, why: str) -> None:
        if transfer is not None:
            with self._changed:
                transfer.why, transfer.data = why, np.empty(0, np.uint8)
                self._changed.notify_all()

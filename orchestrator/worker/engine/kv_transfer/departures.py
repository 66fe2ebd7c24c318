"""Requests that leave for another worker, and take their pages along: at once in shared memory, or over a link.

Over a link pages go ahead, between rounds, while their sequence is decoded. Whole pages behind which nothing changes
any more go first, in order. They take a bounded share of the time of rounds, so that no other sequence waits long. Once
none is left, or the time is over, the sequence stops and the rest goes.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapters.errors import Unsupported
from adapters.framing import ProtocolError
from device_profiles.units import MIB, MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.commands import KvPages, MoveOut, PageLink, SharedMemory
from orchestrator.protocol.events import MovedOut
from orchestrator.protocol.links.endpoint import LinkLost, knock
from orchestrator.protocol.links.pages import Opening, PieceHead, send_opening, send_piece, sum_parts
from orchestrator.protocol.shared_memory import SharedMemoryFailed
from orchestrator.worker.engine.flights import Flights
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.engine.sequence import SequenceState
from policies.running_mean import update_mean

MOST_UNSENT_BYTES = 16 * MIB
"""Pages that wait for the link: no more are taken out of the cache while there are so many."""
# ADR 0080: a quarter of STILL_S, so that a slow sender is no cut link.
_BEAT_S = 0.5
ROUND_SHARE = 0.15
"""Of a round's time, for taking pages out of the cache behind it. ADR 0080: 189 and 80 ms of pause for 2,000 tokens
with it. Not tuned."""
_LEAST_MS = 0.5  # below it a page would not get out of short rounds. Not tuned.
# Until one page was timed: 0.5 GB/s, of which ADR 0051 saw three times as much.
_FIRST_BYTES_PER_MS = 500_000.0
_NEWEST = 0.3  # weight of the newest page. Not tuned.
_LITTLE_BYTES = MOST_UNSENT_BYTES // 4
"""May wait for the link when a sequence stops. ADR 0080: at 1 Gbit/s 34 ms."""
_NOTHING_COMPUTED = "nothing of it was computed"
_NO_MEMORY = SharedMemory("", "none: the pages go over a link", 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages from `start_page` on, a part for each cache. `positions` and `tokens_digest`: of the last one."""

    start_page: int
    parts: Sequence[NDArray[np.uint8]]
    positions: int = 0
    tokens_digest: bytes = bytes(16)

    @property
    def length_bytes(self) -> int:
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
        self.unsent_bytes = 0
        threading.Thread(target=self._run, name="KV pages to another host", daemon=True).start()

    @property
    def has_room(self) -> bool:
        return self.ready and self.unsent_bytes < MOST_UNSENT_BYTES

    def add(self, piece: Piece) -> None:
        with self._changing:
            self.unsent_bytes += piece.length_bytes
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
                        self.unsent_bytes -= length_bytes
        except (OSError, LinkLost, ProtocolError) as error:
            self.why = f"the link to the next worker: {error or type(error).__name__}"
        finally:
            self.ready = False

    def _next_piece(self) -> Piece | None:
        """Return the next piece; an empty one now and then while there is none, which says that this side lives."""
        with suppress(queue.Empty):
            return self._pieces.get(timeout=_BEAT_S)
        return Piece(0, ())


@dataclass(slots=True)
class _Departure:
    """One sequence's. `pages` have gone, out of `slot`."""

    sequence: SequenceState
    sender: PageSender
    link: PageLink
    slot: int
    until_s: float
    pages: int = 0


class Departures:
    """Those of one worker; its decode thread calls it."""

    def __init__(self, loop: DecodeLoop | Flights, mover: KvMover, clock: Clock) -> None:
        self._loop = loop
        self._mover = mover
        self._clock = clock
        self._leaving: dict[str, _Departure] = {}
        self._bytes_per_ms = _FIRST_BYTES_PER_MS

    def move_out(self, command: MoveOut) -> MovedOut | None:
        """Let a request leave. Over a link its pages go ahead, and `advance` does the rest; else, and where there are
        none, it is forgotten at once, and what there is to say of it is returned. Raises what adapters raise when their
        device fails."""
        started_s = self._clock.monotonic_s()
        sequence = self._loop.find_running(command.request_id)
        pages, why = None, _NOTHING_COMPUTED
        if sequence is not None and sequence.cached and not sequence.scores_prompt:
            if command.link is not None and self._mover.moves:
                self._begin(sequence, command.link)
                return None
            if command.link is None:
                try:
                    tokens = sequence.tokens[: sequence.cached]
                    lora = sequence.submit.lora
                    pages, why = self._mover.write(sequence.slot, tokens, command.memory, lora), ""
                except SharedMemoryFailed as error:
                    why = str(error)
        self.cancel(command.request_id)
        return MovedOut(command.request_id, pages, (self._clock.monotonic_s() - started_s) * MS_PER_S, why)

    def cancel(self, request_id: str) -> None:
        """Forget a request, leaving or not. Unknown ids are ignored."""
        self._drop(request_id)
        self._loop.cancel(request_id)

    def advance(self, round_ms: float) -> list[MovedOut]:
        """Send pages behind a round that took so long; returns, once, what is to be said of requests that are forgotten
        now. Raises what adapters raise when their device fails."""
        if not self._leaving:
            return []
        budget_ms = max(_LEAST_MS, ROUND_SHARE * round_ms) / len(self._leaving)
        moved = [self._advance(departure, budget_ms) for departure in list(self._leaving.values())]
        left = [message for message in moved if message is not None]
        for message in left:
            self.cancel(message.request_id)
        return left

    def _begin(self, sequence: SequenceState, link: PageLink) -> None:
        self._drop(sequence.key)
        sender = PageSender(link, self._mover.format, sequence.key)
        until_s = self._clock.monotonic_s() + link.within_s
        self._leaving[sequence.key] = _Departure(sequence, sender, link, sequence.slot, until_s)

    def _drop(self, request_id: str) -> None:
        departure = self._leaving.pop(request_id, None)
        if departure is not None:
            departure.sender.end()

    def _advance(self, departure: _Departure, budget_ms: float) -> MovedOut | None:
        """Return what is to be said of a sequence that is to be forgotten now; None: it leaves yet, or has ended."""
        key = departure.sequence.key
        if departure.sequence.slot != departure.slot:
            if self._loop.holds(key):
                return MovedOut(key, None, 0.0, "it lost its place while its pages went")
            self._drop(key)
        elif departure.sender.why:
            return MovedOut(key, None, 0.0, departure.sender.why)
        elif self._send_ahead(departure, budget_ms):
            return self._finish(departure)
        return None

    def _send_ahead(self, departure: _Departure, budget_ms: float) -> bool:
        """Send whole pages, as many as the time allows; returns whether the sequence is to stop now."""
        mover, sequence, sender = self._mover, departure.sequence, departure.sender
        over = self._clock.monotonic_s() >= departure.until_s
        whole = sequence.cached // mover.page_tokens
        least = 1 + int(budget_ms * self._bytes_per_ms / mover.page_bytes)
        end = min(whole, departure.pages + least)
        if sender.has_room and end > departure.pages and not over:
            started_s = self._clock.monotonic_s()
            parts = mover.export(sequence.slot, end * mover.page_tokens, departure.pages)
            sender.add(Piece(departure.pages, parts))
            self._observe(sum(map(len, parts)), (self._clock.monotonic_s() - started_s) * MS_PER_S)
            departure.pages = end
        return over or (sender.ready and departure.pages >= whole and sender.unsent_bytes <= _LITTLE_BYTES)

    def _finish(self, departure: _Departure) -> MovedOut:
        started_s = self._clock.monotonic_s()
        mover, sequence, sender = self._mover, departure.sequence, departure.sender
        tokens, sent = sequence.tokens[: sequence.cached], departure.pages
        length_bytes = mover.count_bytes(len(tokens))
        pages, why, took_ms = None, "", 0.0
        try:
            if not sender.ready:
                why = "the link to the next worker was not ready in time"
            elif length_bytes > departure.link.most_bytes:
                why = "its pages are more than the next worker was told"
            else:
                unsent = length_bytes > sent * mover.page_bytes
                rest = mover.export(sequence.slot, len(tokens), sent) if unsent else []
                digest = mover.digest_tokens(tokens, sequence.submit.lora)
                sender.add(Piece(sent, rest, len(tokens), digest))
                pages = KvPages(_NO_MEMORY, mover.format, len(tokens), length_bytes, digest.hex(), sender.transfer)
                took_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S
        except Unsupported as error:
            why = str(error)
        return MovedOut(sequence.key, pages, took_ms, why)

    def _observe(self, length_bytes: int, took_ms: float) -> None:
        if took_ms > 0.01:
            self._bytes_per_ms = update_mean(self._bytes_per_ms, length_bytes / took_ms, _NEWEST)

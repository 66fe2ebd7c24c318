"""Sequences that leave for a worker on another host: their pages go ahead, between rounds, while they are decoded.

Whole pages behind which nothing changes any more go first, in order. They take a bounded share of the time of rounds,
so that no other sequence waits long. Once none is left, or the time is over, the sequence stops and the rest goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adapters.contract import Unsupported
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.messages import KvPages, MovedOut, PageLink, SharedMemory
from orchestrator.worker.engine.kv_mover import KvMover
from orchestrator.worker.engine.page_sender import MOST_UNSENT_BYTES, PageSender, Piece
from orchestrator.worker.engine.sequence import SequenceState
from policies.running_mean import update_mean

ROUND_SHARE = 0.15
"""Of a round's time, for taking pages out of the cache behind it."""
_LEAST_MS = 0.5
_FIRST_BYTES_PER_MS = 500_000.0
_NEWEST = 0.3
_LITTLE_BYTES = MOST_UNSENT_BYTES // 4
"""May wait for the link when a sequence stops."""
_NO_MEMORY = SharedMemory("", "none: the pages go over a link", 0)


@dataclass(slots=True)
class _Departure:
    """One sequence's. `pages` have gone, out of `slot`."""

    sender: PageSender
    link: PageLink
    slot: int
    until_s: float
    pages: int = 0


class Departures:
    """Those of one decode loop; its thread calls it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leaving: dict[str, _Departure] = {}
        self._bytes_per_ms = _FIRST_BYTES_PER_MS

    def begin(self, sequence: SequenceState, mover: KvMover, link: PageLink) -> None:
        """Let a sequence that has a slot leave; `advance` does the rest."""
        self.drop(sequence.key)
        sender = PageSender(link, mover.format, sequence.key)
        until_s = self._clock.monotonic_s() + link.within_s
        self._leaving[sequence.key] = _Departure(sender, link, sequence.slot, until_s)

    def drop(self, key: str) -> None:
        """A sequence leaves no more. Unknown keys are ignored."""
        before = self._leaving.pop(key, None)
        if before is not None:
            before.sender.end()

    def advance(self, running: Sequence[SequenceState], mover: KvMover, round_ms: float) -> list[MovedOut]:
        """Send pages behind a round; returns what is to be said of the sequences that are now to be forgotten. Raises
        what adapters raise when their device fails."""
        if not self._leaving:
            return []
        found: Mapping[str, SequenceState] = {one.key: one for one in running if one.key in self._leaving}
        budget_ms = max(_LEAST_MS, ROUND_SHARE * round_ms) / len(self._leaving)
        moved = []
        for key, departure in list(self._leaving.items()):
            sequence = found.get(key)
            if sequence is None or sequence.slot != departure.slot:
                moved.append(self._give_up(key, "it lost its place while its pages went"))
            elif departure.sender.why:
                moved.append(self._give_up(key, departure.sender.why))
            elif self._send_ahead(departure, sequence, mover, budget_ms):
                moved.append(self._finish(departure, sequence, mover))
        return moved

    def _give_up(self, key: str, why: str) -> MovedOut:
        self.drop(key)
        return MovedOut(key, None, 0.0, why)

    def _send_ahead(self, departure: _Departure, sequence: SequenceState, mover: KvMover, budget_ms: float) -> bool:
        """Send whole pages, as many as the time allows; returns whether the sequence is to stop now."""
        sender, over = departure.sender, self._clock.monotonic_s() >= departure.until_s
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

    def _finish(self, departure: _Departure, sequence: SequenceState, mover: KvMover) -> MovedOut:
        """Send the rest of a sequence that stops."""
        started_s = self._clock.monotonic_s()
        sender, tokens = departure.sender, sequence.tokens[: sequence.cached]
        length_bytes = mover.count_bytes(len(tokens))
        if not sender.ready:
            return self._give_up(sequence.key, "the link to the next worker was not ready in time")
        if length_bytes > departure.link.most_bytes:
            return self._give_up(sequence.key, "its pages are more than the next worker was told")
        try:
            rest = (
                mover.export(sequence.slot, len(tokens), departure.pages)
                if length_bytes > departure.pages * mover.page_bytes
                else []
            )
        except Unsupported as error:
            return self._give_up(sequence.key, str(error))
        digest = mover.digest_tokens(tokens)
        sender.add(Piece(departure.pages, rest, len(tokens), digest))
        self.drop(sequence.key)
        pages = KvPages(_NO_MEMORY, mover.format, len(tokens), length_bytes, digest.hex(), sender.transfer)
        return MovedOut(sequence.key, pages, (self._clock.monotonic_s() - started_s) * MS_PER_S)

    def _observe(self, length_bytes: int, took_ms: float) -> None:
        if took_ms > 0.01:
            self._bytes_per_ms = update_mean(self._bytes_per_ms, length_bytes / took_ms, _NEWEST)

"""Pages that come with requests are read and checked beside the command thread, while others decode."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from adapters.errors import CapacityError, Unsupported
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.events import MovedIn
from orchestrator.protocol.links.pages import LinkBroken
from orchestrator.protocol.shared_memory import SharedMemoryFailed
from orchestrator.side_lane import SideLane
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.prefix_cache import PrefixCache
from orchestrator.worker.engine.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class TakenPages:
    """Pages of a sequence's first `positions`, checked, in memory of this process: implements
    engine.prefix_cache.StartPages. It took `took_ms` to get them. `start_pages`: as of
    adapters.loaded_model.MovableKv.import_kv. `tell` hears what came of them."""

    mover: KvMover
    clock: Clock
    tell: Callable[[MovedIn], None]
    positions: int
    data: NDArray[np.uint8]
    took_ms: float
    start_pages: tuple[int, ...] = (0,)

    def load(self, sequence: SequenceState, prefixes: PrefixCache) -> float:
        if sequence.scores_prompt:
            return 0.0
        started_s, why = self.clock.monotonic_s(), ""
        prefixes.attach(sequence)
        if sequence.cached < self.positions:
            try:
                self.mover.load(sequence.slot, self.positions, self.data, self.start_pages)
            except (CapacityError, Unsupported) as error:
                why = str(error)
            else:
                sequence.cached, sequence.computing = self.positions, True
                prefixes.remember(sequence)
        took_ms = (self.clock.monotonic_s() - started_s) * MS_PER_S
        self.tell(MovedIn(sequence.key, 0 if why else len(self.data), self.took_ms + took_ms, why))
        return took_ms


class KvIntake:
    """A request goes to `accept` with the time of its arrival, whatever came of its pages; in another thread. `tell`
    hears of each one's pages: in another thread where they are of no use, else once the request has a slot."""

    def __init__(
        self, mover: KvMover, accept: Callable[[Submit, float], None], tell: Callable[[MovedIn], None], clock: Clock
    ) -> None:
        self._mover = mover
        self._accept = accept
        self._tell = tell
        self._clock = clock
        self._lane = SideLane("KV pages", gives_way=False)
        self._changing = threading.Lock()
        self._reading: dict[str, Submit] = {}
        self._taken: dict[str, TakenPages] = {}

    def add(self, request: Submit, arrived_s: float) -> None:
        with self._changing:
            self._reading[request.request_id] = request
        if request.pages is not None and request.pages.transfer:  # it may wait for its link, as no other has to
            threading.Thread(target=self._read, args=(request, arrived_s), name="KV pages", daemon=True).start()
        else:
            self._lane.submit(self._read, request, arrived_s)

    def cancel(self, request_id: str) -> None:
        """Drop a request whose pages are not there yet, and the pages of one that was accepted."""
        with self._changing:
            self._reading.pop(request_id, None)
            self._taken.pop(request_id, None)

    def take(self, request_id: str) -> TakenPages | None:
        """Return the pages of a request that was accepted, once."""
        with self._changing:
            return self._taken.pop(request_id, None)

    def _read(self, request: Submit, arrived_s: float) -> None:
        if self._reading.get(request.request_id) is not request:
            return
        taken, why = self._check(request)
        with self._changing:  # a cancel comes before this, and finds it here, or behind it
            if self._reading.get(request.request_id) is not request:
                return
            del self._reading[request.request_id]
            if taken is not None:
                self._taken[request.request_id] = taken
            else:
                self._tell(MovedIn(request.request_id, 0, 0.0, why))
            self._accept(msgspec.structs.replace(request, pages=None), arrived_s)

    def _check(self, request: Submit) -> tuple[TakenPages | None, str]:
        pages = request.pages
        if pages is None:
            return None, ""
        started_s = self._clock.monotonic_s()
        try:
            tokens = [*request.prompt, *request.committed]
            if pages.transfer:
                data, start_pages = self._mover.receive(pages, tokens, request.lora)
            else:
                data, start_pages = self._mover.read(pages, tokens, request.lora), (0,)
        except (SharedMemoryFailed, LinkBroken, MemoryError) as error:
            return None, str(error)
        except Exception as error:  # the request is computed again
            traceback.print_exc()
            return None, f"{type(error).__name__}: {error}"
        took_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S
        return TakenPages(self._mover, self._clock, self._tell, pages.positions, data, took_ms, start_pages), ""

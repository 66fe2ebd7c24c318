"""Reads prepared models again while they serve: what rots on the disk is found before it is loaded."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adapters.model_store import ModelStore, StoreUnwritable
from adapters.store_bound import bound_store
from device_profiles.units import MIB
from orchestrator.clock import Clock


@dataclass(frozen=True, slots=True)
class WatchPace:
    """Each artefact is read every `period_s`, at most `bytes_per_s`; every `look_s` it is looked which are due."""

    # ADR 0049: each artefact once a day.
    period_s: float = 24 * 3600.0
    # ADR 0049: at the lowest priority. Not tuned.
    bytes_per_s: float = 16.0 * MIB
    # Whether one is due. Not tuned.
    look_s: float = 60.0


class ArtefactWatch:
    """Reads the artefacts of a store that were loaded since the machine was started, in a thread of low priority.

    Of the processes that share a store one reads at a time. What is damaged is marked, so that the next load makes it
    again, and is in `corrupt` from then on. Where prepared models take more than `max_bytes` (0: no bound), the least
    used go.
    """

    def __init__(self, root: Path, clock: Clock, pace: WatchPace = WatchPace(), max_bytes: int = 0) -> None:
        self.corrupt: list[str] = []
        self._store = ModelStore(root)
        self._clock = clock
        self._pace = pace
        self._max_bytes = max_bytes
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, report: Callable[[], None]) -> None:
        """Begin; `report` is called, in the thread, when another artefact is damaged."""
        self._thread = threading.Thread(target=self._run, args=(report,), name="artefacts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End within a moment. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, report: Callable[[], None]) -> None:
        if sys.platform == "linux":  # there, a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._stopped.wait(self._pace.look_s):
            try:
                self._read(report)
            except OSError as error:  # the store is gone, say: the model that is loaded serves on
                print(f"prepared models cannot be read again: {error}", flush=True)  # noqa: T201

    def _read(self, report: Callable[[], None]) -> None:
        if self._max_bytes:  # what was measured and not chosen goes once its worker has ended
            with suppress(StoreUnwritable):
                for removed in bound_store(self._store, self._max_bytes):
                    print(f"removed {removed}, for store.max_size", flush=True)  # noqa: T201
        before_s = self._clock.wall_s() - self._pace.period_s
        for artefact, problem in self._store.read_again(before_s, self._wait_after):
            self.corrupt = [*self.corrupt, f"{artefact}: {problem}"]
            report()

    def _wait_after(self, count: int) -> bool:
        """Wait for what reading so many bytes may take. True: stop reading."""
        return self._stopped.wait(count / self._pace.bytes_per_s)

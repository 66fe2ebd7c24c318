"""A drafter's effective state while it runs: whether it works, and what its drafting takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DrafterState


class Meter:
    """Holds the state that `Drafter.states` tells."""

    def __init__(self, state: DrafterState, clock: Clock) -> None:
        self.state = state
        self._clock = clock

    @property
    def failed(self) -> bool:
        """True once the drafter has failed."""
        return self.state.state == "failed"

    def fail(self, reason: str) -> None:
        """The drafter is of no more use."""
        self.state = msgspec.structs.replace(self.state, state="failed", reason=reason)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Count a round of drafting and its time."""
        started = self._clock.monotonic_s()
        try:
            yield
        finally:
            took_ms = (self._clock.monotonic_s() - started) * MS_PER_S
            self.state = msgspec.structs.replace(
                self.state, rounds=self.state.rounds + 1, draft_ms=self.state.draft_ms + took_ms
            )

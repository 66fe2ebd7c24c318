"""Whether decoding goes on: a server that answers probes and makes no token is not healthy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.clock import Clock
from orchestrator.daemon.control.port import Control
from orchestrator.protocol.rounds import RoundReport

Verdict = Literal["ok", "idle", "stalled"]


@dataclass(slots=True)
class Liveness:
    """Watches the rounds of the decode loop.

    "idle": no request is live. "stalled": requests are live and no round was finished for `stalled_after_s`. The reason
    may be a worker that hangs, or one that is being restarted for too long. It is "stalled" too where one of
    several replicas has had requests for so long and said nothing. Else "ok". Long prefills are rounds too, so a busy
    server is not taken for a stalled one.
    """

    control: Control
    clock: Clock
    stalled_after_s: float
    _token_s: float | None = None
    _round_s: float | None = None
    _busy_s: float | None = None

    def observe_round(self, done: RoundReport) -> None:
        """A round was finished."""
        self._round_s = self.clock.monotonic_s()
        if any(delta.tokens for delta in done.deltas):
            self._token_s = self._round_s

    def observe_request(self) -> None:
        """A request is about to be taken in. Waiting begins here when nothing else was live."""
        if self.control.view().streams == 0:
            self._busy_s = self.clock.monotonic_s()

    def verdict(self) -> Verdict:
        """Return how decoding is now."""
        view = self.control.view()
        if view.streams == 0:
            return "idle"
        if any(replica.silent_s > self.stalled_after_s for replica in view.replicas):
            return "stalled"
        known = [moment for moment in (self._round_s, self._busy_s) if moment is not None]
        if not known:
            return "ok"
        return "stalled" if self.clock.monotonic_s() - max(known) > self.stalled_after_s else "ok"

    def describe_liveness(self) -> dict[str, Any]:
        """Return the verdict with the phase and the age of the last token (None before the first)."""
        age_s = None if self._token_s is None else round(self.clock.monotonic_s() - self._token_s, 3)
        view = self.control.view()
        return {"status": self.verdict(), "phase": view.phase, "last_token_age_s": age_s, "streams": view.streams}

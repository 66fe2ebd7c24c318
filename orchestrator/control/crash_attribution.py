"""Which request may be blamed for the deaths of its workers.

A request that kills its worker must not do so for ever. So each one counts the crashes that it was running at since its
last token. With QUARANTINE_CRASHES of them it is a suspect, and suspects are sent one after the other: the culprit is
found, and all other requests go on. A suspect that ran alone is the culprit. Where there are several replicas it must
have been sent in quarantine: two replicas that are lost at once for another reason are no evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

QUARANTINE_CRASHES = 2


@dataclass(slots=True)
class CrashHistory:
    """One request's. `crash_count`: crashes since its last token. `quarantined`: it was sent as a suspect.
    `progressed`: it had a token since it was sent."""

    crash_count: int = 0
    quarantined: bool = False
    progressed: bool = False

    @property
    def suspect(self) -> bool:
        """True when the request may be the cause of crashes."""
        return self.crash_count >= QUARANTINE_CRASHES

    def observe_send(self) -> None:
        """A worker gets the request."""
        self.quarantined, self.progressed = self.suspect, False

    def observe_progress(self) -> None:
        """The request had a token."""
        self.progressed, self.crash_count = True, 0

    def observe_recall(self) -> None:
        """No worker has the request any more."""
        self.progressed = False


def find_culprit(running: Sequence[CrashHistory], *, only_one: bool) -> CrashHistory | None:
    """Count a crash of the worker that ran these requests, and return the one to blame; None where that is not clear.
    `only_one`: there is one replica."""
    for history in running:
        history.crash_count += 1
    suspects = [history for history in running if history.suspect and (only_one or history.quarantined)]
    return suspects[0] if len(suspects) == 1 else None

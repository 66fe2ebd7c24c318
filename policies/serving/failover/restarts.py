"""When a lost worker is started again: soon at first, later the more often it was lost, and never not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from policies.serving.failover.blame import LossKind

# ADR 0046: `cluster.max_restarts` counts in so long. Not tuned.
WINDOW_S: Final = 600.0
# ADR 0046: streams wait for it. Not tuned.
FIRST_BACKOFF_S: Final = 0.2
# ADR 0046. Not tuned: a place that fails again and again is tried four times a minute.
MAX_BACKOFF_S: Final = 15.0
SPENT_BACKOFF_S: Final = 60.0
"""Between two attempts where the budget is spent: there is no last one. ADR 0046: once a minute."""
USEFUL_S: Final = 5.0
"""A worker that served for so long was worth its start: whatever ended it, it is no loop of failures. ADR 0046."""
HOST_BACKOFF_S: Final = 5.0
"""The longest where the host or the cluster is away: to look whether it is back costs little. ADR 0053."""


@dataclass(frozen=True, slots=True)
class Restart:
    """One that was made. `number`: of the death that it followed."""

    number: int
    at_s: float
    kind: LossKind
    cause: str


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """Restarts of one place within WINDOW_S. Each kind of loss has `limit` of them: none spends what is another's."""

    limit: int
    made: tuple[Restart, ...] = ()

    def observe_loss(
        self, number: int, kind: LossKind, cause: str, now_s: float, served_s: float = 0.0
    ) -> RestartBudget:
        """Return the budget with one restart more, and without those that are too old to count. `served_s`: how long
        the lost worker served; after USEFUL_S the restarts before it were worth it, and count no more."""
        kept = tuple(restart for restart in self.made if now_s - restart.at_s <= WINDOW_S and served_s < USEFUL_S)
        return replace(self, made=(*kept, Restart(number, now_s, kind, cause)))

    def forgive(self, numbers: frozenset[int]) -> RestartBudget:
        """Return the budget without the restarts that followed these deaths: they have been explained."""
        return replace(self, made=tuple(restart for restart in self.made if restart.number not in numbers))

    def count(self, kind: LossKind) -> int:
        return sum(restart.kind == kind for restart in self.made)

    def is_spent(self, kind: LossKind) -> bool:
        """True when more than `limit` restarts of this kind count. A host's are not limited."""
        return kind != "host" and self.count(kind) > self.limit

    def delay_s(self, kind: LossKind) -> float:
        """Return how long to wait with the restart that was added last; 0 where none counts."""
        count = self.count(kind)
        if not count:
            return 0.0
        if self.is_spent(kind):
            return SPENT_BACKOFF_S
        longest = HOST_BACKOFF_S if kind == "host" else MAX_BACKOFF_S
        return min(longest, FIRST_BACKOFF_S * 2.0 ** min(count - 1, 30))

    def describe(self, kind: LossKind) -> str:
        count = self.count(kind)
        if not count:
            return "a restart that counts for nothing"
        if self.is_spent(kind):
            return f"lost {count} times in ten minutes, now started once a minute{self._describe_first(kind)}"
        return f"try {count} in ten minutes" if kind == "host" else f"restart {count} of {self.limit} in ten minutes"

    def describe_end(self, kind: LossKind) -> str:
        """Return why nothing more is tried."""
        last = next((restart.cause for restart in reversed(self.made) if restart.kind == kind), "")
        return f"gave up after {self.count(kind) - 1} restarts within ten minutes: {last}{self._describe_first(kind)}"

    def _describe_first(self, kind: LossKind) -> str:
        """The first cause is nearer to the root than the last."""
        causes = [restart.cause for restart in self.made if restart.kind == kind]
        return f"; the first time: {causes[0]}" if causes and causes[0] != causes[-1] else ""

"""What each drafter of a chain did for each sequence: when it was asked, what it proposed, why it was not asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.protocol.messages import DrafterShare


@runtime_checkable
class TallyingDrafter(Protocol):
    """A drafter that can say what its drafters did for a sequence that it has."""

    def describe_shares(self, key: str) -> list[DrafterShare]:
        """Return what each did, without what was verified; none for a sequence that is not known."""
        ...


@dataclass(slots=True)
class DrafterTally:
    """The fields are those of DrafterShare."""

    ask_count: int = 0
    answered: int = 0
    taken: int = 0
    proposed: int = 0
    spared: int = 0
    off: int = 0

    def name(self, name: str) -> DrafterShare:
        return DrafterShare(name, self.ask_count, self.answered, self.taken, self.proposed, self.spared, self.off)

    @property
    def met(self) -> bool:
        """Whether there was a round in which it might have been asked."""
        return self.ask_count + self.spared + self.off > 0

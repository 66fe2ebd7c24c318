"""What a round's drafts came to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Draft counts of one round."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.per_position.extend([0] * (accepted - len(self.per_position)))
        for position in range(accepted):
            self.per_position[position] += 1

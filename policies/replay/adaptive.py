"""This project's policy behind the interface of the comparison."""

from __future__ import annotations

from collections.abc import Sequence

from policies.depth import GAINS, Gains
from policies.measured_cost import MeasuredCost
from policies.replay.port import Done
from policies.seeds import ClassKey
from policies.speculation import Decision, Proposal, Round, Speculation, asked, begun, decided, ended, observed


class Adaptive:
    """See policies.speculation. `most`: the most drafts of a sequence."""

    name = "adaptive"

    def __init__(self, cost: MeasuredCost, most: int, gains: Gains = GAINS) -> None:
        self.state = Speculation(cost, gains)
        self._most = most
        self._decision = Decision([], [])

    def begin(self, key: str, of: ClassKey) -> None:
        """See the port."""
        self.state = begun(self.state, key, of, self._most)

    def end(self, key: str) -> None:
        """See the port."""
        self.state = ended(self.state, key)

    def asked(self, now: Round) -> list[int]:
        """See the port."""
        return asked(self.state, now)

    def decided(self, now: Round, proposals: Sequence[Proposal]) -> list[int]:
        """See the port."""
        self._decision = decided(self.state, now, proposals)
        return self._decision.depths

    def observed(self, now: Round, done: Done) -> None:
        """See the port."""
        self.state = observed(
            self.state, now, done.proposals, self._decision, done.verdicts, times=done.times, tokens_made=done.tokens
        )

"""What a depth policy is to a replay, or to a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from policies.seeds import ClassKey
from policies.speculation import Proposal, Round, Times, Verdict


class Done(NamedTuple):
    """A round that was run. `accepted[s]`: verified drafts that were accepted. `verdicts`: what drafts could be
    compared with, verified or not. `tokens` that the round made."""

    proposals: Sequence[Proposal]
    depths: Sequence[int]
    accepted: Sequence[int]
    verdicts: Sequence[Verdict]
    times: Times
    tokens: int


class DepthPolicy(Protocol):
    """Chooses depths, and learns from rounds. The calls of a round come in this order; it has no clock and no RNG."""

    @property
    def name(self) -> str: ...

    def begin(self, key: str, of: ClassKey) -> None:
        """A request of this class begins."""
        ...

    def end(self, key: str) -> None:
        """A request ended."""
        ...

    def asked(self, now: Round) -> list[int]:
        """Return how many tokens the drafter is to propose for each place."""
        ...

    def decided(self, now: Round, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many of them to verify."""
        ...

    def observed(self, now: Round, done: Done) -> None:
        """Learn from the round."""
        ...

"""How often a drafter's tokens are accepted by a target, by their place in the draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairAcceptance:
    """One drafter on one target over the texts of one workload, in rounds that could have had a draft.

    `offered[i]`: the share of rounds whose draft had a token at place i + 1; `accepted[i]`: the share in which that
    token, and so all before it, was accepted. A round without a draft counts as one whose draft was rejected. `rule`:
    who chose the depth: "policy" (the drafts that seem worth a row) or "fixed" (all that there are, up to the depth).
    `draft_ms`: what drafting took in a round.
    """

    target: str
    target_digest: str
    drafter: str
    workload: str
    rule: str
    offered: tuple[float, ...]
    accepted: tuple[float, ...]
    rounds: int
    draft_ms: float = 0.0
    measured_at: str = ""

    @property
    def conditional(self) -> tuple[float, ...]:
        """The chance that draft i is accepted if all before it are, for `cost.expected_tokens`."""
        before = (1.0, *self.accepted)
        return tuple(now / last if last else 0.0 for last, now in zip(before, self.accepted, strict=False))

    def tokens(self, depth: int) -> float:
        """Return the expected tokens of a round of at most so many drafts, the target's own included."""
        return 1.0 + sum(self.accepted[:depth])

    def rows(self, depth: int) -> float:
        """Return the expected rows that a round verifies, the one without a draft included."""
        return 1.0 + sum(self.offered[:depth])

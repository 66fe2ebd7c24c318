"""What a depth policy is to the decode loop, to a replay and to a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from policies.speculation import DraftComparison, DraftSummary, Rest, RoundContext, RoundTimes
from policies.speculation.branching import NO_BRANCHES, BranchOffer, ChosenBranch, RoundBranches
from policies.speculation.cost_model import CostModel


class DraftLimits(NamedTuple):
    """How many tokens the drafter is to propose for each place. `least`: the chance, all before included, below which
    a drafter to which tokens cost time may stop. `cheap_only`: such drafters are left alone if they
    have no gate, fixed depths excepted.
    `round_ms`: what this round takes without drafts, `row_ms`: what one row of a draft adds to it. 0: not known.
    `gain`: so many tokens rounds make, where plain decoding makes one."""

    limits: list[int]
    least: float = 0.0
    cheap_only: bool = False
    round_ms: float = 0.0
    row_ms: float = 0.0
    gain: float = 1.0


class RoundOutcome(NamedTuple):
    """A round that was run. `depths[s]` tokens of draft s were verified, `accepted[s]` of them accepted. `verdicts`:
    what drafts could be compared with, verified or not. `times`: None where something else ran in the round, a prefill.
    `tokens` that the round made."""

    proposals: Sequence[DraftSummary]
    depths: Sequence[int]
    accepted: Sequence[int]
    verdicts: Sequence[DraftComparison]
    times: RoundTimes | None
    tokens: int
    branches: RoundBranches = NO_BRANCHES


class DepthPolicy(Protocol):
    """Chooses depths, and learns from rounds. The calls of a round come in this order; it has no clock and no RNG."""

    @property
    def name(self) -> str: ...

    @property
    def cost(self) -> CostModel:
        """What forwards cost, by what is known: the one model of a worker, which its scheduler and drafters read."""
        ...

    @property
    def rest(self) -> Rest:
        """Who is left alone now."""
        ...

    def begin(self, key: str, most: int, *, sure: bool = False) -> None:
        """A request begins, or goes on after it gave way. It may have at most `most` drafts, ever. `sure`: its
        first ones are likely right, however many they are."""
        ...

    def end(self, key: str) -> None:
        """A request ended; an unknown one is ignored."""
        ...

    def reset_gain(self) -> None:
        """A drafter came, or came back: what speculation gained without it says nothing about it."""
        ...

    def decide_draft_limits(self, now: RoundContext) -> DraftLimits:
        """Return what the drafter is to be asked for."""
        ...

    def decide_depths(self, now: RoundContext, proposals: Sequence[DraftSummary]) -> list[int]:
        """Return how many of the proposed tokens to verify. Where that is more than were proposed, the rest is filled
        up with any tokens, for the number of rows."""
        ...

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None:
        """Learn from the round."""
        ...

    def decide_pause(self) -> int:
        """Return how many of the next rounds the policy need not hear of, because it would ask for nothing and learn
        nothing. It holds as long as no more sequences begin or end than were in the last one."""
        ...

    def observe_pause(self, rounds: int, rows: int) -> None:
        """So many rounds (1 or more) were run without a word to the policy, the last of them with so many `rows` (0: it
        prefilled)."""
        ...


@runtime_checkable
class BranchingPolicy(DepthPolicy, Protocol):
    """A depth policy that may have other ways of drafts verified beside them."""

    @property
    def branches(self) -> bool:
        """Whether there may be any: rows cost little enough where this decodes."""
        ...

    def choose_branches(
        self, now: RoundContext, depths: Sequence[int], offers: Sequence[BranchOffer]
    ) -> list[ChosenBranch]:
        """Return which to verify beside drafts of these depths, which `decide_depths` has chosen in this round."""
        ...

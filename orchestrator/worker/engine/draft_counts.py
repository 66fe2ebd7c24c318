"""What drafts came to: of one round, and of each drafter since the beginning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import DrafterShare
from orchestrator.worker.drafting.port import PREDICTION, Draft
from orchestrator.worker.engine.batch import ScheduledSequence
from policies.sampling import VerifiedDraft

GRAMMAR = "grammar"
"""Whose the draft tokens are that a grammar added."""


def count_by_drafter(counts: dict[str, tuple[int, int]], draft: Draft, accepted: int) -> None:
    """Add a draft's tokens, and `accepted` of its leading ones, to the counts of whose they are."""
    own = min(accepted, draft.own)
    for name, drafted, right in (
        (draft.drafter, draft.own, own),
        (GRAMMAR, draft.guessed - draft.own, accepted - own),
    ):
        if drafted:
            before = counts.get(name, (0, 0))
            counts[name] = (before[0] + drafted, before[1] + right)


def add_verified(shares: Sequence[DrafterShare], counts: Mapping[str, tuple[int, int]]) -> list[DrafterShare]:
    """Return what each drafter did, with its tokens that were verified and accepted; a grammar's come last."""
    by_name = {share.name: share for share in shares}
    for name, (drafted, accepted) in counts.items():
        share = by_name.get(name, DrafterShare(name))
        by_name[name] = msgspec.structs.replace(share, drafted=drafted, accepted=accepted)
    return list(by_name.values())


@dataclass(slots=True)
class RoundDraftCounts:
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)
    by_rule: dict[str, tuple[int, int]] = field(default_factory=dict)
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)
    tolerated: int = 0

    def add(self, drafted: int, accepted: int, rule: str) -> None:
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            before = self.by_rule.get(rule, (0, 0))
            self.by_rule[rule] = (before[0] + drafted, before[1] + accepted)
        self.per_position.extend([0] * (accepted - len(self.per_position)))
        for position in range(accepted):
            self.per_position[position] += 1


class DrafterCounts:
    """Tokens of each drafter that were verified and accepted. Those that a grammar added count for none."""

    def __init__(self) -> None:
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._statistics: dict[str, tuple[int, int]] = {}

    def add(self, draft: Draft, accepted: int) -> None:
        """A draft was verified, and so many of its leading tokens were accepted."""
        if not draft.tokens:
            return
        self._drafted[draft.drafter] += draft.own
        self._accepted[draft.drafter] += min(accepted, draft.own)
        if draft.from_statistics:
            before = self._statistics.get(draft.drafter, (0, 0))
            drafted, right = (
                _count_first(draft.from_statistics, count) for count in (draft.own, min(accepted, draft.own))
            )
            self._statistics[draft.drafter] = (before[0] + drafted, before[1] + right)

    def states(self, states: Iterable[DrafterState]) -> list[DrafterState]:
        return [self._count(state) for state in states]

    def _count(self, state: DrafterState) -> DrafterState:
        drafted, right = self._statistics.get(state.name, (0, 0))
        return msgspec.structs.replace(
            state,
            drafted=self._drafted[state.name],
            accepted=self._accepted[state.name],
            statistics_drafted=drafted,
            statistics_accepted=right,
        )


def count_verdict(
    part: ScheduledSequence, verified: VerifiedDraft, tally: RoundDraftCounts, ever: DrafterCounts
) -> None:
    """Count what became of a part's draft: for its sequence, its round, and its drafter since the beginning."""
    sequence, draft = part.sequence, part.draft
    drafted = draft.guessed
    accepted = min(verified.accepted, drafted)
    sequence.steps += 1
    sequence.drafted += drafted
    sequence.accepted += accepted
    if draft.drafter == PREDICTION:
        sequence.predicted += draft.own
        sequence.predicted_right += min(accepted, draft.own)
    tally.add(drafted, accepted, sequence.submit.sampling.rule)
    count_by_drafter(tally.by_drafter, draft, accepted)
    count_by_drafter(sequence.by_drafter, draft, accepted)
    ever.add(draft, accepted)


def _count_first(bits: int, count: int) -> int:
    return (bits & ((1 << count) - 1)).bit_count()

"""One round: who is in its forward, what each drafts, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from adapters.loaded_model import ForwardResult, LoadedModel, PendingForward, Segment
from orchestrator.worker.drafting.port import Draft
from orchestrator.worker.engine.batch import ScheduledSequence, WantedRows
from orchestrator.worker.engine.branches import Branch
from policies.sampling import BestRows
from policies.speculation import DraftComparison, DraftSummary, RoundContext
from policies.speculation.branching import BranchOffer


@dataclass(frozen=True, slots=True)
class WaitingForward:
    """A forward of a target that runs one at a time: it runs when it is waited for."""

    target: LoadedModel
    batch: Sequence[Segment]

    def result(self) -> ForwardResult:
        return self.target.forward(self.batch)


class DraftOutcome(NamedTuple):
    """What became of a place's draft: tokens accepted, and what all of it could be compared with."""

    accepted: int = 0
    comparison: DraftComparison = DraftComparison()


@dataclass(slots=True)
class RoundDrafts:
    """What the depth policy decided. `proposed`: drafts as drafters gave them, also where fewer tokens are verified;
    `index`: where each sequence stands among them. `outcomes`: of those that had a draft. `tokens`: so many were
    committed. `ended`: sequences of which the policy still has to learn. `offers`: branches that there might be,
    and `verdicts` on them (policies.speculation.branching)."""

    context: RoundContext
    proposed: list[Draft]
    summaries: list[DraftSummary]
    depths: list[int]
    index: dict[str, int]
    outcomes: dict[str, DraftOutcome] = field(default_factory=dict)
    tokens: int = 0
    ended: list[str] = field(default_factory=list)
    offers: Sequence[BranchOffer] = ()
    verdicts: list[tuple[BranchOffer, bool]] = field(default_factory=list)


@dataclass(slots=True)
class Round:
    """Times are seconds of the loop's clock: it asked for drafts at `proposed_s`, which took `draft_ms`."""

    number: int
    started_s: float
    parts: list[ScheduledSequence] = field(default_factory=list)
    """Each with its draft. Those of the last forward, where an earlier one ran out of memory."""
    pages_ms: float = 0.0
    """What it took to take in KV pages that came with requests: no part of the round's time."""
    paused: bool = False
    """The depth policy does without it, and nobody has a draft."""
    drafts: RoundDrafts | None = None
    """None where the policy decides nothing: in a pause, and where nobody chooses a token or memory ran out."""
    proposed_s: float = 0.0
    draft_ms: float = 0.0
    branches: list[Branch] = field(default_factory=list)
    branch_ms: float = 0.0
    """What it took to begin them."""
    forward: PendingForward | None = None


def split_rows(
    parts: Sequence[ScheduledSequence], branches: Sequence[Branch], result: ForwardResult
) -> list[WantedRows]:
    """Return what came back of the wanted rows of each part, and behind all of them of each branch."""
    wanted = [(part.sequence, part.wanted[1] - part.wanted[0]) for part in parts]
    wanted += [(branch.part.sequence, branch.rows) for branch in branches]
    rows: list[WantedRows] = []
    whole = best = 0
    few = result.best
    for sequence, count in wanted:
        if sequence.best_logits and few is not None:
            known = BestRows(few.ids, few.masses, sequence.watch_reads(few.read_row)).cut(best, best + count)
            rows.append(WantedRows(few.logits[best : best + count], known))
            best += count
        else:
            rows.append(WantedRows(result.logits[whole : whole + count]))
            whole += count
    return rows

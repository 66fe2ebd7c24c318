"""Branches of a round: other ways of its drafts, each verified in a fork of its sequence, which may take its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adapters.errors import CapacityError, Unsupported
from adapters.loaded_model import ForkableKv, LoadedModel, Segment
from orchestrator.worker.drafting.port import Draft
from orchestrator.worker.engine.batch import ScheduledSequence
from orchestrator.worker.engine.scheduler import Scheduler
from orchestrator.worker.engine.sequence import NO_SLOT
from orchestrator.worker.engine.verifier import Verdict, Verifier
from policies.sampling import Row, VerifiedDraft


@dataclass(slots=True, eq=False)
class Branch:
    """A draft that `part` may have in the place of its own, in a slot that is a fork of its sequence's."""

    part: ScheduledSequence
    draft: Draft
    slot: int = NO_SLOT

    @property
    def rows(self) -> int:
        return self.part.num_query_tokens + len(self.draft.tokens)

    def segment(self) -> Segment:
        known = self.part.num_query_tokens
        start, tokens = self.part.sequence.cached, self.part.sequence.tokens
        fed = [*tokens[start : start + known], *self.draft.tokens]
        return Segment(self.slot, start, fed, (known - 1, len(fed)), self.part.apart)


class BranchForks:
    """Gives branches the slots that `scheduler` has free, for a round."""

    def __init__(self, target: LoadedModel, scheduler: Scheduler, verifier: Verifier) -> None:
        self._target = target
        self._scheduler = scheduler
        self._verifier = verifier

    def begin(self, parts: Sequence[ScheduledSequence], branches: Sequence[Branch]) -> list[Branch]:
        """Fork sequences for branches, and return those for which there was a slot and room: beside these parts, which
        they never cost a block."""
        target, begun = self._target, list[Branch]()
        if not isinstance(target, ForkableKv):
            return begun
        for branch in branches:
            slot, cached = self._scheduler.lend_slot(), branch.part.sequence.cached
            if slot == NO_SLOT:
                break
            branch.slot = slot
            begun.append(branch)
            try:
                target.fork(slot, branch.part.sequence.slot, cached, cached)
            except (CapacityError, Unsupported):  # in stages, of which one may not be able to
                self.end([begun.pop()])
                break
        while begun:
            batch = [*(part.segment() for part in parts), *(branch.segment() for branch in begun)]
            if target.count_needed_blocks(batch) <= target.free_blocks():
                break
            self.end([begun.pop()])
        return begun

    def end(self, branches: Sequence[Branch]) -> None:
        """Give back the slots of branches that did not take their sequence's place."""
        for branch in branches:
            if branch.slot != NO_SLOT:
                self._target.release(branch.slot)
                self._scheduler.take_back_slot(branch.slot)
                branch.slot = NO_SLOT

    def settle(
        self,
        branches: Sequence[tuple[Branch, Row]],
        parts: Sequence[ScheduledSequence],
        rows: list[Row],
        verdicts: list[VerifiedDraft | None],
    ) -> None:
        """Let a branch take its sequence's place where the target chose it: the part then has its draft, rows and
        verdict. End all others. `branches` have the rows that choose tokens behind theirs."""
        numbers = {id(part): number for number, part in enumerate(parts)}
        for branch, own in branches:
            branch.part.sequence.branches += 1
            number = numbers.get(id(branch.part), -1)
            chosen = verdicts[number] if number >= 0 else None
            if chosen is None or branch.draft.tokens[: len(chosen.tokens)] != chosen.tokens:
                continue  # it was cancelled or given up, or the target chose another way
            part = replace(branch.part, draft=branch.draft)
            verdict = self._judge(part, own)
            if isinstance(verdict, VerifiedDraft) and verdict.tokens[: len(chosen.tokens)] == chosen.tokens:
                branch.part.sequence.branches_taken += 1
                if branch.part.chain_accepted < 0:
                    branch.part.chain_accepted = chosen.accepted
                branch.part.draft = branch.draft
                rows[number], verdicts[number] = own, verdict
                self._scheduler.exchange_slot(branch.part.sequence, branch.slot)
                branch.slot = NO_SLOT
        self.end([branch for branch, _ in branches])

    def _judge(self, part: ScheduledSequence, rows: Row) -> Verdict | None:
        return self._verifier.verdicts([part], [rows])[0]

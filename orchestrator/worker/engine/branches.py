"""Branches of a round: other ways of its drafts, each verified in a fork of its sequence, which may take its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adapters.errors import CapacityError, Unsupported
from adapters.loaded_model import ForkableKv, LoadedModel, Segment
from orchestrator.worker.drafting.port import NO_SLOT, Draft
from orchestrator.worker.engine.batch import ScheduledSequence, WantedRows
from orchestrator.worker.engine.scheduler import Scheduler
from orchestrator.worker.engine.verifier import Verifier
from policies.sampling import VerifiedDraft


@dataclass(slots=True, eq=False)
class Branch:
    """A draft that `part`, which decodes, may have in the place of its own, in a slot that is a fork of its sequence's.
    All its rows choose tokens: the committed token's, and one behind each of the draft's."""

    part: ScheduledSequence
    draft: Draft
    slot: int = NO_SLOT

    @property
    def rows(self) -> int:
        return 1 + len(self.draft.tokens)

    def segment(self) -> Segment:
        sequence = self.part.sequence
        fed = [sequence.tokens[-1], *self.draft.tokens]
        return Segment(self.slot, sequence.cached, fed, (0, len(fed)), self.part.apart, *sequence.best_wanted)


class BranchForks:
    """Gives branches the slots that `scheduler` has free, for a round."""

    def __init__(self, target: LoadedModel, scheduler: Scheduler, verifier: Verifier) -> None:
        self._target = target
        self._scheduler = scheduler
        self._verifier = verifier

    def fork_sequences(self, parts: Sequence[ScheduledSequence], branches: Sequence[Branch]) -> list[Branch]:
        """Fork sequences for branches, and return those for which there was a slot and room: beside these parts, which
        they never cost a block."""
        target, forked = self._target, list[Branch]()
        if not isinstance(target, ForkableKv):
            return forked
        for branch in branches:
            slot, cached = self._scheduler.lend_slot(), branch.part.sequence.cached
            if slot == NO_SLOT:
                break
            branch.slot = slot
            forked.append(branch)
            try:
                target.fork(slot, branch.part.sequence.slot, cached, cached)
            except (CapacityError, Unsupported):  # in stages, of which one may not be able to
                self.release_forks([forked.pop()])
                break
        while forked:
            batch = [*(part.segment() for part in parts), *(branch.segment() for branch in forked)]
            if target.count_needed_blocks(batch) <= target.free_blocks():
                break
            self.release_forks([forked.pop()])
        return forked

    def release_forks(self, branches: Sequence[Branch]) -> None:
        """Give back the slots of branches that did not take their sequence's place."""
        for branch in branches:
            if branch.slot != NO_SLOT:
                self._target.release(branch.slot)
                self._scheduler.take_back_slot(branch.slot)
                branch.slot = NO_SLOT

    def settle(
        self,
        branches: Sequence[Branch],
        branch_rows: Sequence[WantedRows],
        parts: Sequence[ScheduledSequence],
        rows: list[WantedRows],
        verdicts: list[VerifiedDraft | None],
    ) -> None:
        """Let a branch take its sequence's place where the target chose it: the part then has its draft, rows and
        verdict. End all others. `branch_rows`: what came back of each branch."""
        numbers = {id(part): number for number, part in enumerate(parts)}
        for branch, own in reversed(list(zip(branches, branch_rows, strict=True))):
            branch.part.sequence.branches += 1
            number = numbers.get(id(branch.part), -1)
            chosen = verdicts[number] if number >= 0 else None
            if chosen is None or branch.draft.tokens[: len(chosen.tokens)] != chosen.tokens:
                continue  # it was cancelled or given up, or the target chose another way
            verdict = self._verifier.verdicts([replace(branch.part, draft=branch.draft)], [own])[0]
            if isinstance(verdict, VerifiedDraft) and verdict.tokens[: len(chosen.tokens)] == chosen.tokens:
                branch.part.sequence.branches_taken += 1
                if branch.part.chain_accepted < 0:
                    branch.part.chain_accepted = chosen.accepted
                branch.part.draft = branch.draft
                rows[number], verdicts[number] = own, verdict
                self._scheduler.exchange_slot(branch.part.sequence, branch.slot)
                branch.slot = NO_SLOT
        self.release_forks(branches)

"""What the next forward holds: who decodes, who prefills, and how many rows each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adapters.loaded_model import Capabilities, Segment
from device_profiles.units import ceil_div
from orchestrator.worker.drafting.port import NOTHING, Draft
from orchestrator.worker.engine.sequence import SequenceState
from policies.sampling import BestRows, Row
from policies.serving.prefill_shares import PrefillRows, share_rows

SCORED_ROWS = 128
"""The most rows of prompts that one forward scores: each of them is as wide as the vocabulary. ADR 0020: with 1,024 a
vocabulary of 152,000 planned for 1.5 GB that nobody ever held."""


class WantedRows(NamedTuple):
    """What came back of the rows that a segment wants: all their `logits`, or the `best` alone."""

    logits: Row
    best: BestRows | None = None

    def take_last(self, count: int) -> WantedRows:
        end = len(self.logits)
        return WantedRows(self.logits[end - count :], None if self.best is None else self.best.cut(end - count, end))


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a forward: `num_query_tokens` committed tokens, then its `draft`. `emits_logits`: the
    last committed token is in it, so that its row (and the draft's rows) choose tokens. Only then it has a draft."""

    sequence: SequenceState
    num_query_tokens: int
    emits_logits: bool
    draft: Draft = NOTHING
    chain_accepted: int = -1
    """Where a branch took the place of its draft, so many tokens of that were accepted; else below 0."""

    @property
    def apart(self) -> bool:
        """The numerical class of its rows (see adapters.loaded_model.Capabilities.apart_tokens)."""
        return self.sequence.apart and self.sequence.prompt_left == 0

    @property
    def drafts(self) -> bool:
        """True where draft rows may follow: not where they would be of another class than the rows before them."""
        return self.emits_logits and (self.apart or not self.sequence.apart)

    @property
    def is_prefill(self) -> bool:
        """True for a prefill, of a prompt or of tokens that are replayed."""
        return self.num_query_tokens > 1 or not self.emits_logits

    @property
    def rows(self) -> int:
        """Rows that are run, drafts included, padding not."""
        return self.num_query_tokens + len(self.draft.tokens)

    def segment(self) -> Segment:
        sequence = self.sequence
        start = sequence.cached
        tokens = [*sequence.tokens[start : start + self.num_query_tokens], *self.draft.tokens]
        return Segment(sequence.slot, start, tokens, self.wanted, self.apart, *sequence.best_wanted)

    @property
    def wanted(self) -> tuple[int, int]:
        """The rows whose logits are wanted: those that choose tokens, and a prompt's where it is scored."""
        scores = self.sequence.scores_prompt
        first = 0 if scores else self.num_query_tokens - 1
        last = self.rows if self.emits_logits else self.num_query_tokens * scores
        return (first, last) if last > first else (0, 0)

    def find_choosing(self, rows: WantedRows) -> WantedRows:
        """Return those of its wanted rows that choose tokens, where it emits logits."""
        return rows.take_last(len(self.draft.tokens) + 1)


def schedule_rows(
    running: Sequence[SequenceState], *, max_rows: int, prefill_rows: PrefillRows, min_rows: int
) -> list[ScheduledSequence]:
    """Share the rows of one forward: first every decoding sequence, then replays, then other prefills.

    Drafts are added later, into rows that are left; a sequence for which no row is left waits a round. Prefills
    get `prefill_rows` beside decoding sequences, all rows where there are none.
    """
    parts: list[ScheduledSequence] = []
    left = max_rows
    for sequence in running:
        if sequence.uncached == 1 and left >= min_rows:
            parts.append(ScheduledSequence(sequence, 1, emits_logits=True))
            left -= min_rows
    filling = [sequence for sequence in running if sequence.uncached > 1]
    filling = _computing_what_no_other_does(sorted(filling, key=lambda sequence: not sequence.replays))
    filling = _list_scored_together(filling)
    replays = [sequence for sequence in filling if sequence.replays]
    prompts = [sequence for sequence in filling if not sequence.replays]
    shares = share_rows(
        [_count_wanted_rows(sequence) for sequence in replays],
        [_count_wanted_rows(sequence) for sequence in prompts],
        left,
        bound=prefill_rows if parts else None,
        min_rows=min_rows,
    )
    for of, given in ((replays, shares.replays), (prompts, shares.prompts)):
        for place, rows in given:
            sequence = of[place]
            parts.append(ScheduledSequence(sequence, rows, emits_logits=rows == sequence.uncached))
    return parts


def _computing_what_no_other_does(filling: Sequence[SequenceState]) -> list[SequenceState]:
    """Leave out whoever waits for rows that one in front of it computes in this forward."""
    kept: list[SequenceState] = []
    for sequence in filling:
        if sequence.scores_prompt or not any(_same_rows(ahead, sequence) for ahead in kept):
            kept.append(sequence)
    return kept


def _list_scored_together(filling: Sequence[SequenceState]) -> list[SequenceState]:
    """Leave out prompts that are scored where SCORED_ROWS are taken: they wait for another forward."""
    kept, left = [], SCORED_ROWS
    for sequence in filling:
        rows = _count_wanted_rows(sequence) if sequence.scores_prompt else 0
        if rows <= left:
            left -= rows
            kept.append(sequence)
    return kept


def count_logits_rows(max_batch_rows: int, running: int, depth: int) -> int:
    """Return the most rows of a forward whose logits are wanted: scored ones, and those that choose tokens of so many
    sequences with drafts of such a depth."""
    return min(max_batch_rows, SCORED_ROWS + running * (depth + 1))


def _count_wanted_rows(sequence: SequenceState) -> int:
    """Return the rows that a prefill can use in one forward: none of them reaches over the prompt's end."""
    wanted = sequence.prompt_left or sequence.uncached
    return min(wanted, SCORED_ROWS) if sequence.scores_prompt else wanted


def _same_rows(ahead: SequenceState, behind: SequenceState) -> bool:
    """True where waiting saves work: `ahead` is about to compute the block that `behind` needs next."""
    end = behind.cached + behind.block_tokens
    return (
        ahead.cached == behind.cached
        and end <= min(ahead.shared_limit, behind.shared_limit)
        and ahead.tokens[:end] == behind.tokens[:end]
    )


def rows_of(parts: Sequence[ScheduledSequence], caps: Capabilities) -> int:
    """Return the rows that a forward of these parts is charged for, drafts included."""
    alone = len(parts) == 1
    return sum(caps.count_charged_rows(part.rows, apart=part.apart, alone=alone) for part in parts)


def most_blocks(parts: Sequence[ScheduledSequence], *, min_rows: int, block_tokens: int) -> int:
    """Return no less than the free blocks that parts without drafts need: found in less time than what they do need,
    for where there are plenty."""
    return sum(ceil_div(part.num_query_tokens + min_rows, block_tokens) + 1 for part in parts)

"""A loaded model as one of several decode loops that take turns on it sees it, and what its last forward was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapters.borrowed_slots import BorrowedSlots, list_slots
from adapters.contract import Capabilities, ForwardResult, LoadedModel, Segment


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward was of. `rows` and `sequences` that decoded, behind `context_tokens` on average; `prompt_rows` of
    prompts, of which each had `prompt_behind` positions before it on average. `run_rows`: all, padding included."""

    rows: int
    sequences: int
    context_tokens: float
    prompt_rows: int
    prompt_behind: float
    run_rows: int


class WatchedModel(BorrowedSlots):
    """The slots of a loaded model from `first_slot` on, for a loop of its own.

    `forward_was`: the last forward. `changed`: whether it ran another number of rows than the one before.
    """

    def __init__(self, model: LoadedModel, first_slot: int = 0) -> None:
        left = model.capabilities.slots - first_slot
        super().__init__(model, list_slots(first_slot, left), left)
        self.forward_was = Forward(0, 0, 0.0, 0, 0.0, 0)
        self.changed = False

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        result = super().forward(batch)
        before, self.forward_was = self.forward_was, forward_of(batch, self.capabilities)
        self.changed = before.run_rows != self.forward_was.run_rows
        return result


def forward_of(batch: Sequence[Segment], caps: Capabilities) -> Forward:
    """Return what a forward of these segments is of: those of which the first row is wanted decode."""
    decoding = [segment for segment in batch if segment.rows[0] == 0 < segment.rows[1]]
    prompts = [segment for segment in batch if not segment.rows[0] == 0 < segment.rows[1]]
    alone = len(batch) == 1
    return Forward(
        rows=sum(len(segment.tokens) for segment in decoding),
        sequences=len(decoding),
        context_tokens=_mean_start(decoding),
        prompt_rows=sum(len(segment.tokens) for segment in prompts),
        prompt_behind=_mean_start(prompts),
        run_rows=sum(
            caps.count_charged_rows(len(segment.tokens), apart=segment.apart, alone=alone) for segment in batch
        ),
    )


def _mean_start(segments: Sequence[Segment]) -> float:
    return sum(segment.start for segment in segments) / max(1, len(segments))

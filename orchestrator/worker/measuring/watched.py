"""A loaded model as one of several decode loops that take turns on it sees it, and what its last forward was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adapters.contract import Capabilities, ForwardResult, LoadedModel, Segment


class SomeSlots:
    """Implements the contract's LoadedModel: `slots` slots of a loaded model from `first` on (None: all that are left).
    Weights, the KV cache's blocks and what is remembered of prompts are shared: who makes several of these sees to it
    that there are enough blocks."""

    def __init__(self, model: LoadedModel, first: int = 0, slots: int | None = None) -> None:
        self._model, self._first, self.spec = model, first, model.spec
        caps = model.capabilities
        self.capabilities = replace(caps, slots=caps.slots - first if slots is None else slots)

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        return self._model.forward(self._shift_slots(batch))

    def count_cached_positions(self, slot: int) -> int:
        return self._model.count_cached_positions(self._first + slot)

    def free_blocks(self) -> int:
        return self._model.free_blocks()

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        return self._model.count_needed_blocks(self._shift_slots(batch))

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        return self._model.attach(self._first + slot, tokens)

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        self._model.share(self._first + slot, tokens)

    def release(self, slot: int) -> None:
        self._model.release(self._first + slot)

    def discard(self, slot: int) -> None:
        self._model.discard(self._first + slot)

    def close(self) -> None:
        self._model.close()

    def _shift_slots(self, batch: Sequence[Segment]) -> list[Segment]:
        """Also from slot 0 on: loops that are compared take the same time for it."""
        first = self._first
        return [Segment(first + part.slot, part.start, part.tokens, part.rows, part.apart) for part in batch]


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


class WatchedModel(SomeSlots):
    """The slots of a loaded model from `first_slot` on, for a loop of its own.

    `forward_was`: the last forward. `changed`: whether it ran another number of rows than the one before.
    """

    def __init__(self, model: LoadedModel, first_slot: int = 0) -> None:
        super().__init__(model, first_slot)
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
        run_rows=sum(caps.count_paid_rows(len(segment.tokens), apart=segment.apart, alone=alone) for segment in batch),
    )


def _mean_start(segments: Sequence[Segment]) -> float:
    return sum(segment.start for segment in segments) / max(1, len(segments))

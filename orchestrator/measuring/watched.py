"""A loaded model as one of several decode loops that take turns on it sees it, and what its last forward was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adapters.contract import Capabilities, ForwardResult, LoadedModel, Segment
from device_profiles.workload import ModelSpec


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


class WatchedModel:
    """The slots of a loaded model from `first_slot` on, for a loop of its own. The KV cache's blocks are shared: who
    makes several of these sees to it that there are enough.

    `forward_was`: the last forward. `changed`: whether it ran another number of rows than the one before.
    """

    def __init__(self, model: LoadedModel, first_slot: int = 0) -> None:
        self._model = model
        self._first = first_slot
        self.forward_was = Forward(0, 0, 0.0, 0, 0.0, 0)
        self.changed = False

    @property
    def spec(self) -> ModelSpec:
        """See the contract."""
        return self._model.spec

    @property
    def capabilities(self) -> Capabilities:
        """See the contract."""
        caps = self._model.capabilities
        return replace(caps, slots=caps.slots - self._first) if self._first else caps

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        result = self._model.forward(self._moved(batch))
        before, self.forward_was = self.forward_was, forward_of(batch, self._model.capabilities.paid_rows)
        self.changed = before.run_rows != self.forward_was.run_rows
        return result

    def held(self, slot: int) -> int:
        """See the contract."""
        return self._model.held(self._first + slot)

    def free_blocks(self) -> int:
        """See the contract."""
        return self._model.free_blocks()

    def blocks_needed(self, batch: Sequence[Segment]) -> int:
        """See the contract."""
        return self._model.blocks_needed(self._moved(batch))

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """See the contract."""
        return self._model.attach(self._first + slot, tokens)

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """See the contract."""
        self._model.share(self._first + slot, tokens)

    def release(self, slot: int) -> None:
        """See the contract."""
        self._model.release(self._first + slot)

    def close(self) -> None:
        """See the contract."""
        self._model.close()

    def _moved(self, batch: Sequence[Segment]) -> Sequence[Segment]:
        if not self._first:
            return batch
        return [replace(segment, slot=self._first + segment.slot) for segment in batch]


def forward_of(batch: Sequence[Segment], paid_rows: int) -> Forward:
    """Return what a forward of these segments is of: those of which the first row is wanted decode."""
    decoding = [one for one in batch if one.rows[0] == 0 < one.rows[1]]
    prompts = [one for one in batch if not one.rows[0] == 0 < one.rows[1]]
    alone = len(batch) == 1
    return Forward(
        rows=sum(len(one.tokens) for one in decoding),
        sequences=len(decoding),
        context_tokens=_mean_start(decoding),
        prompt_rows=sum(len(one.tokens) for one in prompts),
        prompt_behind=_mean_start(prompts),
        run_rows=sum(max(len(one.tokens), 1 if one.apart and not alone else paid_rows) for one in batch),
    )


def _mean_start(segments: Sequence[Segment]) -> float:
    return sum(one.start for one in segments) / max(1, len(segments))

"""One loaded target for two decode loops in turns: each has half of the slots, and both share the weights, the blocks
and what is remembered of prompts. Two copies would do as well, if one were not faster than the other by 2 %."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adapters.contract import Capabilities, ForwardResult, LoadedModel, Segment
from device_profiles.workload import ModelSpec
from orchestrator.bootstrap import Target


class Half:
    """`slots` slots of a loaded model, from `first` on, as a model of its own. The model is its owner's to close."""

    def __init__(self, model: LoadedModel, first: int, slots: int) -> None:
        self._model, self._first = model, first
        self._capabilities = replace(model.capabilities, slots=slots)

    @property
    def spec(self) -> ModelSpec:
        """See the contract."""
        return self._model.spec

    @property
    def capabilities(self) -> Capabilities:
        """See the contract."""
        return self._capabilities

    def _whole(self, batch: Sequence[Segment]) -> list[Segment]:
        return [Segment(self._first + one.slot, one.start, one.tokens, one.rows, one.apart) for one in batch]

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        return self._model.forward(self._whole(batch))

    def held(self, slot: int) -> int:
        """See the contract."""
        return self._model.held(self._first + slot)

    def free_blocks(self) -> int:
        """See the contract."""
        return self._model.free_blocks()

    def blocks_needed(self, batch: Sequence[Segment]) -> int:
        """See the contract."""
        return self._model.blocks_needed(self._whole(batch))

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
        """See the contract: nothing is its own."""


def halves(target: Target, slots: int) -> tuple[Target, Target]:
    """Return both halves of a target that was loaded with twice as many `slots`."""
    one, other = (replace(target, model=Half(target.model, first, slots)) for first in (0, slots))
    return one, other

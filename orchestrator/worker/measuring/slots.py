"""Some slots of a loaded model, as a model of their own: for decode loops that take turns on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adapters.contract import Capabilities, ForwardResult, LoadedModel, Segment
from device_profiles.workload import ModelSpec


class SomeSlots:
    """Implements the contract's LoadedModel: `slots` slots of a loaded model from `first` on (None: all that are left).
    Weights, the KV cache's blocks and what is remembered of prompts are shared: who makes several of these sees to it
    that there are enough blocks."""

    def __init__(self, model: LoadedModel, first: int = 0, slots: int | None = None) -> None:
        self._model, self._first = model, first
        caps = model.capabilities
        self._capabilities = replace(caps, slots=caps.slots - first if slots is None else slots)

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

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

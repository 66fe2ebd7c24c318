"""Slots of a loaded model that several decode loops take as they need them, each as of a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adapters.contract import CapacityError, ForwardResult, LoadedModel, PendingForward, Segment, StagedModel


class BorrowedSlots:
    """See the module, and `adapters.contract.LoadedModel`. `free`: the model's slots that nobody has, one list for all
    that take from it, which say that they have `slots`. A slot is taken when it is first used, and given back when it
    is released. Weights, the KV cache's blocks and what is remembered of prompts are shared: who makes several of these
    sees to it that there are enough blocks. One thread calls all of them."""

    def __init__(self, model: LoadedModel, free: list[int], slots: int) -> None:
        self._model, self._free = model, free
        self.spec, self.capabilities = model.spec, replace(model.capabilities, slots=slots)
        self._own: dict[int, int] = {}  # the model's slot, by the number that it has here

    def move(self, slot: int, other: BorrowedSlots, into: int) -> None:
        """Let another one of the same model have what a slot holds, as its free slot `into`."""
        other.release(into)
        if slot in self._own:
            other._own[into] = self._own.pop(slot)

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        return self._model.forward(self._rename(batch))

    def count_cached_positions(self, slot: int) -> int:
        return self._model.count_cached_positions(self._own[slot]) if slot in self._own else 0

    def free_blocks(self) -> int:
        return self._model.free_blocks()

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        return self._model.count_needed_blocks(self._rename(batch))

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        return self._model.attach(self._take(slot), tokens)

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        if slot in self._own:
            self._model.share(self._own[slot], tokens)

    def release(self, slot: int) -> None:
        if (own := self._own.pop(slot, None)) is not None:
            self._model.release(own)
            self._free.append(own)

    def discard(self, slot: int) -> None:
        if (own := self._own.pop(slot, None)) is not None:
            self._model.discard(own)
            self._free.append(own)

    def close(self) -> None:
        self._model.close()

    def _take(self, slot: int) -> int:
        if slot not in self._own:
            if not self._free:
                raise CapacityError(f"{self._model.capabilities.device}: every slot of the model is taken")
            self._own[slot] = self._free.pop()
        return self._own[slot]

    def _rename(self, batch: Sequence[Segment]) -> list[Segment]:
        return [replace(segment, slot=self._take(segment.slot)) for segment in batch]


class StagedSlots(BorrowedSlots):
    """The same of a model of several stages."""

    def __init__(self, model: StagedModel, free: list[int]) -> None:
        super().__init__(model, free, model.capabilities.slots)
        self._staged, self.stages = model, model.stages

    def start_forward(self, batch: Sequence[Segment]) -> PendingForward:
        return self._staged.start_forward(self._rename(batch))


def borrow_slots(model: StagedModel, count: int) -> list[StagedSlots]:
    """Return so many that share a model's slots, none of which is in use."""
    free = list_slots(0, model.capabilities.slots)
    return [StagedSlots(model, free) for _ in range(count)]


def list_slots(first: int, count: int) -> list[int]:
    """Return so many slots from one on, none of which is in use, as BorrowedSlots takes them."""
    return list(range(first + count - 1, first - 1, -1))


def cut_slots(model: LoadedModel, first: int, count: int) -> BorrowedSlots:
    """Return so many slots of a model from one on, which nobody else takes, as a model of their own."""
    return BorrowedSlots(model, list_slots(first, count), count)

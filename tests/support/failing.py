"""Models whose forwards go wrong as those of real devices do: garbage in a slot's rows, no memory for many rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adapters.contract import ForwardResult, LoadedModel, OutOfMemory, Segment
from tests.support.wrapped_model import WrappedModel


class FailingModel(WrappedModel):
    """A loaded model, beside which the segments that `spoils` chooses get `garbage` for logits.

    A forward of more than `most_rows` rows, where that is set, raises what an adapter raises without memory for it.
    The model has then written the keys and values of its first segments, as real ones may. `forwards` has the
    (sequences, rows) of those that ran, `failed` of those that did not.
    """

    def __init__(
        self, model: LoadedModel, *, spoils: Callable[[Segment], bool] | None = None, garbage: float = np.nan
    ) -> None:
        super().__init__(model)
        self._spoils = spoils
        self._garbage = np.float32(garbage)
        self.most_rows = 0
        self.forwards: list[tuple[int, int]] = []
        self.failed: list[tuple[int, int]] = []

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        size = (len(batch), sum(len(segment.tokens) for segment in batch))
        if 0 < self.most_rows < size[1]:
            self.failed.append(size)
            self._wrapped.forward(batch[: len(batch) // 2 or 1])
            raise OutOfMemory(f"no memory for {size[1]} rows", can_go_on=True)
        self.forwards.append(size)
        found = self._wrapped.forward(batch)
        if self._spoils is None:
            return found
        logits, at = found.logits.copy(), 0
        for segment in batch:
            end = at + segment.rows[1] - segment.rows[0]
            if self._spoils(segment):
                logits[at:end] = self._garbage
            at = end
        return ForwardResult(logits, found.device_ms)


def poison(model: Any, slot: int) -> bool:
    """Fill the KV blocks of a slot with NaN, as a broken kernel may leave it. False: the model has no such numbers."""
    if hasattr(model, "_decoder"):  # llama.cpp ends the process where it meets one
        return False
    blocks = model._pool.table(slot, model.count_cached_positions(slot))
    if hasattr(model, "_context"):  # the simulated model's cache holds hashes
        return False
    if hasattr(model, "_sequences"):  # llama.cpp, likewise
        return False
    memory = getattr(model, "_memory", None)
    if memory is None:  # OpenVINO
        for cache in model._caches:
            cache.data.view(np.uint8).reshape(cache.shape[0], -1)[blocks] = 0xFF
    elif hasattr(memory, "_piece_bytes"):
        size = memory._piece_bytes
        for piece in range(memory._caches * memory._heads):
            for block in blocks:
                os.pwrite(memory._file, b"\xff" * size, (piece * memory._blocks + block) * size)
    else:
        for caches in memory._caches:
            for cache in caches:
                cache[blocks] = float("nan")
    return True

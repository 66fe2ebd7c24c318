"""A model that leaves its rows on the device, over one that does not: what the contract says of the best logits, by its
own words, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adapters.contract import BestLogits, Capabilities, ForwardResult, LoadedModel, Segment
from policies.sampling import Row
from tests.support.wrapped_model import WrappedModel


def find_best_by_definition(rows: Row, count: int) -> BestLogits:
    """The best logits of each row, as BestLogits has them."""
    ids = np.argsort(np.where(np.isnan(rows), -np.inf, -rows), axis=1, kind="stable")[:, :count].astype(np.uint32)
    if count == 1:
        assert np.array_equal(ids[:, 0], rows.argmax(axis=1)), "as numpy has it"
    return BestLogits(np.take_along_axis(rows, ids, axis=1), ids)


class BestModel(WrappedModel):
    """It gives up to `most` of the best logits. `crossed`: how many rows came whole, and how many logits of others."""

    def __init__(self, model: LoadedModel, most: int = 8) -> None:
        super().__init__(model)
        self._most = most
        self.crossed = [0, 0]

    @property
    def capabilities(self) -> Capabilities:
        capabilities: Capabilities = self._wrapped.capabilities
        return replace(capabilities, best_logits=self._most)

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        found: Any = self._wrapped.forward([replace(segment, best=0) for segment in batch])
        counts = [segment.rows[1] - segment.rows[0] for segment in batch]
        alone = np.repeat([segment.best > 0 for segment in batch], counts)
        count = max(segment.best for segment in batch)
        assert count <= self._most
        best = find_best_by_definition(found.logits[alone], count) if count else None
        self.crossed[0] += int((~alone).sum())
        self.crossed[1] += int(alone.sum()) * count
        return replace(found, logits=found.logits[~alone], best=best)

"""A model that leaves its rows on the device, over one that does not: what the contract says of the best logits, by its
own words, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import BestLogits, Capabilities, ForwardResult, LoadedModel, Segment
from policies.sampling import Row
from tests.support.wrapped_model import WrappedModel


def find_best_by_definition(rows: Row, count: int) -> tuple[Row, NDArray[np.uint32]]:
    """The best logits of each row and whose they are, as BestLogits has them."""
    order = np.lexsort((np.where(np.isnan(rows), 0.0, -rows), ~np.isnan(rows)), axis=1)
    ids = order[:, :count].astype(np.uint32)
    if count == 1:
        assert np.array_equal(ids[:, 0], rows.argmax(axis=1)), "as numpy has it"
    return np.take_along_axis(rows, ids, axis=1), ids


def sum_masses(rows: Row, temperatures: Sequence[float]) -> NDArray[np.float64]:
    """The mass of each row at its temperature; 0 where it has none."""
    wide = rows.astype(np.float64)
    parts = zip(wide, wide.max(axis=1), temperatures, strict=True)
    return np.array([np.exp((row - top) / own).sum() if own else 0.0 for row, top, own in parts])


class BestModel(WrappedModel):
    """It gives up to `most` of the best logits, and masses as far off as they may be. `crossed`: how many rows came
    whole, and how many logits of others; `reads`: of how many of these all were asked for behind that."""

    def __init__(self, model: LoadedModel, most: int = 8) -> None:
        super().__init__(model)
        self._most = most
        self.crossed = [0, 0]
        self.reads = 0

    @property
    def capabilities(self) -> Capabilities:
        capabilities: Capabilities = self._wrapped.capabilities
        return replace(capabilities, best_logits=self._most)

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        result: Any = self._wrapped.forward([replace(segment, best=0) for segment in batch])
        counts = [segment.rows[1] - segment.rows[0] for segment in batch]
        alone = np.repeat([segment.best > 0 for segment in batch], counts)
        count = max(segment.best for segment in batch)
        assert count <= self._most
        rows, best = result.logits[alone].copy(), None
        if count:
            masses = sum_masses(rows, np.repeat([segment.temperature for segment in batch], counts)[alone])
            off = np.where(np.arange(len(masses)) % 2, 0.9992, 1.0008)
            best = BestLogits(
                *find_best_by_definition(rows, count), (masses * off).astype(np.float32), self._reader(rows)
            )
        self.crossed[0] += int((~alone).sum())
        self.crossed[1] += int(alone.sum()) * count
        return replace(result, logits=result.logits[~alone], best=best)

    def _reader(self, rows: Row) -> Callable[[int], Row]:
        def read(row: int) -> Row:
            self.reads += 1
            return rows[row]

        return read

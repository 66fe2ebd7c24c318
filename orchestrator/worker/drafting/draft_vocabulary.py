"""From the columns of a draft model's rows to tokens: a draft may be able to say a part of the vocabulary only."""

from __future__ import annotations

import numpy as np

from device_profiles.workload import ModelSpec
from policies.sampling import Row


class Outputs:
    """What each column of a model's rows means."""

    def __init__(self, spec: ModelSpec) -> None:
        self._vocabulary = spec.vocabulary_size
        self._ids = np.array(spec.output_ids, np.intp)

    def token(self, column: int) -> int:
        return int(self._ids[column]) if len(self._ids) else column

    def spread(self, row: Row) -> Row:
        """Return a row with a column for each token of the vocabulary: those that cannot be said have no chance."""
        if not len(self._ids):
            return row
        whole = np.full(self._vocabulary, -np.inf, np.float32)
        whole[self._ids] = row
        return whole

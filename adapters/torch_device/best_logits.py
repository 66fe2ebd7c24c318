"""The best logits of rows, found where the rows are: what decides a token crosses to the host, and not the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adapters.contract import BestLogits

MOST_BEST = 128
"""Not tuned: the `top_k` that requests ask for are 20 to 64, and 128 logits with their ids take 1 KiB of a row."""
# Rows whose keys are there at a time. Bounds memory: 20 bytes for each token of a vocabulary.
_ROWS_AT_ONCE = 16
_MAGNITUDE, _ID_BITS = 0x7FFFFFFF, 32


def find_best(rows: Any, count: int) -> Any:
    """Return the ids and the logits' bits of the best of each row, int32, shape (2, rows, count): as BestLogits has
    them. `rows`: float32, shape (rows, vocabulary)."""
    if count == 1:
        ids = rows.argmax(dim=1, keepdim=True)  # torch's gives the first of equals, and NaN before all
    else:
        count = min(count, rows.shape[1])
        ids = torch.cat([_make_keys(some).topk(count).indices for some in rows.split(_ROWS_AT_ONCE)])
    return torch.stack([ids.to(torch.int32), rows.gather(1, ids).view(torch.int32)])


def read_best(values: NDArray[np.int32]) -> BestLogits:
    """Return what `find_best` gave, once it has come to the host."""
    return BestLogits(values[1].view(np.float32), values[0].view(np.uint32))


def _make_keys(rows: Any) -> Any:
    """Return a number for each logit, int64, by which the better ones come first, and the lower id among equals: topk
    says nothing of their order, and in 16 bits many are equal."""
    bits = rows.add(0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    # The bits of numbers are ordered as they are, those below 0 the other way round; -0.0 has become 0.0.
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(torch.int64) << _ID_BITS) - torch.arange(rows.shape[1], device=rows.device)

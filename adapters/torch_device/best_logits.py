"""The best logits of rows, found where the rows are: what decides a token crosses to the host, and not the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adapters.contract import BestLogits, Logits

# Rows whose keys are there at a time. Bounds memory: 20 bytes for each token of a vocabulary.
_ROWS_AT_ONCE = 16
# Bounded by float32: its bits but the sign, and how many it has.
_MAGNITUDE, _ID_BITS = 0x7FFFFFFF, 32


def find_best(rows: Any, count: int, scales: Any = None) -> Any:
    """Return what `read_best` takes, int32, shape (rows, 2 count + 1): ids, the logits' bits, and the mass's. `rows`:
    float32, shape (rows, vocabulary); `scales`, (rows,): one over the temperature of each, None: no mass is asked
    for."""
    count = min(count, rows.shape[1])
    if count == 1:
        ids = rows.argmax(dim=1, keepdim=True)  # torch's gives the first of equals, and NaN before all
    else:
        ids = torch.cat([_make_keys(some).topk(count).indices for some in rows.split(_ROWS_AT_ONCE)])
    logits = rows.gather(1, ids)
    masses = logits[:, :1]
    if scales is not None:
        parts = zip(*(part.split(_ROWS_AT_ONCE) for part in (rows, masses, scales[:, None])), strict=True)
        sums = [((some - best) * scale).exp_().sum(1, keepdim=True, dtype=torch.float64) for some, best, scale in parts]
        masses = torch.cat(sums).to(torch.float32)
    return torch.cat([ids.to(torch.int32), logits.view(torch.int32), masses.view(torch.int32)], dim=1)


def read_best(values: NDArray[np.int32], read_row: Callable[[int], Logits]) -> BestLogits:
    """Return what `find_best` gave, once it has come to the host."""
    count = values.shape[1] // 2
    logits, masses = (part.view(np.float32) for part in (values[:, count:-1], values[:, -1:]))
    return BestLogits(logits, values[:, :count].view(np.uint32), masses[:, 0], read_row)


def _make_keys(rows: Any) -> Any:
    """Return a number for each logit, int64: a higher one for a better logit, and for the lower id among equals. topk
    says nothing of the order of these, and in 16 bits many are equal."""
    bits = rows.add(0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    # The bits of numbers are ordered as they are, those below 0 the other way round; -0.0 has become 0.0.
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(torch.int64) << _ID_BITS) - torch.arange(rows.shape[1], device=rows.device)

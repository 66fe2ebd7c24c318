"""Measures whether a loaded model is row-invariant, instead of believing it."""

from __future__ import annotations

import numpy as np

from adapters.contract import LoadedModel, Logits, Segment

_LENGTH = 12
_GROUPINGS = ((12,), (2, 2, 2, 2, 2, 2), (7, 1, 4), (1,) * 12)


def measure_row_invariance(model: LoadedModel) -> bool:
    """Run one short text in several groupings, alone and beside other sequences, and compare every bit.

    Uses slots 0..2 (free before, free after) and some ten forwards. Any mismatch gives False.
    """
    text = [(7 * i * i + 11 * i + 3) % model.spec.vocabulary_size for i in range(_LENGTH)]
    reference = _run(model, text, _GROUPINGS[0], beside=False)
    return all(
        np.array_equal(reference.view(np.uint32), _run(model, text, grouping, beside=beside).view(np.uint32))
        for grouping in _GROUPINGS
        for beside in (False, True)
        if not beside or model.capabilities.slots >= 3
    )


def _run(model: LoadedModel, text: list[int], grouping: tuple[int, ...], *, beside: bool) -> Logits:
    rows: list[Logits] = []
    start = 0
    for index, count in enumerate(grouping):
        batch = [Segment(0, start, text[start : start + count], (0, count))]
        if beside:
            batch.insert(0, Segment(1, index, text[:1], (0, 0)))
            batch.append(Segment(2, 0, text[: 3 + index % 4], (0, 0)))
        result = model.forward(batch)
        rows.append(result.logits.copy())
        start += count
    for slot in range(3):
        model.release(slot)
    return np.concatenate(rows)

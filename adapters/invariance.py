"""Measures whether a loaded model is row-invariant, instead of believing it."""

from __future__ import annotations

import numpy as np

from adapters.contract import LoadedModel, Logits, Segment

_LENGTH = 12
_GROUPINGS = ((12,), (2, 2, 2, 2, 2, 2), (7, 1, 4), (1,) * 12)
_PROMPT = 6


def measure_row_invariance(model: LoadedModel) -> bool:
    """Run one short text in several groupings, alone and beside other sequences, and compare every bit.

    Both numerical classes are measured where the model has two. Uses slots 0..2 (free before, free after) and some
    ten forwards a class. Any mismatch gives False.
    """
    text = [(7 * i * i + 11 * i + 3) % model.spec.vocabulary_size for i in range(_LENGTH)]
    return all(
        _consistent(model, text, prompt) for prompt in (_LENGTH, _PROMPT)[: 1 + (model.capabilities.apart_tokens > 0)]
    )


def _consistent(model: LoadedModel, text: list[int], prompt: int) -> bool:
    reference = _run(model, text, _GROUPINGS[0], prompt=prompt, beside=False)
    return all(
        np.array_equal(
            reference.view(np.uint32), _run(model, text, grouping, prompt=prompt, beside=beside).view(np.uint32)
        )
        for grouping in _GROUPINGS
        for beside in (False, True)
        if not beside or model.capabilities.slots >= 3
    )


def _run(model: LoadedModel, text: list[int], grouping: tuple[int, ...], *, prompt: int, beside: bool) -> Logits:
    """Return all rows of the text, fed in groups; those behind the prompt apart. No group reaches over its end."""
    rows: list[Logits] = []
    start = 0
    ends = sorted({prompt, *np.cumsum(grouping).tolist()})
    for index, end in enumerate(ends):
        batch = [Segment(0, start, text[start:end], (0, end - start), apart=start >= prompt)]
        if beside:
            batch.insert(0, Segment(1, index, text[:1], (0, 0)))
            batch.append(Segment(2, 0, text[: 3 + index % 4], (0, 0)))
        rows.append(model.forward(batch).logits.copy())
        start = end
    for slot in range(3):
        model.release(slot)
    return np.concatenate(rows)

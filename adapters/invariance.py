"""Measures whether a loaded model is row-invariant, instead of believing it."""

from __future__ import annotations

import numpy as np

from adapters.contract import LoadedModel, Logits, Segment

_LENGTH = 12
_GROUPINGS = ((12,), (2, 2, 2, 2, 2, 2), (7, 1, 4), (1,) * 12)
_PROMPT = 6
_LONG_LENGTH = 72
_LONG_GROUPINGS = ((72,), (71, 1), (36, 36), (33, 39))
"""Kernels cut long calls into blocks of rows, and treat the last one as they like."""


def measure_row_invariance(model: LoadedModel) -> bool:
    """Run one short text in several groupings, alone and beside other sequences, and a longer one in some, and compare
    every bit.

    Both numerical classes are measured where the model has two. Uses slots 0..2 (free before, free after) and some
    ten forwards a class. Any mismatch gives False.
    """
    caps = model.capabilities
    text = [(7 * i * i + 11 * i + 3) % model.spec.vocabulary_size for i in range(_LONG_LENGTH)]
    short = text[:_LENGTH]
    if not all(_consistent(model, short, prompt) for prompt in (_LENGTH, _PROMPT)[: 1 + (caps.apart_tokens > 0)]):
        return False
    if min(caps.max_batch_rows, caps.max_context_tokens, caps.total_blocks * caps.block_tokens) < _LONG_LENGTH + 2:
        return True
    reference = _run(model, text, _LONG_GROUPINGS[0], prompt=_LONG_LENGTH, beside=False)
    return all(
        _same(reference, _run(model, text, grouping, prompt=_LONG_LENGTH, beside=False))
        for grouping in _LONG_GROUPINGS[1:]
    )


def _same(left: Logits, right: Logits) -> bool:
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


def _consistent(model: LoadedModel, text: list[int], prompt: int) -> bool:
    reference = _run(model, text, _GROUPINGS[0], prompt=prompt, beside=False)
    return all(
        _same(reference, _run(model, text, grouping, prompt=prompt, beside=beside))
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

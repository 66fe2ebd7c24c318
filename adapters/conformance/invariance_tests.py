"""Over every adapter: a row's logits are the same to the bit, however its sequence is cut and whatever is beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adapters.conformance.case import ROWS, bits, run, text
from adapters.contract import LoadedModel, Segment, Unsupported
from adapters.invariance import find_variance


def test_chunked_prefill_equals_whole(model: LoadedModel) -> None:
    tokens = text(model, 150)
    whole = run(model, 0, tokens, [150])
    for slot, chunks in enumerate(([64, 64, 22], [149, 1], [1, 149], [75, 75], [33] * 4 + [18]), start=1):
        assert np.array_equal(bits(run(model, slot, tokens, chunks)), bits(whole)), chunks


def test_row_invariance_over_depth(model: LoadedModel) -> None:
    count = 66  # into a third block of the KV cache
    tokens = text(model, count)
    whole = run(model, 0, tokens, [count])
    for width in (1, 2, 3, 4, 5, 6, 8, 12, 16):
        chunks = [width] * (count // width) + [count % width] * (count % width > 0)
        assert np.array_equal(bits(run(model, 1, tokens, chunks)), bits(whole)), width
        model.release(1)


@pytest.mark.parametrize("sequences", [5, 16])
def test_row_invariance_beside_other_sequences(model: LoadedModel, sequences: int) -> None:
    """Every sequence decodes ragged beside the others and gets the bits that it gets alone."""
    lengths = [20 + 7 * index for index in range(sequences)]
    texts = [text(model, length, seed=index) for index, length in enumerate(lengths)]
    alone = []
    for slot in range(sequences):
        alone.append(run(model, slot, texts[slot], [ROWS] * (lengths[slot] // ROWS) + [lengths[slot] % ROWS]))
        model.release(slot)
    done = [0] * sequences
    got: list[list[NDArray[Any]]] = [[] for _ in range(sequences)]
    step = 0
    while any(done[s] < lengths[s] for s in range(sequences)):
        batch, room = [], model.capabilities.max_batch_rows
        for s in range(sequences):
            count = min(1 + (s + step) % 5, lengths[s] - done[s])
            if count and room >= 5:
                batch.append(Segment(s, done[s], texts[s][done[s] : done[s] + count], (0, count)))
                room -= max(2, count)
        rows = model.forward(batch).logits.copy()
        at = 0
        for segment in batch:
            got[segment.slot].append(rows[at : at + len(segment.tokens)])
            at += len(segment.tokens)
            done[segment.slot] += len(segment.tokens)
        step += 1
    for s in range(sequences):
        assert np.array_equal(bits(np.concatenate(got[s])), bits(alone[s])), s


def test_row_invariance_of_rows_that_stand_apart(model: LoadedModel) -> None:
    """Behind a prompt: any number at a time, alone, beside others and beside a prefill of the other class."""
    if not model.capabilities.apart_tokens:
        pytest.skip("this runtime has one numerical class")
    tokens, prompt = text(model, 60), 23
    run(model, 0, tokens[:prompt], [prompt])
    expected = apart(model, tokens, prompt, [37])
    for chunks in ([1] * 37, [2] * 18 + [1], [5, 1, 16, 8, 7], [30, 7]):
        assert np.array_equal(bits(apart(model, tokens, prompt, chunks)), bits(expected)), chunks
        assert np.array_equal(bits(apart(model, tokens, prompt, chunks, beside=3)), bits(expected)), chunks
    got, bulk = [], text(model, 100, seed=5)
    alone = run(model, 1, bulk, [100])
    for index, start in enumerate(range(prompt, 60, 8)):
        part = tokens[start : start + 8]
        batch = [
            Segment(0, start, part, (0, len(part)), apart=True),
            Segment(2, index * 20, bulk[index * 20 :][:20], (0, 20)),
        ]
        rows = model.forward(batch).logits.copy()
        got.append(rows[: len(part)])
        assert np.array_equal(bits(rows[len(part) :]), bits(alone[index * 20 :][:20]))
    assert np.array_equal(bits(np.concatenate(got)), bits(expected))


def apart(model: LoadedModel, tokens: list[int], start: int, chunks: list[int], *, beside: int = 0) -> NDArray[Any]:
    """All rows from `start` on, apart; `beside` other sequences decode one apart row each."""
    others = text(model, 80, seed=1)
    for slot in range(3, 3 + beside):
        model.release(slot)
        model.forward([Segment(slot, 0, others[: 2 * slot], (0, 0))])
    rows = []
    for count in chunks:
        batch = [Segment(0, start, tokens[start : start + count], (0, count), apart=True)]
        for slot in range(3, 3 + beside):
            held = model.count_cached_positions(slot)
            batch.append(Segment(slot, held, others[held : held + 1], (0, 0), apart=True))
        rows.append(model.forward(batch).logits.copy())
        start += count
    return np.concatenate(rows)


def test_a_long_prefill_beside_a_decoding_sequence_changes_neither(model: LoadedModel) -> None:
    short, long = text(model, 30), text(model, 140, seed=3)
    expected_short, expected_long = run(model, 0, short, [30]), run(model, 1, long, [140])
    model.release(0)
    model.release(1)
    run(model, 0, short[:29], [29])
    many = min(140, model.capabilities.max_batch_rows - 2)
    rows = model.forward([Segment(0, 29, short[29:], (0, 1)), Segment(1, 0, long[:many], (0, many))]).logits
    assert np.array_equal(bits(rows[:1]), bits(expected_short[29:]))
    assert np.array_equal(bits(rows[1:]), bits(expected_long[:many]))


def test_long_context_to_its_very_end(far: LoadedModel) -> None:
    model = far
    context = model.capabilities.max_context_tokens
    tokens = text(model, context)
    most = min(ROWS, model.capabilities.max_batch_rows)
    fill(model, tokens[: context - most], most)
    start = (context - 1) // most * most if context % most else context - most
    start = min(start, model.count_cached_positions(0))
    whole = run(model, 0, tokens[:context], [context - start], start=start)
    if not model.capabilities.rewinds:
        model.release(0)
        fill(model, tokens[: context - 3], most)
    singles = run(model, 0, tokens[:context], [1, 1, 1], start=context - 3)
    assert np.array_equal(bits(singles), bits(whole[-3:]))
    assert model.count_cached_positions(0) == context
    with pytest.raises(Unsupported):
        model.forward([Segment(0, context, [5], (0, 1))])


def fill(model: LoadedModel, tokens: list[int], most: int) -> None:
    """Let slot 0 hold tokens, by forwards of at most so many rows."""
    for start in range(0, len(tokens), most):
        model.forward([Segment(0, start, tokens[start : start + most], (0, 0))])


def test_what_is_measured_is_what_is_stated(model: LoadedModel) -> None:
    assert model.capabilities.row_invariant
    assert find_variance(model) == ""

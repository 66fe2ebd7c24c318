"""A sequence's KV cache goes along to another slot, or to another model, and nothing of what follows tells."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.conformance.case import SLOTS, bits, pieces, run, text
from adapters.contract import CapacityError, MovableKv, Segment, Unsupported
from tests.support.loops import toy


@pytest.fixture(autouse=True)
def _moves_pages(model) -> None:
    if not isinstance(model, MovableKv):
        pytest.skip("states of this model are not cut into pages")


def export(model, slot, positions):
    return np.concatenate([part.copy() for part in model.export_kv(slot, positions)])


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_rows_behind_moved_pages_are_those_behind_computed_ones(model, offset):
    block = model.kv_layout.page_tokens
    positions = block + offset
    tokens = text(model, positions + 12)
    expected = run(model, 0, tokens, [positions, 5, 7])
    pages = export(model, 0, positions)
    assert len(pages) == model.kv_layout.count_bytes(positions)
    model.release(0)
    run(model, 5, text(model, 2 * block, seed=3), pieces(2 * block))  # the blocks that were free have other content now
    model.import_kv(3, positions, pages)
    assert model.count_cached_positions(3) == positions
    moved = run(model, 3, tokens, [5, 7], start=positions)
    assert np.array_equal(bits(moved), bits(expected[positions:]))
    deeper = run(model, 3, tokens, [positions + 12 - 7], start=7)  # a rollback into what was moved
    assert np.array_equal(bits(deeper), bits(expected[7:]))


def test_what_a_slot_shares_already_is_not_written_again(model):
    block = model.kv_layout.page_tokens
    positions = 2 * block + 3
    tokens = text(model, positions + 4)
    expected = run(model, 0, tokens, [*pieces(positions), 4])
    pages = export(model, 0, positions)
    model.share(0, tokens[:block])
    free = model.free_blocks()
    assert model.attach(1, tokens) == block
    wrong = pages.copy()
    begin = 0
    for length in model.kv_layout.list_lengths(positions):
        own = wrong[begin : begin + length]
        own[: model.kv_layout.page_bytes[0] // 64] = 1  # of the first page only, whatever its order
        begin += length
    model.import_kv(1, positions, wrong)
    assert free - model.free_blocks() in (2, 3)
    assert np.array_equal(bits(run(model, 1, tokens, [4], start=positions)), bits(expected[positions:]))
    assert np.array_equal(bits(run(model, 0, tokens, [4], start=positions)), bits(expected[positions:]))


def test_pages_of_another_length_and_slots_that_hold_something_are_refused(model):
    block = model.kv_layout.page_tokens
    tokens = text(model, block + 2)
    run(model, 0, tokens, [block, 2])
    pages = export(model, 0, block + 2)
    free = model.free_blocks()
    for slot, positions, given in (
        (1, block + 2, pages[:-1]),
        (1, block, pages),
        (0, block + 2, pages),
        (SLOTS, block + 2, pages),
        (1, 0, pages[:0]),
        (1, model.capabilities.max_context_tokens + 1, pages),
    ):
        with pytest.raises(Unsupported):
            model.import_kv(slot, positions, given)
    for slot, positions in ((0, block + 3), (1, 1), (0, 0)):
        with pytest.raises(Unsupported):
            list(model.export_kv(slot, positions))
    assert model.free_blocks() == free
    assert model.count_cached_positions(1) == 0


def test_pages_for_which_there_are_no_blocks_change_nothing():
    model = toy(kv_blocks=8, slots=4)
    tokens = text(model, 70)
    model.forward([Segment(0, 0, tokens, (0, 0))])
    pages = export(model, 0, 70)
    with pytest.raises(CapacityError):
        model.import_kv(1, 70, pages)
    assert (model.count_cached_positions(1), model.free_blocks()) == (0, 3)
    model.import_kv(1, 48, pages[: model.kv_layout.count_bytes(48)])
    assert model.free_blocks() == 0

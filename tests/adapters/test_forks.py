"""Forks of a sequence in a pool of KV blocks: what they share stays, and what there is no room for changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import BlockRules, CapacityError, Segment
from adapters.kv_blocks import BlockPool
from tests.support.loops import toy

SIZE = 4


def hold_tokens(pool: BlockPool, slot: int, tokens: int) -> None:
    pool.reserve([Segment(slot, 0, range(tokens), (0, 0))])


@given(st.integers(1, 40), st.data())
def test_a_fork_shares_whole_blocks_and_copies_the_rest(tokens, data):
    positions = data.draw(st.integers(1, tokens))
    shared = data.draw(st.integers(0, positions))
    pool = BlockPool(BlockRules(32, SIZE, 4))
    hold_tokens(pool, 0, tokens)
    free = pool.free
    copies = pool.fork(1, 0, positions, shared)
    ours, theirs = pool.table(1, positions), pool.table(0, positions)
    whole = shared // SIZE
    assert ours[:whole] == theirs[:whole]
    assert copies == list(zip(theirs[whole:], ours[whole:], strict=True))
    assert not set(ours[whole:]) & set(pool.table(0, tokens))
    assert pool.free == free - len(copies)
    assert pool.count_cached_positions(1) == positions
    pool.release(0)
    held_blocks = set(pool.table(1, positions))
    pool.reserve([Segment(2, 0, range(SIZE * pool.free), (0, 0))])
    assert not held_blocks & set(pool.table(2, 32 * SIZE)), "nobody writes to what a fork holds"
    pool.release(1)
    pool.release(2)
    assert pool.free == 32


def test_without_room_nothing_changes():
    pool = BlockPool(BlockRules(4, SIZE, 4))
    hold_tokens(pool, 0, 3 * SIZE)
    with pytest.raises(CapacityError, match="2 KV blocks are needed and 1 of 4 are free"):
        pool.fork(1, 0, 3 * SIZE, SIZE)
    assert pool.count_cached_positions(1) == 0
    pool.check([Segment(0, 0, range(2), (0, 0))], max_rows=8, max_context=64)  # its first block is still its own
    assert pool.fork(1, 0, 3 * SIZE, 2 * SIZE)
    pool.release(0)
    pool.release(1)
    assert pool.free == 4


@pytest.mark.parametrize("agree", [0.0, 0.3, 0.8, 1.0])
def test_a_simulated_draft_agrees_as_often_as_it_says(agree):
    tokens = [int(token) for token in np.random.default_rng(7).integers(97, 122, 400)]
    batch = [Segment(0, 0, tokens, (0, len(tokens)))]
    target, draft = (toy(script=script, rows=512).forward(batch).logits for script in ("", f"agree={agree}"))
    best = target.argmax(axis=1)
    assert np.mean(draft.argmax(axis=1) == best) == pytest.approx(agree, abs=0.08)
    places = (draft > np.take_along_axis(draft, best[:, None], 1)).sum(axis=1)
    assert places.max() <= 3
    if agree < 1.0:
        assert np.mean(places[places > 0] == 1) == pytest.approx(0.5, abs=0.12)
    assert np.array_equal(np.sort(draft, axis=1), np.sort(target, axis=1))

"""One suite over every adapter: what the contract promises, each promise as a test that could fail.

That rows are the same to the bit whatever stands beside them is in invariance_tests.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters.conformance.case import ROWS, SLOTS, Prepared, bits, load, pieces, run, text
from adapters.contract import (
    CapacityError,
    DeviceLost,
    ForkableKv,
    LoadedModel,
    LoadOptions,
    ModelRefused,
    Segment,
    Unsupported,
    silent,
)
from device_profiles.profile import Exactness


def test_forward_returns_the_rows_asked_for(model: LoadedModel) -> None:
    tokens = text(model, 10)
    every = run(model, 0, tokens, [10])
    assert every.shape == (10, model.spec.vocabulary_size)
    assert every.dtype == np.float32
    some = model.forward([Segment(1, 0, tokens, (4, 7))])
    assert np.array_equal(bits(some.logits), bits(every[4:7]))
    assert some.device_ms >= 0.0
    none = model.forward([Segment(2, 0, tokens, (0, 0)), Segment(3, 0, tokens, (9, 10))])
    assert np.array_equal(bits(none.logits[-1:]), bits(every[9:]))
    assert model.count_cached_positions(2) == 10


def test_the_best_logits_are_those_of_whole_rows(model: LoadedModel) -> None:
    most = model.capabilities.best_logits
    if not most:
        pytest.skip("its rows come back whole")
    tokens = text(model, 12)
    whole = run(model, 0, tokens, [12])
    for slot, count in enumerate(sorted({1, min(2, most), most}), 1):
        batch = [
            Segment(slot, 0, tokens, (4, 12), best=count, temperature=0.7),
            Segment(slot + 4, 0, tokens, (9, 12)),
            Segment(slot + 8, 0, tokens, (11, 12), best=min(2, count)),
        ]
        result = model.forward(batch)
        assert np.array_equal(bits(result.logits), bits(whole[9:]))
        rows = whole[[*range(4, 12), 11]]
        assert result.best is not None
        ids, given = result.best.ids, result.best.logits
        assert len(ids) == 9
        assert ids.shape[1] >= min(count, whole.shape[1])
        assert ids.dtype == np.uint32
        assert given.dtype == np.float32
        assert np.array_equal(ids, np.argsort(-rows, axis=1, kind="stable")[:, : ids.shape[1]])
        assert np.array_equal(bits(given), bits(np.take_along_axis(rows, ids, axis=1)))
        shares = np.exp((rows[:8] - rows[:8].max(axis=1, keepdims=True)).astype(np.float64) / 0.7)
        assert np.allclose(result.best.masses[:8], shares.sum(axis=1), rtol=1e-3, atol=0.0)
        if count > 1:
            assert all(np.array_equal(bits(result.best.read_row(row)), bits(rows[row])) for row in (0, 8))
    with pytest.raises(Unsupported):
        model.forward([Segment(0, 11, tokens[11:], (0, 1), best=most + 1)])


def require_rewinds(model: LoadedModel) -> None:
    """Skip a test of what slots that cannot be rolled back do not do."""
    if not model.capabilities.rewinds:
        pytest.skip("its slots cannot be rolled back")


def test_rollback_leaves_no_trace_of_what_was_rejected(model: LoadedModel) -> None:
    require_rewinds(model)
    tokens, wrong = text(model, 40), text(model, 12, seed=9)
    expected = run(model, 0, tokens, [40])
    run(model, 1, tokens[:20], [20])
    model.forward([Segment(1, 20, wrong, (0, 0))])
    assert model.count_cached_positions(1) == 32
    again = run(model, 1, tokens, [6, 14], start=20)
    assert np.array_equal(bits(again), bits(expected[20:]))
    assert model.count_cached_positions(1) == 40
    deeper = run(model, 1, tokens, [37], start=3)
    assert np.array_equal(bits(deeper), bits(expected[3:]))


def test_a_slot_that_cannot_be_rolled_back_goes_on_or_begins_anew(model: LoadedModel) -> None:
    if model.capabilities.rewinds:
        pytest.skip("its slots can be rolled back")
    tokens = text(model, 40)
    expected = run(model, 0, tokens, [40])
    for start in (1, 20, 39):
        with pytest.raises(Unsupported):
            model.forward([Segment(0, start, tokens[start:], (0, 1))])
    assert model.count_cached_positions(0) == 40
    assert np.array_equal(bits(run(model, 0, tokens, [13, 27])), bits(expected))
    model.share(0, tokens)
    assert model.attach(1, tokens) == 0
    model.discard(0)
    assert model.count_cached_positions(0) == 0
    assert np.array_equal(bits(run(model, 0, tokens, [40])), bits(expected))


def test_release_frees_blocks_and_forgets(model: LoadedModel) -> None:
    tokens = text(model, 70)
    first = run(model, 4, tokens, [70])
    assert model.free_blocks() < model.capabilities.total_blocks
    model.release(4)
    model.release(4)
    assert model.count_cached_positions(4) == 0
    assert model.free_blocks() == model.capabilities.total_blocks
    with pytest.raises(Unsupported):
        model.forward([Segment(4, 70, tokens[:2], (0, 1))])
    assert np.array_equal(bits(run(model, 4, tokens, [70])), bits(first))


@pytest.mark.parametrize(
    "segment",
    [
        Segment(SLOTS, 0, [5], (0, 1)),
        Segment(-1, 0, [5], (0, 1)),
        Segment(0, 1, [5], (0, 1)),
        Segment(0, -1, [5], (0, 1)),
        Segment(0, 0, [], (0, 0)),
        Segment(0, 0, [5, 6], (1, 3)),
        Segment(0, 0, [5, 6], (2, 1)),
        Segment(0, 0, [5] * (ROWS + 1), (0, 1)),
    ],
    ids=["slot", "negative-slot", "gap", "negative", "empty", "rows-behind", "rows-backwards", "too-many"],
)
def test_a_batch_outside_the_capabilities_is_unsupported_and_changes_nothing(
    model: LoadedModel, segment: Segment
) -> None:
    before = model.free_blocks()
    with pytest.raises(Unsupported):
        model.forward([segment])
    with pytest.raises(Unsupported):
        model.forward([Segment(7, 0, [5, 6], (0, 1)), segment])
    assert model.count_cached_positions(7) == 0
    assert model.free_blocks() == before


def test_one_slot_twice_in_a_batch_is_unsupported(model: LoadedModel) -> None:
    with pytest.raises(Unsupported):
        model.forward([Segment(0, 0, [5], (0, 1)), Segment(0, 0, [6], (0, 1))])
    with pytest.raises(Unsupported):
        model.forward([])


def test_a_full_pool_raises_before_anything_changes_and_serves_on_after_a_release(prepared: Prepared) -> None:
    small = load(prepared, kv_cache_bytes=3 << 20)
    caps = small.capabilities
    room = caps.total_blocks * caps.block_tokens
    assert room < 200 * caps.block_tokens
    tokens = text(small, caps.block_tokens)
    last = caps.slots - 1
    several = text(small, 8 * caps.block_tokens)
    for slot in range(last):
        for start in range(0, len(several), caps.max_batch_rows):
            batch = [Segment(slot, start, several[start : start + caps.max_batch_rows], (0, 0))]
            if small.count_needed_blocks(batch) > small.free_blocks():
                break
            small.forward(batch)
    while small.free_blocks():
        small.forward([Segment(last, small.count_cached_positions(last), tokens[: caps.block_tokens // 2], (0, 0))])
    before = {slot: small.count_cached_positions(slot) for slot in range(caps.slots)}
    growing = Segment(last, small.count_cached_positions(last), tokens * 2, (0, 1))
    assert small.count_needed_blocks([growing]) > 0
    with pytest.raises(CapacityError):
        small.forward([growing])
    assert {slot: small.count_cached_positions(slot) for slot in range(caps.slots)} == before
    for slot in (0, 1, 2, last):  # of a model with many layers the last one may hold all
        small.release(slot)
    small.forward([Segment(0, 0, tokens[:4], (3, 4))])
    small.close()


def copies_prefixes(model: LoadedModel) -> bool:
    """Return whether what a slot begins with takes blocks of its own."""
    rules = getattr(model, "block_rules", None)
    return rules is not None and rules.copies


def test_a_remembered_prefix_is_as_good_as_a_computed_one(model: LoadedModel) -> None:
    require_rewinds(model)
    size = model.capabilities.block_tokens
    tokens = text(model, 3 * size + 5)
    expected = run(model, 0, tokens, pieces(len(tokens)))
    assert model.attach(1, tokens) == 0  # nothing is remembered before it is shared
    model.share(0, tokens)
    free = model.free_blocks()
    assert model.attach(1, tokens) == 3 * size
    assert model.count_cached_positions(1) == 3 * size
    assert model.free_blocks() == free - (3 if copies_prefixes(model) else 0)  # two slots, one copy or two
    again = run(model, 1, tokens, [2, 3], start=3 * size)
    assert np.array_equal(bits(again), bits(expected[3 * size :]))
    other = [*tokens[: 2 * size], *text(model, size, seed=4)]
    assert model.attach(2, other) == 2 * size
    rest = run(model, 2, other, pieces(size), start=2 * size)
    model.release(0)
    model.release(1)
    assert np.array_equal(bits(rest), bits(run(model, 3, other, pieces(len(other)))[2 * size :]))
    assert model.attach(4, tokens[: 3 * size]) == 2 * size  # the last token is always computed
    with pytest.raises(Unsupported):
        model.attach(4, tokens)
    with pytest.raises(Unsupported):
        model.forward([Segment(4, size, tokens[:2], (0, 1))])  # it would write into what others read


def test_a_prefix_outlives_its_slot_until_the_room_is_needed(prepared: Prepared, model: LoadedModel) -> None:
    require_rewinds(model)
    caps = model.capabilities
    small_bytes = prepared.case.small_blocks * caps.block_tokens * model.spec.bytes_per_token
    small = load(prepared, kv_cache_bytes=small_bytes)
    caps = small.capabilities
    size, room = caps.block_tokens, caps.total_blocks
    first, second = text(small, 2 * size + 1, seed=1), text(small, 2 * size + 1, seed=2)
    expected = run(small, 0, first, pieces(len(first)))
    small.share(0, first)
    small.release(0)
    run(small, 0, second, pieces(len(second)))
    small.share(0, second)
    small.release(0)
    assert small.free_blocks() == room  # remembered blocks are free blocks
    assert small.attach(1, first) == 2 * size  # and used again, they are the younger ones
    assert np.array_equal(bits(run(small, 1, first, [1], start=2 * size)), bits(expected[2 * size :]))
    small.release(1)
    filler, padded = text(small, size, seed=3), max(2, caps.min_rows)
    slot, taken = 2, 0
    while taken < room - 2:  # all but the two blocks of the younger prefix
        held = small.count_cached_positions(slot)
        if held >= 4 * size and slot < SLOTS - 1:
            slot, held = slot + 1, 0
        small.forward([Segment(slot, held, filler[: size - padded], (0, 0))])
        small.forward([Segment(slot, held + size - padded, filler[:padded], (0, 0))])
        taken += 1
    assert small.attach(0, second) == 0
    assert small.attach(1, first) == 2 * size
    small.close()


def test_a_fork_goes_on_as_its_source_would_and_neither_disturbs_the_other(model: LoadedModel) -> None:
    if not isinstance(model, ForkableKv):
        pytest.skip("it forks no sequences")
    size = model.capabilities.block_tokens
    tokens, other = text(model, size + 12, seed=4), text(model, 8, seed=5)
    if len(tokens) > model.capabilities.max_context_tokens - 8:
        pytest.skip("its context holds no two blocks")
    expected = run(model, 0, tokens, pieces(len(tokens)))
    model.release(0)
    branch = [*tokens[: size + 4], *other]
    expected_branch = run(model, 0, branch, pieces(len(branch)))
    model.release(0)
    run(model, 0, tokens[: size + 8], pieces(size + 8))
    model.fork(2, 0, size + 4, size + 3)
    assert model.count_cached_positions(2) == size + 4
    batch = [Segment(0, size + 8, tokens[size + 8 :], (0, 4)), Segment(2, size + 4, other, (0, 8))]
    rows = model.forward(batch).logits
    assert np.array_equal(bits(rows[:4]), bits(expected[size + 8 :]))
    assert np.array_equal(bits(rows[4:]), bits(expected_branch[size + 4 :]))
    with pytest.raises(Unsupported, match="slot 2"):
        model.fork(2, 0, size, 0)
    with pytest.raises(Unsupported, match="were to be forked"):
        model.fork(3, 0, len(tokens) + 1, 0)
    model.release(0)  # what they share stays with whoever is left
    rows = model.forward([Segment(2, size + 4, other, (0, 8))]).logits
    assert np.array_equal(bits(rows), bits(expected_branch[size + 4 :]))
    model.release(2)
    assert model.free_blocks() == model.capabilities.total_blocks


def test_kernel_exactness_decodes(prepared: Prepared) -> None:
    loaded = load(prepared, exactness=Exactness.KERNEL)
    tokens = text(loaded, 20)
    rows = run(loaded, 0, tokens, [19, 1])
    assert np.isfinite(rows).all()
    assert loaded.capabilities.exactness is Exactness.KERNEL
    loaded.close()


def test_a_closed_model_is_lost_not_undefined(prepared: Prepared) -> None:
    loaded = load(prepared)
    loaded.close()
    loaded.close()
    with pytest.raises(DeviceLost):
        loaded.forward([Segment(0, 0, [5], (0, 1))])


def test_devices_are_listed_and_an_unknown_one_is_refused(prepared: Prepared) -> None:
    adapter = prepared.adapter
    assert prepared.case.device in [device.name for device in adapter.devices()]
    assert {device.adapter for device in adapter.devices()} == {adapter.name}
    with pytest.raises(Unsupported, match="NOPE"):
        adapter.load(prepared.path, LoadOptions(device="NOPE"), silent)


def test_a_damaged_source_is_refused_by_name(prepared: Prepared, tmp_path: Path) -> None:
    source = tmp_path / "damaged.gguf"
    source.write_bytes(prepared.case.damaged)
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(ModelRefused, match=prepared.case.damage_told):
        prepared.adapter.prepare(source, target, silent)


def test_garbage_that_is_discarded_reaches_nobody(prepared: Prepared, model: LoadedModel) -> None:
    """Runtimes multiply what a mask hides by zero, and NaN stays NaN then: nothing of it may be left in the blocks."""
    require_rewinds(model)
    size = model.capabilities.block_tokens
    tokens = text(model, 2 * size + size // 2)
    if len(tokens) > model.capabilities.max_context_tokens - 8:
        pytest.skip("its context holds no two blocks")
    expected = run(model, 0, tokens, pieces(len(tokens)))
    model.share(0, tokens)
    assert model.attach(1, tokens) == 2 * size
    poisoned = prepared.case.poison(model, 0)
    batch = [Segment(0, len(tokens), tokens[:2], (0, 2)), Segment(4, 0, tokens[:5], (0, 5))]
    rows = model.forward(batch).logits
    assert np.isfinite(rows[:2]).all() == (not poisoned)
    assert np.array_equal(bits(rows[2:]), bits(expected[:5]))  # nor does it reach who is in the same forward
    model.release(4)
    model.discard(0)
    model.discard(0)
    assert model.count_cached_positions(0) == 0
    assert model.attach(2, tokens) == 0
    rest = model.forward([Segment(1, 2 * size, tokens[2 * size :], (0, 1))]).logits  # who shared it has it still
    assert np.isfinite(rest).all() == (not poisoned or copies_prefixes(model))
    model.share(1, tokens[: 2 * size])
    assert model.attach(2, tokens) == 0
    model.release(1)
    assert model.free_blocks() == model.capabilities.total_blocks
    for count in (len(tokens), size // 2 + 1, 3):  # the same blocks, filled in part
        rows = run(model, 3, tokens[:count], pieces(count))
        assert np.array_equal(bits(rows), bits(expected[:count]))
        model.release(3)

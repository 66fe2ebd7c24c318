"""When pages go along with a stream, and when it is computed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.kv_move import (
    MOST_BYTES,
    MOST_MOVES,
    CopyRate,
    may_begin,
    observe_copy,
    price_move,
)

MB = 1_000_000
tokens = st.integers(0, 10_000)
rates = st.one_of(st.just(CopyRate()), st.builds(CopyRate, st.floats(1e5, 1e11)))


FAST = CopyRate(500.0 * MB)


def price(rate=FAST, *, count=1000, remembered=0, width=23_040.0, prefill_ms=1.0):
    return price_move(
        rate, tokens=count, remembered_tokens=remembered, bytes_per_token=width, prefill_ms_per_token=prefill_ms
    )


def test_the_default_model_breaks_even_at_about_23_mb_a_second():
    assert price(CopyRate(24.0 * MB)).moves
    assert not price(CopyRate(22.0 * MB)).moves
    assert "1043 ms, no less than 1000 ms" in price(CopyRate(22.2 * MB)).reason


@given(rates, tokens, tokens, st.floats(1.0, 1e6), st.floats(0.0, 50.0))
def test_what_is_faster_or_longer_goes_along_rather(rate, count, remembered, width, prefill_ms):
    given_price = price(rate, count=count, remembered=remembered, width=width, prefill_ms=prefill_ms)
    dearer = price(rate, count=count, remembered=remembered, width=width, prefill_ms=prefill_ms + 1.0)
    faster = price(
        CopyRate(2 * rate.assumed_bytes_per_s), count=count, remembered=remembered, width=width, prefill_ms=prefill_ms
    )
    known = price(rate, count=count, remembered=remembered + 1, width=width, prefill_ms=prefill_ms)
    assert given_price.moves <= min(dearer.moves, faster.moves)
    assert known.moves <= given_price.moves
    assert not price(rate, count=count, remembered=count, width=width, prefill_ms=prefill_ms).moves
    assert 3.0 <= given_price.patience_s <= 30.0


@given(st.lists(st.tuples(st.integers(0, 10**10), st.floats(-1.0, 1e6)), max_size=20))
def test_a_rate_stays_within_what_was_measured(moves):
    rate = CopyRate()
    seen = [length * 1000.0 / took_ms for length, took_ms in moves if length >= 65_536 and took_ms >= 0.01]
    for length, took_ms in moves:
        rate = observe_copy(rate, length, took_ms)
    if seen:
        assert min(seen) * 0.999 <= rate.bytes_per_s <= max(seen) * 1.001
    else:
        assert rate == CopyRate()
    assert rate.assumed_bytes_per_s > 0.0


@given(st.lists(st.integers(1, 2 * MOST_BYTES), max_size=12))
def test_moves_that_begin_stay_within_their_bounds(lengths):
    under_way: list[int] = []
    for length in lengths:
        if may_begin(sum(under_way), len(under_way), length):
            under_way.append(length)
    assert sum(under_way) <= MOST_BYTES
    assert len(under_way) <= MOST_MOVES


@pytest.mark.parametrize(("length", "begins"), [(MOST_BYTES, True), (MOST_BYTES + 1, False)])
def test_one_move_may_have_all_the_memory_that_there_is(length, begins):
    assert may_begin(0, 0, length) is begins

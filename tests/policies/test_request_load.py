"""How many requests a target has at once, by its rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.request_load import KNOWN_AFTER_MS, WINDOW_MS, RequestLoad, has_changed, observe_load

rounds = st.lists(st.tuples(st.integers(1, 256), st.floats(0.1, 2_000.0)), min_size=1, max_size=200)


@given(rounds)
def test_the_mean_lies_between_the_least_and_the_most(seen: list[tuple[int, float]]) -> None:
    load = RequestLoad()
    for sequences, round_ms in seen:
        load = observe_load(load, sequences, round_ms)
    counts = [sequences for sequences, _ in seen]
    assert min(counts) - 1e-6 <= load.sequences <= max(counts) + 1e-6
    assert load.rounds_ms == pytest.approx(sum(round_ms for _, round_ms in seen))
    assert load.is_known == (load.rounds_ms >= KNOWN_AFTER_MS)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(1.0, 500.0))
def test_it_follows_another_load_whatever_the_length_of_rounds(before: int, after: int, round_ms: float) -> None:
    load = observe_load(RequestLoad(), before, 100 * WINDOW_MS)
    spent_ms = 0.0
    while spent_ms < 5 * WINDOW_MS:
        load = observe_load(load, after, round_ms)
        spent_ms += round_ms
    assert load.sequences == pytest.approx(after, abs=0.01 * abs(after - before) + 1e-6)


@given(st.integers(1, 64), st.floats(1.0, 1e5))
def test_a_round_without_time_says_nothing(sequences: int, round_ms: float) -> None:
    load = observe_load(RequestLoad(), sequences, round_ms)
    assert observe_load(load, 2 * sequences, 0.0) == load


@given(st.integers(1, 256), st.integers(1, 256))
def test_twice_as_many_or_half_are_another_load_both_ways(planned: int, requests: int) -> None:
    assert has_changed(planned, requests) == has_changed(requests, planned)
    assert has_changed(planned, 2 * planned)
    assert not has_changed(planned, planned)

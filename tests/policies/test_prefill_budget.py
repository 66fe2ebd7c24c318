"""Properties of the bound on prefill beside decoding."""

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.prefill_budget import observe_prefill, rows_within

DECODE_MS, ROW_MS = st.floats(0.0, 500.0), st.floats(0.0, 50.0)
FORWARDS = st.lists(st.tuples(st.integers(1, 512), st.floats(0.0, 100.0), st.floats(0.0, 5000.0)), max_size=30)


@given(ROW_MS, DECODE_MS, st.floats(1.0, 2000.0), st.integers(16, 2000))
def test_the_forward_that_follows_stays_within_the_bound(row_ms, decode_ms, bound_ms, most):
    rows = rows_within(row_ms, decode_ms=decode_ms, bound_ms=bound_ms, most=most, least=16)
    assert 16 <= rows <= most
    if rows > 16:
        assert decode_ms + rows * row_ms <= max(bound_ms, 2 * decode_ms) * (1 + 1e-9)


@given(ROW_MS, DECODE_MS, st.floats(1.0, 2000.0), st.floats(0.0, 20.0))
def test_dearer_rows_are_never_given_more_room(row_ms, decode_ms, bound_ms, more_ms):
    bounds = {"decode_ms": decode_ms, "bound_ms": bound_ms, "most": 4096, "least": 16}
    assert rows_within(row_ms + more_ms, **bounds) <= rows_within(row_ms, **bounds)


def test_where_nothing_was_measured_the_least_is_given():
    assert rows_within(None, decode_ms=3.0, bound_ms=100.0, most=256, least=16) == 16


@given(FORWARDS)
def test_costs_stay_within_what_was_seen(forwards):
    row_ms = None
    for rows, decode_ms, forward_ms in forwards:
        row_ms = observe_prefill(row_ms, prefill_rows=rows, decode_ms=decode_ms, forward_ms=forward_ms)
    assert 0.0 <= (row_ms or 0.0) <= max((ms / rows for rows, _, ms in forwards), default=0.0)


def test_many_rows_teach_more_than_few():
    few = observe_prefill(1.0, prefill_rows=4, decode_ms=10.0, forward_ms=50.0)  # 10 ms a row, four times
    many = observe_prefill(1.0, prefill_rows=400, decode_ms=10.0, forward_ms=1210.0)  # 3 ms a row
    assert 1.0 < few < 1.5
    assert 2.3 < many < 3.0


def test_a_first_forward_is_believed():
    assert observe_prefill(None, prefill_rows=100, decode_ms=0.0, forward_ms=200.0) == 2.0

"""Properties of the bound on prefill beside decoding."""

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.prefill_budget import PrefillCost, observe_prefill, rows_within

COSTS = st.builds(PrefillCost, st.floats(0.0, 500.0), st.floats(0.0, 50.0))
FORWARDS = st.lists(st.tuples(st.integers(0, 512), st.booleans(), st.floats(0.0, 5000.0)), max_size=30)


@given(COSTS, st.floats(1.0, 2000.0), st.integers(16, 2000))
def test_the_forward_that_follows_stays_within_the_bound(cost, bound_ms, most):
    rows = rows_within(cost, bound_ms=bound_ms, most=most, least=16)
    assert 16 <= rows <= most
    if rows > 16:
        assert cost.row_ms is not None
        assert cost.decode_ms is not None
        assert cost.decode_ms + rows * cost.row_ms <= max(bound_ms, 2 * cost.decode_ms) * (1 + 1e-9)


@given(COSTS, st.floats(1.0, 2000.0), st.floats(0.0, 20.0))
def test_dearer_rows_are_never_given_more_room(cost, bound_ms, row_ms):
    dearer = PrefillCost(cost.decode_ms, (cost.row_ms or 0.0) + row_ms)
    dear = rows_within(dearer, bound_ms=bound_ms, most=4096, least=16)
    assert dear <= rows_within(cost, bound_ms=bound_ms, most=4096, least=16)


@given(FORWARDS)
def test_costs_stay_within_what_was_seen(forwards):
    cost = PrefillCost()
    for rows, decoding, forward_ms in forwards:
        cost = observe_prefill(cost, prefill_rows=rows, decoding=decoding, forward_ms=forward_ms)
    assert 0.0 <= (cost.decode_ms or 0.0) <= max((ms for *_, ms in forwards), default=0.0)
    assert 0.0 <= (cost.row_ms or 0.0) <= max((ms / rows for rows, _, ms in forwards if rows), default=0.0)


def test_many_rows_teach_more_than_few():
    before = PrefillCost(10.0, 1.0)
    few = observe_prefill(before, prefill_rows=4, decoding=True, forward_ms=50.0)  # 10 ms a row, four times
    many = observe_prefill(before, prefill_rows=400, decoding=True, forward_ms=1210.0)  # 3 ms a row
    assert 1.0 < (few.row_ms or 0.0) < 1.5
    assert 2.3 < (many.row_ms or 0.0) < 3.0


def test_a_forward_of_prefill_alone_teaches_the_row_and_nothing_about_decoding():
    cost = observe_prefill(PrefillCost(), prefill_rows=100, decoding=False, forward_ms=200.0)
    assert cost == PrefillCost(None, 2.0)
    assert observe_prefill(cost, prefill_rows=0, decoding=False, forward_ms=9.0) == cost

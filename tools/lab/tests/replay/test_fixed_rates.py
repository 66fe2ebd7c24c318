"""Rates of fixed depths, and the depth that they lead to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_lab.replay.fixed_rates import cap, curve

from device_profiles.cost import StepCost, estimate_round_tokens
from policies.speculation.cost_model import start_cost_model

COST = start_cost_model(StepCost((1.0, 2.0, 8.0, 32.0, 128.0), (7.3, 7.7, 10.9, 27.0, 95.0), 0.25))


@given(st.floats(0.05, 0.95), st.integers(1, 16), st.integers(1, 2), st.floats(0.0, 2000.0))
def test_a_rate_is_the_tokens_of_a_round_over_its_time(chance, sequences, min_rows, context):
    rates = curve((chance,), COST, sequences=sequences, context_tokens=context, most=12, min_rows=min_rows)
    assert rates[cap(rates)] == max(rates)
    for depth, rate in enumerate(rates):
        ms = COST.ms(sequences * max(1 + depth, min_rows), sequences, context)
        assert rate == pytest.approx(1000.0 * sequences * estimate_round_tokens(chance, depth) / ms)


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=12), st.floats(0.0, 0.5))
def test_nothing_is_drafted_where_nothing_pays(rates, margin):
    best = cap(rates, margin=margin)
    if best:
        assert rates[best] > rates[0] * (1.0 + margin)
    else:
        assert all(rate <= rates[0] * (1.0 + margin) for rate in rates)
    assert cap(sorted(rates, reverse=True)) == 0

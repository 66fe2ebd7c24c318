"""How many of a cheaper drafter's tokens are checked in a step: never at a loss, and more of surer ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.cascade import MEASURED_ROWS, MOST_CHECKED, StepTimes, count_checked_tokens

CHANCES = st.lists(st.floats(0.0, 1.0), max_size=12)
TIMES = st.lists(st.floats(0.1, 20.0), min_size=5, max_size=5).map(
    lambda ms: StepTimes(MEASURED_ROWS, tuple(sorted(ms)))
)
ROWS = st.integers(1, 20)


def gain_ms(chances: list[float], times: StepTimes, rows: int, count: int) -> float:
    saved, reached = 0.0, 1.0
    for chance in chances[:count]:
        reached *= chance
        saved += reached * times.estimate_ms(rows) / rows
    return saved - (times.estimate_ms(rows + count) - times.estimate_ms(rows))


@given(CHANCES, TIMES, ROWS)
def test_no_other_number_gains_more(chances, times, rows):
    tokens = count_checked_tokens(chances, times, rows)
    assert 0 <= tokens <= min(len(chances), MOST_CHECKED)
    best = max(gain_ms(chances, times, rows, count) for count in range(min(len(chances), MOST_CHECKED) + 1))
    assert gain_ms(chances, times, rows, tokens) >= best - 1e-9


@given(CHANCES, TIMES, ROWS, st.floats(0.0, 1.0))
def test_surer_tokens_are_not_checked_less(chances, times, rows, more):
    surer = [chance + (1.0 - chance) * more for chance in chances]
    assert count_checked_tokens(surer, times, rows) >= count_checked_tokens(chances, times, rows)


def test_nothing_is_checked_where_steps_were_not_timed_or_rows_cost_as_much_as_steps():
    assert count_checked_tokens([1.0] * 8, StepTimes(), 1) == 0
    assert count_checked_tokens([0.9] * 8, StepTimes(MEASURED_ROWS, tuple(map(float, MEASURED_ROWS))), 1) == 0
    assert count_checked_tokens([0.9] * 8, StepTimes(MEASURED_ROWS, (1.0,) * 5), 1) == 8

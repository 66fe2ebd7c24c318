"""What drafting takes where a draft model checks cheaper drafters' tokens, in cases that can be computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.planning.draft_yield import MOST_CHECKED, estimate_drafting_ms
from policies.planning.plan import CheaperDrafter

CHANCES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).map(tuple)


def flat_ms(rows: float) -> float:
    """A step that takes 10 ms whatever its rows."""
    return 10.0


def steep_ms(rows: float) -> float:
    """A step of which each row takes as long as the first."""
    return 10.0 * rows


def test_sure_tokens_save_all_further_steps_and_rows_at_full_price_save_nothing() -> None:
    sure = CheaperDrafter("sure", (1.0,))
    assert estimate_drafting_ms(flat_ms, (), 8) == pytest.approx(80.0)
    assert estimate_drafting_ms(flat_ms, (sure,), 8) == pytest.approx(10.0)
    assert estimate_drafting_ms(steep_ms, (sure,), 8) == pytest.approx(estimate_drafting_ms(steep_ms, (), 8))


def test_half_of_the_steps_with_a_token_that_is_right_half_of_the_time() -> None:
    some = CheaperDrafter("some", (0.5, 0.0), coverage=0.5)
    assert estimate_drafting_ms(flat_ms, (some,), 5) == pytest.approx(5 / 1.25 * 10.0)


def test_a_cheaper_model_takes_its_own_steps_and_less_where_it_has_a_cheaper_one() -> None:
    text = CheaperDrafter("text", (1.0,))
    small = CheaperDrafter("small", (1.0,), step_share=0.1)
    assert estimate_drafting_ms(flat_ms, (small,), 5) == pytest.approx(10.0 + 4 * 0.1 * 10.0)
    chained = CheaperDrafter("small", (1.0,), step_share=0.1, cheaper=(text,))
    assert estimate_drafting_ms(flat_ms, (chained,), 5) == pytest.approx(10.0 + 0.1 * 10.0)
    dear = CheaperDrafter("dear", (0.3,), step_share=0.9)
    assert estimate_drafting_ms(flat_ms, (dear,), 5) == pytest.approx(50.0), (
        "what takes more than it saves is not asked"
    )


@given(CHANCES, st.floats(0.0, 1.0), st.floats(0.0, 1.5), st.integers(0, 12), st.floats(0.0, 5.0))
def test_a_cascade_never_takes_longer_and_no_less_than_the_steps_it_cannot_save(
    acceptance: tuple[float, ...], coverage: float, share: float, depth: int, row_ms: float
) -> None:
    def step_ms(rows: float) -> float:
        return 5.0 + row_ms * rows

    alone = estimate_drafting_ms(step_ms, (), depth)
    ms = estimate_drafting_ms(step_ms, (CheaperDrafter("c", acceptance, coverage, share),), depth)
    assert ms <= alone
    if depth:
        assert ms >= step_ms(2.0) * min(1.0, depth / (1.0 + MOST_CHECKED)) - 1e-9

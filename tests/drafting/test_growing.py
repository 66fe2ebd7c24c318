"""When a draft of a model goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.worker.drafting.cache import DraftSequence
from orchestrator.worker.drafting.growing import GrowingDraft
from orchestrator.worker.drafting.port import Ask
from policies.sampling import Sampling

chances = st.floats(0.01, 1.0)


def grow(certainty: float, usual: float, least: float, tokens: int, limit: int = 8) -> GrowingDraft:
    known = DraftSequence("a", [1], Sampling(), 1, False, None)
    growing = GrowingDraft(Ask("a", limit), known, least, {}, usual)
    growing.tokens, growing.certainty = [7] * tokens, certainty
    return growing


@given(chances, chances, chances, st.integers(1, 7))
def test_a_token_more_is_drafted_where_it_will_likely_be_right_itself(certainty, usual, least, tokens):
    assert grow(certainty, usual, least, tokens).goes_on == (certainty * usual >= least)
    assert not grow(certainty, usual, least, tokens, limit=tokens).goes_on


@given(chances, chances)
def test_the_first_token_is_not_asked_about(usual, least):
    assert grow(1.0, usual, least, 0).goes_on

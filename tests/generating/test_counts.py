"""Counted outputs: as by counting them one by one, bounded, and as sure as they are right on other texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.generating.data import Text
from orchestrator.worker.drafting.counts import (
    UncountableTokens,
    build_entries,
    count_contexts,
    list_positions,
    measure_agreement,
)
from orchestrator.worker.drafting.statistics import MOST_CONTEXT, MOST_TOKEN, pack_context

texts_of_tokens = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=40), min_size=1, max_size=4)


def text(tokens: Sequence[int], head: int = 1, number: int = 0) -> Text:
    """A text whose tokens behind the head are the target's first choices."""
    own = np.array(tokens[head:], np.int32)[:, None]
    return Text(number, np.array(tokens, np.int32), head, own, np.zeros(own.shape, np.float16))


def count_slowly(texts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], tuple[float, set[int]]]:
    """p of the best token of each context, and all tokens that have it, by the formula."""
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for tokens in texts:
        for place in range(1, len(tokens)):
            for length in range(1, min(place, MOST_CONTEXT) + 1):
                counts.setdefault(tuple(tokens[place - length : place]), Counter())[tokens[place]] += 1

    def p_of(context: tuple[int, ...], token: int) -> float:
        if not context:
            return 0.0
        own = counts[context]
        total, distinct = own.total(), len(own)
        return (own[token] + distinct * p_of(context[1:], token)) / (total + distinct)

    found = {}
    for context, own in counts.items():
        if len(context) == MOST_CONTEXT and own.total() < 2:
            continue
        every = {token: p_of(context, token) for token in range(4)}
        best = max(every.values())
        found[context] = (best, {token for token, p in every.items() if p == pytest.approx(best)})
    return found


@given(texts_of_tokens)
def test_contexts_are_counted_as_one_by_one(texts):
    slowly = count_slowly(texts)
    counted = count_contexts(list_positions([text(tokens) for tokens in texts]))
    found = {
        int(key): (p, int(token))
        for one in counted
        for key, token, p in zip(one.keys, one.best, one.best_p, strict=True)
    }
    assert set(found) == {pack_context(context) for context in slowly}
    for context, (p, best) in slowly.items():
        assert found[pack_context(context)][0] == pytest.approx(p)
        assert found[pack_context(context)][1] in best


@given(texts_of_tokens, st.integers(1, 20))
def test_a_bounded_table_keeps_what_was_there_most_often(texts, most):
    positions = list_positions([text(tokens) for tokens in texts])
    counted = count_contexts(positions)
    entries = build_entries(counted, counted, positions, most)
    totals = {int(key): int(total) for one in counted for key, total in zip(one.keys, one.totals, strict=True)}
    kept = [totals[int(key)] for key in entries.keys]
    assert len(kept) == min(most, len(totals))
    assert sorted(kept, reverse=True) == sorted(totals.values(), reverse=True)[: len(kept)]
    assert (np.diff(entries.keys.astype(np.int64)) > 0).all()
    assert ((entries.chances >= 0) & (entries.chances <= 1)).all()


def test_chances_are_what_held_out_texts_say():
    """0 is followed by 1 wherever it was counted, and not always in texts that were not."""
    counted = count_contexts(list_positions([text([0, 1] * 300)]))
    held_out = list_positions([text([0, 1] * 200), text([0, 1, 0, 2] * 50)])
    entries = build_entries(counted, counted, held_out, 1000)
    by_key = dict(zip(entries.keys.tolist(), entries.chances.tolist(), strict=True))
    assert 0.6 < by_key[pack_context([0, 1, 0])] < 0.95
    agreement = measure_agreement(counted, {"own": held_out, "none": list_positions([])})
    assert 0.7 < agreement["own"] < 0.95
    assert "none" not in agreement


def test_what_the_target_did_not_write_is_context_alone():
    positions = list_positions([text([5, 6, 7, 8], head=3), text([1, 2], head=2)])
    assert positions.labels.tolist() == [8]
    assert positions.keys[:, 0].tolist() == [pack_context([7]), pack_context([6, 7]), pack_context([5, 6, 7])]


def test_tokens_that_no_key_can_hold_are_refused():
    with pytest.raises(UncountableTokens, match="has more than"):
        list_positions([text([1, MOST_TOKEN + 1])])

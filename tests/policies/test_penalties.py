"""Bias and penalties are their definitions; a draft's rows are judged with the counts of the drafts before them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.sampling import NotFinite, Sampling, verify_draft
from policies.sampling.penalties import Penalties, without

VOCABULARY = 8
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.7, 1.0]),
    seed=st.integers(0, 2**32),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.5]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.5]),
)


def rows_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, VOCABULARY)).astype(np.float32)


def by_definition(row: np.ndarray, sampling: Sampling, prompt: list[int], output: list[int]) -> np.ndarray:
    row = row.copy()
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias)
    for token in {*prompt, *output}:
        repetition = np.float32(sampling.repetition_penalty)
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token, count in Counter(output).items():
        taken = np.float32(sampling.frequency_penalty) * np.float32(count) + np.float32(sampling.presence_penalty)
        row[token] -= taken
    return row


@given(SAMPLINGS, st.integers(0, 2**32), TOKENS, TOKENS)
@settings(max_examples=300)
def test_a_row_is_changed_as_the_definitions_say(sampling, table, prompt, output):
    row = rows_of(table, 1)[0]
    before = row.copy()
    penalties = Penalties.of(sampling, prompt)
    expected = by_definition(row, sampling, prompt, output)
    if penalties is None:
        assert np.array_equal(expected, row)
    else:
        assert np.array_equal(penalties.apply_penalties(row, Counter(output), []), expected)
    assert np.array_equal(row, before)


@given(SAMPLINGS, st.integers(0, 2**32), TOKENS, st.integers(0, 12), st.data())
@settings(max_examples=300)
def test_whatever_is_drafted_the_same_tokens_come_out(sampling, table, prompt, quiet, data):
    """`quiet`: a token is banned until so many are there, as stop tokens are by min_tokens."""
    rows = rows_of(table, 12)

    def shape_row(row: np.ndarray, output: list[int]) -> np.ndarray:
        row = by_definition(row, sampling, prompt, output)
        return without(row, [2]) if len(output) < quiet else row

    def judge_draft(draft: list[int], output: list[int]) -> tuple[int, ...]:
        here = rows[len(output) : len(output) + len(draft) + 1]

        def shape(row, taken):
            return shape_row(row, [*output, *taken])

        return verify_draft(here, draft, sampling, len(output), shape).tokens

    plain: list[int] = []
    while len(plain) < 12:
        plain += judge_draft([], plain)
    out: list[int] = []
    while len(out) < 11:
        depth = data.draw(st.integers(0, min(8, 11 - len(out))))
        right = data.draw(st.integers(0, depth))
        wild = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=depth - right, max_size=depth - right))
        took = judge_draft(plain[len(out) : len(out) + right] + wild, out)
        assert len(took) > right
        out += took
    assert out == plain[: len(out)]
    assert 2 not in out[:quiet]


def test_nothing_may_follow_ends_the_verdict_with_the_accepted_drafts():
    rows = np.zeros((4, VOCABULARY), np.float32)
    rows[:, 5] = 1.0
    judged = verify_draft(rows, [5, 5, 5], Sampling(), 0, lambda row, taken: None if len(taken) == 2 else row)
    assert (judged.accepted, judged.tokens) == (2, (5, 5))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_shape_cannot_cover_garbage_up(bad):
    rows = rows_of(1, 1)
    rows[0, 3] = bad
    with pytest.raises(NotFinite):
        verify_draft(rows, [], Sampling(), 0, lambda row, _: without(row, [3]))


@given(st.integers(0, 2**32), st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=VOCABULARY - 1))
def test_what_is_banned_is_never_chosen(table, banned):
    row = rows_of(table, 1)
    for sampling in (
        Sampling(),
        Sampling(2.0, seed=table),
        Sampling(2.0, top_k=6, seed=table),
        Sampling(2.0, top_p=0.99, seed=table),
        Sampling(2.0, top_k=7, top_p=0.9, min_p=0.01, seed=table),
    ):
        judged = verify_draft(row, [], sampling, 3, lambda row, _: without(row, sorted(banned)))
        assert judged.tokens[0] not in banned

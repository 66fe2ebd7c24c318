"""Scores are the log-softmax of a row, the same alone and beside others."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from policies.sampling.logprobs import LEAST, score

VOCABULARY = 300


@given(st.integers(0, 2**32), st.integers(0, VOCABULARY - 1), st.integers(0, 20))
def test_scores_are_the_log_softmax(table, token, top):
    row = np.random.default_rng(table).normal(0, 4, VOCABULARY).astype(np.float32)
    row[7] = row[9]  # equals
    expected = log_softmax(row.astype(np.float64))
    scores = score(row, token, top)
    assert math.isclose(scores.logprob, expected[token], abs_tol=1e-9)
    order = sorted(range(VOCABULARY), key=lambda each: (-row[each], each))[:top]
    assert [each for each, _ in scores.top] == order
    assert np.allclose([value for _, value in scores.top], expected[order], atol=1e-9)
    if token in order:
        assert dict(scores.top)[token] == scores.logprob


@given(st.integers(0, 2**32), st.integers(0, 7))
def test_a_row_scores_the_same_to_the_bit_wherever_it_lies(table, offset):
    rows = np.random.default_rng(table).normal(0, 4, (3, 49_153)).astype(np.float32)
    alone = score(rows[1].copy(), 5, 3)
    shifted = np.empty(49_153 + offset, np.float32)[offset:]
    shifted[:] = rows[1]
    assert score(rows[1], 5, 3) == alone == score(shifted, 5, 3)


def test_what_cannot_be_is_the_least_that_json_can_say():
    row = np.array([0.0, -np.inf], np.float32)
    assert score(row, 1, 2).logprob == LEAST
    assert score(row, 0, 2).top == ((0, 0.0), (1, LEAST))

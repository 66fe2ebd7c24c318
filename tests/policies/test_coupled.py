"""The verdict does not depend on the draft, and samples are distributed as the filtered softmax says."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.sampling import (
    BestRows,
    CoupledDraft,
    NotFinite,
    Sampling,
    choose,
    noise,
    verify_coupled_drafts,
    verify_draft,
)
from policies.sampling.coupled import greedy
from policies.sampling.filters import survivors
from tests.support.best_logits import sum_masses

VOCABULARY = 12


def rows_of(seed: int, count: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, vocabulary)).astype(np.float32)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 7]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    typical_p=st.sampled_from([1.0, 1.0, 0.4, 0.9]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
)


@given(SAMPLINGS, st.integers(0, 2**32), st.integers(0, 500), st.data())
@settings(max_examples=300)
def test_whatever_is_drafted_the_same_tokens_come_out(sampling, table, start, data):
    """Decode 8 positions with arbitrary drafts of arbitrary depths; compare with one token at a time."""
    rows = rows_of(table, 9)
    plain = [choose(rows[i], sampling, start + i) for i in range(9)]
    out: list[int] = []
    while len(out) < 8:
        depth = data.draw(st.integers(0, 8 - len(out)))
        right = data.draw(st.integers(0, depth))
        guesses = plain[len(out) : len(out) + right] + data.draw(
            st.lists(st.integers(0, VOCABULARY - 1), min_size=depth - right, max_size=depth - right)
        )
        judged = verify_draft(rows[len(out) : len(out) + depth + 1], guesses, sampling, start + len(out))
        assert judged.accepted >= right
        assert len(judged.tokens) == judged.accepted + 1
        assert list(judged.tokens[:-1]) == guesses[: judged.accepted]
        out.extend(judged.tokens)
    assert out == plain[: len(out)]


@given(st.lists(st.tuples(SAMPLINGS, st.integers(0, 2**32), st.integers(0, 500)), max_size=6), st.data())
@settings(max_examples=200)
def test_judged_side_by_side_or_alone_the_same_tokens_come_out(sequences, data):
    asked = []
    for sampling, table, position in sequences:
        rows = rows_of(table, data.draw(st.integers(1, 5)))
        right = [choose(row, sampling, position + index) for index, row in enumerate(rows[:-1])]
        draft = [token if data.draw(st.booleans()) else 3 for token in right]
        asked.append(CoupledDraft(rows, draft, sampling, position))
    assert verify_coupled_drafts(asked) == [verify_draft(*own[:4]) for own in asked]


@given(
    SAMPLINGS, st.integers(0, 2**32), st.integers(0, 500), st.integers(0, 4), st.booleans(), st.floats(0.9991, 1.0009)
)
@settings(max_examples=400)
def test_the_best_logits_decide_as_the_whole_row_does(sampling, table, position, more, coarse, off):
    """`coarse`: many are equal, as in 16 bits. `off`: how far the mass is from what it is."""
    rows = rows_of(table, 1, 200)
    rows = np.round(rows) if coarse else rows
    count = sampling.count_best_logits(20)
    assume(count > 0)
    ids = np.argsort(-rows, axis=1, kind="stable")[:, : count + more].astype(np.uint32)
    best = np.take_along_axis(rows, ids, axis=1)
    expected = verify_draft(rows, [], sampling, position)
    if sampling.rule == "greedy":
        assert verify_draft(best, [], sampling, position, ids=ids) == expected
    masses = (off * sum_masses(rows, [sampling.temperature])).astype(np.float32)
    known = BestRows(ids, masses, rows.__getitem__)
    assert verify_coupled_drafts([CoupledDraft(best, [], sampling, position, known)]) == [expected]


def exact_probabilities(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The filtered distribution, by the definitions: temperature, min-p, top-k, top-p."""
    scaled = row.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < sampling.min_p * p.max()] = 0.0
    if sampling.top_k:
        p[np.argsort(-p, kind="stable")[sampling.top_k :]] = 0.0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    if sampling.top_p < 1.0:  # off at 1: a sum of many shares reaches 1 by rounding before the last one
        p[order[before >= sampling.top_p]] = 0.0
    return np.asarray(p / p.sum())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7),
        Sampling(1.3, top_k=5),
        Sampling(0.8, top_p=0.8),
        Sampling(1.0, min_p=0.1),
        Sampling(0.9, top_k=8, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_chi_square_against_exact_probabilities(sampling):
    """5,000 draws over positions and over seeds, with a draft that is right every other time."""
    from scipy import stats  # here: whoever only collects tests needs no second for it

    row = rows_of(3, 1)[0]
    expected = exact_probabilities(row, sampling)
    for over_seeds in (False, True):
        counts = np.zeros(VOCABULARY)
        for draw in range(5_000):
            rule = Sampling(
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.min_p,
                seed=draw if over_seeds else 11,
            )
            draft = [int(expected.argmax())] if draw % 2 else []
            judged = verify_draft(np.stack([row, row])[: len(draft) + 1], draft, rule, 5 if over_seeds else draw)
            counts[judged.tokens[0]] += 1
        kept = expected > 0
        assert counts[~kept].sum() == 0
        if kept.sum() > 1:
            assert stats.chisquare(counts[kept], expected[kept] * counts.sum()).pvalue > 1e-3


@given(st.integers(0, 2**32), SAMPLINGS.filter(lambda s: s.temperature > 0))
def test_filters_keep_what_their_definitions_keep(table, sampling):
    row = rows_of(table, 1, 3000)[0] * 2
    kept = survivors(row, sampling, float(row.max()))[0]
    assert sorted(kept.tolist()) == np.flatnonzero(exact_probabilities(row, sampling)).tolist()


@given(st.integers(0, 2**32), st.integers(0, 2**20), st.sampled_from([0.2, 1.0, 2.0, 10.0]))
@settings(max_examples=50)
def test_screening_by_hash_bits_never_misses_the_winner(table, position, temperature):
    row = rows_of(table, 1, 20_000)[0]
    sampling = Sampling(temperature, seed=table)
    every = np.arange(len(row), dtype=np.uint32)
    scores = (row.astype(np.float64) - row.max()) / temperature + noise.gumbel(table, position, every)
    assert choose(row, sampling, position) == int(scores.argmax())


def test_greedy_takes_the_lowest_of_equals():
    row = np.zeros((1, 6), np.float32)
    row[0, [2, 4]] = 1.0
    assert greedy(row) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_is_refused(temperature, bad):
    row = rows_of(1, 1)
    row[0, 3] = bad
    sound = CoupledDraft(rows_of(2, 1), [], Sampling(temperature), 0)
    for sampling in (Sampling(temperature), Sampling(temperature, top_p=0.9)):
        with pytest.raises(NotFinite):
            verify_draft(row, [], sampling, 0)
        with pytest.raises(NotFinite):
            verify_coupled_drafts([sound, CoupledDraft(row, [], sampling, 0)])

"""The noise is a pure function, uniform, and independent between positions, seeds and tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.sampling import noise

TOKENS = np.arange(4096, dtype=np.uint32)
SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)


@given(SEEDS, POSITIONS, st.lists(st.integers(0, 200_000), min_size=1, max_size=50))
def test_a_token_s_noise_does_not_depend_on_which_others_are_asked_for(seed, position, tokens):
    together = noise.gumbel(seed, position, np.array(tokens, np.uint32))
    alone = [noise.gumbel(seed, position, np.array([token], np.uint32))[0] for token in tokens]
    assert together.tolist() == alone


@given(st.lists(st.tuples(SEEDS, POSITIONS, st.integers(1, 40)), max_size=5))
def test_the_noise_of_several_places_is_that_of_each(asked):
    tokens = [TOKENS[7 * count : 8 * count] for _, _, count in asked]
    together = noise.gumbels([(seed, position) for seed, position, _ in asked], tokens)
    alone = [noise.gumbel(seed, position, own) for (seed, position, _), own in zip(asked, tokens, strict=True)]
    assert [own.tolist() for own in together] == [own.tolist() for own in alone]


@given(SEEDS, POSITIONS)
def test_high_bits_bound_the_uniform_from_both_sides(seed, position):
    high = noise.high_bits(seed, position, TOKENS).astype(np.float64)
    exact = noise.uniform(seed, position, TOKENS) * 2.0**32
    assert np.all((high <= exact) & (exact <= high + 1.0))


@given(SEEDS, POSITIONS)
def test_noise_is_finite(seed, position):
    assert np.isfinite(noise.gumbel(seed, position, TOKENS)).all()


def test_uniform_over_tokens_positions_and_seeds():
    from scipy import stats  # here: whoever only collects tests needs no second for it

    by_token = noise.uniform(1, 1, np.arange(200_000, dtype=np.uint32))
    one = np.array([77], np.uint32)
    by_position = np.array([noise.uniform(1, position, one)[0] for position in range(20_000)])
    by_seed = np.array([noise.uniform(seed, 5, one)[0] for seed in range(20_000)])
    for sample in (by_token, by_position, by_seed):
        assert stats.kstest(sample, "uniform").pvalue > 1e-4


def test_neighbouring_positions_seeds_and_tokens_are_uncorrelated():
    rows = np.stack([noise.uniform(9, position, TOKENS) for position in range(64)])
    seeds = np.stack([noise.uniform(seed, 3, TOKENS) for seed in range(64)])
    for sample in (rows, seeds, rows.T[:64]):
        correlation = np.corrcoef(sample) - np.eye(64)
        assert np.abs(correlation).max() < 6.0 / np.sqrt(sample.shape[1])
    shifted = np.corrcoef(rows[0][1:], rows[0][:-1])[0, 1]
    assert abs(shifted) < 6.0 / np.sqrt(len(TOKENS))


def test_a_seed_is_taken_modulo_two_to_the_64():
    assert np.array_equal(noise.gumbel(-1, 4, TOKENS), noise.gumbel(2**64 - 1, 4, TOKENS))


@given(SEEDS, POSITIONS, st.integers(0, 2**32 - 1), st.sampled_from([1, 16_384, 16_385, 40_000]))
def test_the_loudest_are_those_whose_high_bits_are_no_less(seed, position, least, vocabulary):
    every = np.arange(vocabulary, dtype=np.uint32)
    expected = every[noise.uniform(seed, position, every) * 2.0**32 >= least]
    assert noise.loudest(seed, position, least, vocabulary).tolist() == expected.tolist()
